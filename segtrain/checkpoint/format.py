"""The checkpoint format: a dict of tensors and plain data, in a file of torch.save.

Files are written atomically. They are loaded with weights_only, so a checkpoint from a stranger
cannot run code.
"""

import os
import pickle
from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Annotated, Any, NamedTuple, TypeVar

import torch
from pydantic import ConfigDict, Field, TypeAdapter, ValidationError
from safetensors import SafetensorError, safe_open
from typing_extensions import TypedDict

from segtrain import __version__, files, plugins
from segtrain.config import Config
from segtrain.config.plugin_names import all_plugins
from segtrain.data.check.channels import Channels, channels_from_json
from segtrain.data.read.classes import ClassFile, class_file_from_json
from segtrain.data.read.find import IMAGE_SUFFIXES
from segtrain.data.read.fingerprint import DataFingerprint, fingerprint_from_json
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.files import manifest, torch_file
from segtrain.files.manifest import Entry, HashingFile
from segtrain.text import MAX_NAME, printable

T = TypeVar("T")

FORMAT_VERSION = 1

LAST, BEST = "last.pt", "best.pt"


class BestScore(TypedDict):
    """The best evaluation of a run."""

    step: int
    by: str  # `EvalConfig.best_name`: which score it is
    score: float


class PluginFields(TypedDict):
    """Code of somebody's own that the run named in its config; see `plugins.Plugin`."""

    kind: str
    name: str
    source: str  # the module or file, as it was called in the training; never imported from here
    package: str | None  # which has the module, and its version
    sha256: str


class Checkpoint(NamedTuple):
    """The contents of a checkpoint; the names of the fields are part of the file format."""

    step: Annotated[int, Field(ge=0)]  # optimizer steps done
    config: str  # the Config as JSON
    classes: str  # the ClassFile as JSON
    model: dict[str, Any]
    average: dict[str, Any] | None  # the averaged weights, if the run keeps them
    optimizer: dict[str, Any] | None  # None: the file is for inference only
    scaler: dict[str, Any] | None  # the same
    best: BestScore | None
    evaluated: int = 0  # the step of the newest evaluation; 0: none
    data: str | None = None  # the DataFingerprint as JSON; None: the model comes from elsewhere
    shares: dict[str, Any] | None = None  # `SharePasses.fields`
    start: dict[str, Any] | None = None  # `InitialWeights.fields`
    centroids: str | None = None  # `Centroids.sha256` with data.class_uniform
    # With task multilabel, of each class, fitted by the newest evaluation.
    thresholds: list[Annotated[float, Field(ge=0, le=1)]] | None = None
    plugins: list[PluginFields] | None = None  # None: all is segtrain's own
    channels: str | None = None  # the Channels as JSON; None: not known
    segtrain: str = __version__  # that wrote the file


_CHECKPOINT = TypeAdapter(Checkpoint, config=ConfigDict(strict=True))


def save(path: Path, checkpoint: Checkpoint) -> None:
    """Writes `checkpoint` to `path` atomically; raises as `write_temporary`."""
    with write_temporary(path, checkpoint) as (temporary, _):
        temporary.replace(path)
        # Without this a power cut could undo the rename.
        files.sync_directory(path.parent)


@contextmanager
def write_temporary(path: Path, checkpoint: Checkpoint) -> Iterator[tuple[Path, Entry]]:
    """Writes a temporary file beside `path`, fsyncs and verifies it; yields it with its entry.

    Rename it to `path` inside the `with` block: afterwards it is removed.

    Raises:
        ExecutionError: the disk is full, or the directory cannot be written, here or by the caller.
        CheckpointError: the checkpoint cannot be loaded again.
    """
    content = {"format": FORMAT_VERSION, **checkpoint._asdict(), "segtrain": __version__}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary(path) as temporary:
            with temporary.open("xb") as file:
                hashing = HashingFile(file)
                torch.save(content, hashing)
                file.flush()
                os.fsync(file.fileno())
            # Content that weights_only refuses, such as a NumPy array, must be found now and not
            # when the run is resumed. The SHA-256 is compared below.
            load(temporary, verified=True)
            if manifest.sha256_of(temporary) != hashing.sha256():
                raise OSError("the disk gives back other bytes than were written")
            yield temporary, Entry(checkpoint.step, hashing.num_bytes, hashing.sha256())
    except (OSError, RuntimeError) as error:
        # If a write fails or Ctrl-C interrupts it, torch.save raises a RuntimeError of its own,
        # whose context is the cause.
        cause = error if isinstance(error, OSError) else error.__context__
        if isinstance(cause, KeyboardInterrupt):
            raise cause from None
        if isinstance(cause, OSError):
            raise ExecutionError(f"{path}: cannot write the checkpoint: {cause}") from cause
        raise


def num_bytes(content: Any) -> int:
    """About how many bytes a checkpoint, or a part of one, takes on disk."""
    if isinstance(content, torch.Tensor):
        return content.nbytes + 512  # its header in the archive
    if isinstance(content, dict):
        content = list(content.values())
    if isinstance(content, list | tuple):
        return sum(map(num_bytes, content))
    return len(content) if isinstance(content, str) else 32


def load(path: Path, *, verified: bool = False) -> Checkpoint:
    """The checkpoint in `path`, on the CPU.

    verified: the caller compares the SHA-256 of the file, so its CRC-32 are not compared here.

    Raises:
        CheckpointError: it is damaged or not segtrain's.
        ExecutionError: this user may not read it; a run must not take an older one for that.
    """
    mistaken = {".yaml": "a config", ".yml": "a config"} | dict.fromkeys(IMAGE_SUFFIXES, "an image")
    mistaken |= {".onnx": "an exported graph", ".pt2": "an exported graph"}
    if kind := mistaken.get(path.suffix.lower()):
        raise CheckpointError(f"{path}: this is {kind}; name a run directory or a checkpoint")
    try:
        if path.suffix == ".safetensors":
            return _load_exported(path)
        return _parse(_load_verified(path, verified))
    except pickle.UnpicklingError:
        # torch's own message recommends weights_only=False, which would run the code.
        problem = (
            "refused: it holds more than tensors and plain data, which could run code; or it is "
            "damaged, or no checkpoint at all"
        )
    except PermissionError as error:
        raise ExecutionError(f"{path}: cannot be read: permission denied") from error
    except OSError as error:
        problem = f"cannot be read: {(error.strerror or str(error)).lower()}"
    except (torch_file.DamagedError, SafetensorError):
        problem = "damaged, cut short or not a checkpoint"
    except _ForeignError as error:
        problem = str(error)
    raise CheckpointError(f"{path}: {problem}")


def _load_verified(path: Path, verified: bool) -> Any:
    """The content of `path`, verified by the manifest; safe while a run replaces the file.

    verified: as in `load`.
    """
    while True:
        # Verify and load the same open file: between two calls of open() a run could replace it.
        with files.open_regular(path) as file:
            try:
                compared = manifest.verify(path, file)
            except CheckpointError:
                if files.is_same_file(file.fileno(), path):
                    raise
                # A run has replaced the file meanwhile: the manifest is newer than `file`.
                continue
            file.seek(0)
            return torch_file.load(file, verified=verified or compared)


def _load_exported(path: Path) -> Checkpoint:
    """What `segtrain export --format safetensors` wrote, as a checkpoint for inference."""
    with files.open_regular(path):
        pass  # refuses a pipe, for which safetensors would wait
    with safe_open(path, framework="pt") as file:
        about = file.metadata() or {}
        try:
            weights = {key: file.get_tensor(key) for key in file.keys()}  # noqa: SIM118
        except (KeyError, AttributeError, TypeError) as error:
            raise _ForeignError(f"torch has no such type of numbers: {error}") from error
    if not {"segtrain_version", "step", "config", "classes"} <= about.keys():
        raise _ForeignError(
            "its metadata are not those of segtrain export; for the weights of another program "
            "use segtrain convert"
        )
    step = about["step"]
    is_number = step.isdecimal() and len(step) <= 16
    content = {
        "format": FORMAT_VERSION,
        "segtrain": about["segtrain_version"],
        "step": int(step) if is_number else step,  # `_parse` refuses text
        "config": about["config"],
        "classes": about["classes"],
        # Half precision is for other programs; here kernels are float32.
        "model": {key: w.float() if w.dtype == torch.float16 else w for key, w in weights.items()},
        "channels": about.get("channels"),
        **dict.fromkeys(("average", "optimizer", "scaler", "best")),  # not exported: None
    }
    if "plugins" in about:
        try:
            content["plugins"] = files.parse_json(about["plugins"])
        except ValueError:
            raise _ForeignError("damaged: its plugins cannot be read") from None
    return _parse(content)


class _ForeignError(Exception):
    """The content is not that of a checkpoint; says why."""


def _parse(content: Any) -> Checkpoint:
    """The checkpoint with this content, also of an older version; _ForeignError if it is none."""
    if not isinstance(content, dict) or "format" not in content:
        kind = "a bare state dict" if isinstance(content, dict) else type(content).__name__
        raise _ForeignError(f"expected a checkpoint of segtrain, found {kind}")
    version = content["format"]
    # True and 1.0 are equal to 1, but not written by segtrain.
    if type(version) is not int or version != FORMAT_VERSION:
        raise _ForeignError(
            f"format {printable(version, MAX_NAME)}, written by segtrain "
            f"{printable(content.get('segtrain'), MAX_NAME)}; "
            f"this is segtrain {__version__}, which reads format {FORMAT_VERSION}"
        )
    # Fields that this version does not know are left out; those that are missing have defaults.
    fields = {key: content[key] for key in Checkpoint._fields if key in content}
    try:
        return _CHECKPOINT.validate_python(fields)
    except ValidationError as error:
        raise _ForeignError(f"damaged: {first_problem(error)}") from None


_CLASS_FILE = TypeAdapter(ClassFile)


def config_field(config: Config) -> str:
    """The field `config` of a Checkpoint."""
    # Indented, because `torch_file` refuses a long text without blanks.
    return config.model_dump_json(indent=1)


def experiment_fields(config: Config, classes: ClassFile) -> dict[str, str]:
    """The fields `config` and `classes` of a Checkpoint."""
    # Without an ignored colour, leave the key out: the default colour may be that of a class.
    left_out = set() if classes.ignores_color else {"ignore_color"}
    text = _CLASS_FILE.dump_json(classes, indent=1, exclude=left_out, exclude_defaults=True)
    return {"config": config_field(config), "classes": text.decode()}


def plugin_fields(config: Config) -> list[PluginFields] | None:
    """The field `plugins` of a Checkpoint."""
    return [plugin.record() for plugin in all_plugins(config)] or None


def parse_experiment(
    checkpoint: Checkpoint, path: Path, needed: Container[str] = plugins.GROUPS
) -> tuple[Config, ClassFile]:
    """The config and the classes of the run; CheckpointError if this version cannot read them.

    needed: the kinds of plugins that have to be here.

    A plugin that is not here is asked for, never imported: a checkpoint must not choose what runs.
    So `plugins` of the config are those that this process has loaded.
    """
    try:
        left = plugins.missing(checkpoint.plugins or [], needed)
    except ConfigError as error:
        raise CheckpointError(f"{path}: {error}") from None
    if left:
        raise CheckpointError("\n".join(f"{path}: {line}" for line in left))
    config = parse_config_field(checkpoint, path)
    config = config.model_copy(update={"plugins": plugins.loaded()})
    try:
        classes = class_file_from_json(checkpoint.classes)
    except ConfigError as error:
        raise CheckpointError(f"{path}: its classes contradict themselves: {error}") from None
    except ValidationError as error:
        problem = first_problem(error)
        raise CheckpointError(f"{path}: its classes do not fit segtrain: {problem}") from None
    return config, classes


def parse_config_field(checkpoint: Checkpoint, path: Path) -> Config:
    """The config of the run, without plugins; CheckpointError if this version cannot read it."""
    try:
        return Config.model_validate_json(checkpoint.config)
    except ValidationError as error:
        raise CheckpointError(
            f"{path}: its config does not fit segtrain {__version__}: {first_problem(error)}; "
            f"segtrain {printable(checkpoint.segtrain, MAX_NAME)} wrote the file"
        ) from None


def first_problem(error: ValidationError) -> str:
    """The first place that does not fit, and why, short enough for a message."""
    first = error.errors()[0]
    what = "unknown key" if first["type"] == "extra_forbidden" else first["msg"]
    return printable(f"{'.'.join(map(str, first['loc']))}: {what}", 2 * MAX_NAME)


def parse_channels(checkpoint: Checkpoint, path: Path) -> Channels | None:
    """What the channels of the training images hold; None if the checkpoint does not say."""
    return _parsed("channels", checkpoint.channels, channels_from_json, path)


def parse_data(checkpoint: Checkpoint, path: Path) -> DataFingerprint | None:
    """The data of the run; None if the checkpoint does not say."""
    return _parsed("data", checkpoint.data, fingerprint_from_json, path)


def _parsed(field: str, text: str | None, parse: Callable[[str], T], path: Path) -> T | None:
    try:
        return None if text is None else parse(text)
    except ValidationError:
        raise CheckpointError(f"{path}: damaged: the field {field} cannot be read") from None
