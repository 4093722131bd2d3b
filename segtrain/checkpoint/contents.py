"""Checkpoints: one record that holds everything an update changes, written whole or not at all.

A record holds tensors, numbers, strings, lists and dicts only, and is loaded with weights_only, so
that a checkpoint from anywhere cannot run code.
"""

import math
import os
import pickle
import shutil
from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any, NamedTuple

import torch
from pydantic import TypeAdapter, ValidationError
from torch import nn

from segtrain import __version__, files
from segtrain.checkpoint.optimizer_state import restore_optimizer, restore_scaler
from segtrain.checkpoint.weights import check_fit, check_plain, load_weights
from segtrain.config import Config
from segtrain.data.class_file import class_file_from_json
from segtrain.data.classes import ClassFile
from segtrain.data.fingerprint import DataFingerprint, fingerprint_from_json
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.files import NotRegularError, manifest, torch_file
from segtrain.files.manifest import Entry, HashingFile
from segtrain.models import SegModel, build_model
from segtrain.norm import make_inference_norm
from segtrain.text import MAX_NAME, printable
from segtrain.training.engine import TrainState

FORMAT_VERSION = 1

LAST, BEST = "last.pt", "best.pt"


class Checkpoint(NamedTuple):
    """The contents of a checkpoint.

    step: updates done.
    config, classes: the Config and the ClassFile as JSON.
    model, average: state dicts; average is None where no average of the weights is kept.
    optimizer, scaler: state dicts of training; None in a checkpoint that only serves for inference.
    best: {"step": int, "mean_iou": float} of the best evaluation so far, or None.
    evaluated: the step of the newest evaluation, 0: none.
    data: the DataFingerprint as JSON; None where an older segtrain wrote the checkpoint.
    """

    step: int
    config: str
    classes: str
    model: dict[str, Any]
    average: dict[str, Any] | None
    optimizer: dict[str, Any] | None
    scaler: dict[str, Any] | None
    best: dict[str, Any] | None
    evaluated: int = 0
    data: str | None = None


def save(path: Path, record: Checkpoint) -> None:
    """Writes `record` to `path`: at every instant the old file or the new one is there, whole.

    Raises:
        ExecutionError: the disk is full, or the directory cannot be written.
        CheckpointError: as `unnamed`.
    """
    with unnamed(path, record) as (temporary, _):
        temporary.replace(path)
        files.sync_directory(path.parent)


@contextmanager
def unnamed(path: Path, record: Checkpoint) -> Iterator[tuple[Path, Entry]]:
    """`record` in a file beside `path` that has yet to take its name, and what is in it.

    The file has reached the disk and has been read back: what weights_only refuses (a NumPy number,
    say) must not be noticed only when the run is to be resumed.

    Raises:
        ExecutionError: the disk is full, or the directory cannot be written; also for what the
            caller does in the directory.
        CheckpointError: the record holds what cannot be loaded again.
    """
    content = {"format": FORMAT_VERSION, "segtrain": __version__, **record._asdict()}
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        _check_space(path, content)
        with files.temporary(path) as temporary:
            with temporary.open("xb") as file:
                hashing = HashingFile(file)
                _write(content, hashing)
                file.flush()
                os.fsync(file.fileno())
            load(temporary)
            if manifest.sha256_of(temporary) != hashing.sha256():
                raise OSError("the disk gives back other bytes than were written")
            yield temporary, Entry(record.step, hashing.num_bytes, hashing.sha256())
    except OSError as error:
        raise ExecutionError(f"{path}: cannot write the checkpoint: {error}") from error


def _write(content: dict[str, Any], file: HashingFile) -> None:
    try:
        torch.save(content, file)
    except RuntimeError as error:
        # To what the disk says torch adds a complaint of its own: that its archive has not grown.
        if isinstance(error.__context__, OSError):
            raise error.__context__ from None
        raise


def num_bytes(content: Any) -> int:
    """About how much room a record or a part of one takes."""
    if isinstance(content, torch.Tensor):
        return content.nbytes + 512  # and its place in the archive
    if isinstance(content, dict):
        return sum(num_bytes(value) for value in content.values())
    if isinstance(content, list | tuple):
        return sum(num_bytes(value) for value in content)
    return len(content) if isinstance(content, str) else 32


def _check_space(path: Path, content: dict[str, Any]) -> None:
    needed, free = num_bytes(content), shutil.disk_usage(path.parent).free
    if free < needed:
        raise OSError(f"it takes {needed / 1e6:.1f} MB and the disk has {free / 1e6:.1f} MB left")


def load(path: Path) -> Checkpoint:
    """The record in `path`, its tensors on the CPU.

    Raises:
        CheckpointError: there is none, it is damaged, or it is not one of segtrain's.
    """
    if path.suffix in (".yaml", ".yml"):
        raise CheckpointError(f"{path}: this is a config; name a run directory or a checkpoint")
    try:
        content = _read(path)
    except FileNotFoundError:
        raise CheckpointError(f"{path}: no such checkpoint") from None
    except NotRegularError:
        raise CheckpointError(f"{path}: not a regular file") from None
    except pickle.UnpicklingError:
        # torch's own words advise to load the file with all that it may run.
        raise CheckpointError(
            f"{path}: refused: it holds more than tensors and plain data, which could run code; or "
            f"it is damaged, or no checkpoint at all{_others(path)}"
        ) from None
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        raise CheckpointError(f"{path}: cannot be read: {reason}{_others(path)}") from None
    except torch_file.DamagedError:
        raise CheckpointError(
            f"{path}: damaged, cut short or not a checkpoint{_others(path)}"
        ) from None
    return _as_record(content, path)


def _read(path: Path) -> Any:
    """The content of `path`, checked by the manifest, though a run may replace it meanwhile."""
    while True:
        # Checked and loaded through one opening: by its name it could be another file each time.
        with files.open_regular(path) as file:
            try:
                manifest.verify(path, file)
            except CheckpointError:
                # The run that replaced the file has gone on with the manifest as well.
                if files.is_same_file(file.fileno(), path):
                    raise
                continue
            file.seek(0)
            return torch_file.load(file)


def _others(path: Path) -> str:
    """What else may be tried, for the end of a message."""
    names = sorted(other.name for other in path.parent.glob("*.pt") if other.name != path.name)
    return f"; beside it there is {', '.join(names[:5])}" if names else ""


_MAX_STEP = 2**53  # the largest count that every reader of numbers keeps
_STATE = (dict, OrderedDict)
_OPTIONAL = (*_STATE, type(None))
_KINDS: dict[str, tuple[type, ...]] = {
    "step": (int,),
    "evaluated": (int,),
    "config": (str,),
    "classes": (str,),
    "data": (str, type(None)),
    "model": _STATE,
    **dict.fromkeys(("average", "optimizer", "scaler", "best"), _OPTIONAL),
}


def _as_record(content: Any, path: Path) -> Checkpoint:
    if not isinstance(content, dict) or "format" not in content:
        kind = "a bare state dict" if isinstance(content, dict) else type(content).__name__
        raise CheckpointError(f"{path}: expected a checkpoint of segtrain, found {kind}")
    if content["format"] is not FORMAT_VERSION:
        raise CheckpointError(
            f"{path}: format {printable(content['format'], MAX_NAME)}, written by segtrain "
            f"{printable(content.get('segtrain'), MAX_NAME)}; "
            f"this is segtrain {__version__}, which reads format {FORMAT_VERSION}"
        )
    content = {"data": None} | content  # older versions did not write it
    missing = [field for field in Checkpoint._fields if field not in content]
    if missing:
        raise CheckpointError(f"{path}: incomplete: {', '.join(missing)} missing")
    for field, kinds in _KINDS.items():
        if type(content[field]) not in kinds:
            kind = type(content[field]).__name__
            raise CheckpointError(f"{path}: damaged: {field} is a {kind}")
    best = content["best"]
    if best is not None and [type(best.get(key)) for key in ("step", "mean_iou")] != [int, float]:
        raise CheckpointError(f"{path}: damaged: best has no step and mean_iou")
    record = Checkpoint(**{field: content[field] for field in Checkpoint._fields})
    if contradiction := _contradiction(record):
        raise CheckpointError(f"{path}: damaged: {contradiction}{_others(path)}")
    return record


def _contradiction(record: Checkpoint) -> str:
    """What no run can have written; empty if nothing."""
    if not 0 <= record.step <= _MAX_STEP:
        return f"step {_shown(record.step)}; expected 0 to 2**53"
    if not 0 <= record.evaluated <= record.step:
        return f"evaluated at step {_shown(record.evaluated)}; it was saved at step {record.step}"
    if record.best is None:
        return ""
    step, mean_iou = record.best["step"], record.best["mean_iou"]
    if not 0 <= step <= record.step:
        return f"best mIoU at step {_shown(step)}; it was saved at step {record.step}"
    # NaN is the mIoU of a split where every pixel is ignored.
    if not (0 <= mean_iou <= 1 or math.isnan(mean_iou)):
        return f"best mIoU {mean_iou:g}; expected 0 to 1"
    return ""


def _shown(number: int) -> str:
    """`number`, which may have thousands of digits."""
    return str(number) if abs(number) <= _MAX_STEP else "above 2**53 in size"


def resolve(run_or_file: str | Path) -> Path:
    """The checkpoint meant by a file, or by a run directory: its best one, else its last.

    Raises:
        CheckpointError: there is none.
    """
    path = Path(run_or_file)
    if path.is_file():
        return path
    if not path.exists():
        raise CheckpointError(f"{path}: no such run or checkpoint")
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a regular file")
    for file in (path / "checkpoints" / name for name in (BEST, LAST)):
        if file.is_file():
            return file
        if os.path.lexists(file):
            raise CheckpointError(
                f"{file}: expected a checkpoint, found {files.kind_of(file)}; move it away"
            )
    raise CheckpointError(f"{path}: no checkpoints/{BEST} or checkpoints/{LAST} in this directory")


class LoadedModel(NamedTuple):
    """A trained model, ready for use, and what it was trained as."""

    model: SegModel
    config: Config
    classes: ClassFile
    step: int


def load_model(path: str | Path, *, device: torch.device | str = "cpu") -> LoadedModel:
    """The model of a run directory or checkpoint, in evaluation mode.

    Its batch norms are plain nn.BatchNorm2d; its weights are the averaged ones where an average was
    kept.

    Raises:
        CheckpointError: as `load` and `resolve`, or the weights do not fit the config beside them.
    """
    return load_with_data(path, device=device)[0]


def load_with_data(
    path: str | Path, *, device: torch.device | str = "cpu"
) -> tuple[LoadedModel, DataFingerprint | None]:
    """As `load_model`, and the data it was trained on; None where the checkpoint does not say."""
    file = resolve(path)
    record = load(file)
    config, classes = parse_experiment(record, file)
    check_sizes(record, config, classes, file)
    model = _inference_model(config, classes)
    load_weights(model, record.model if record.average is None else record.average, file)
    loaded = LoadedModel(model.eval().to(device), config, classes, record.step)
    return loaded, parse_data(record, file)


def check_sizes(record: Checkpoint, config: Config, classes: ClassFile, path: Path) -> None:
    """Refuses a record whose config describes another model than its weights; allocates nothing.

    A config of a few characters can ask for more memory than any machine has.

    Raises:
        CheckpointError: as `check_fit`.
    """
    try:
        with torch.device("meta"):
            model = _inference_model(config, classes)
    except (RuntimeError, OverflowError):  # more bytes than can be counted
        raise CheckpointError(
            f"{path}: its config describes a model that is too large for its weights, or for any "
            "machine"
        ) from None
    for weights in (record.model, record.average):
        if weights is not None:
            check_fit(model, weights, path)


def _inference_model(config: Config, classes: ClassFile) -> SegModel:
    # The state dict brings every weight, so none has to be fetched.
    model = config.model.model_copy(update={"pretrained": None})
    norm = make_inference_norm(config.norm)
    return build_model(model, num_classes=classes.num_classes, norm=norm)


def load_initial(model: nn.Module, spec: str | Path, class_names: Sequence[str] = ()) -> list[str]:
    """Fills `model` with the weights of another run, the averaged ones where it kept an average.

    The layers that give the logits stay as they are where the number of classes differs. Where the
    same classes come in another order, the rows of these layers are put into the new order.

    Args:
        class_names: the classes of `model` in their order; (): not known.

    Returns:
        lines that say what was taken over and what was not.

    Raises:
        CheckpointError: as `load` and `resolve`; or anything but those layers does not fit.
    """
    file = resolve(spec)
    record = load(file)
    weights = dict(record.model if record.average is None else record.average)
    check_plain(weights, file)
    own = model.state_dict()
    lines = [f"init       {file}, step {record.step}"]
    lines += _match_classes(weights, _class_names(record, file), class_names)
    for key in sorted(weights.keys() & own.keys()):
        if ".classifier." in key and weights[key].shape != own[key].shape:
            lines.append(
                f"init       {key} stays random: {tuple(weights[key].shape)} there, "
                f"{tuple(own[key].shape)} here"
            )
            weights[key] = own[key]
    load_weights(model, weights, file)
    return lines


def _match_classes(weights: dict[str, Any], there: Sequence[str], here: Sequence[str]) -> list[str]:
    """Puts the classifiers' rows in `weights` into the order of the classes `here`.

    Returns:
        lines that say so, or that it cannot be done.
    """
    differing = [i for i, (old, new) in enumerate(zip(there, here, strict=False)) if old != new]
    if len(there) != len(here) or not differing:
        return []
    if set(there) != set(here):
        i = differing[0]
        return [
            f"warning: init: {len(differing)} of {len(here)} classes have other names there: class "
            f"{i} is {there[i]} there, {here[i]} here, and starts from its weights"
        ]
    order = [there.index(name) for name in here]
    for key, value in weights.items():
        if ".classifier." in key and value.shape[:1] == (len(order),):
            weights[key] = value[order]
    return ["init       the classes come in another order there; classifiers follow the one here"]


def _class_names(record: Checkpoint, path: Path) -> tuple[str, ...]:
    try:
        return class_file_from_json(record.classes).names
    except (ConfigError, ValidationError) as error:
        raise CheckpointError(f"{path}: damaged: its classes cannot be read") from error


def restore(state: TrainState, record: Checkpoint, path: Path) -> None:
    """Brings `state` to where it was when `record` was made; every rank does so.

    Raises:
        CheckpointError: the record was made for another model, or is not for going on.
    """
    if record.optimizer is None or record.scaler is None:
        raise CheckpointError(f"{path}: holds no training state; go on with {LAST}")
    load_weights(state.model, record.model, path)
    if state.average is not None:
        if record.average is None:
            raise CheckpointError(f"{path}: holds no average of the weights (train.ema_decay)")
        load_weights(state.average.model, record.average, path)
    restore_optimizer(state.optimizer, record.optimizer, path)
    # Without float16 there was none to record; a new one finds its scale within some steps.
    if state.scaler.is_enabled() and record.scaler:
        restore_scaler(state.scaler, record.scaler, path)
    state.step = record.step


_CLASS_FILE = TypeAdapter(ClassFile)


def experiment_record(config: Config, classes: ClassFile) -> dict[str, str]:
    """The fields `config` and `classes` of a record."""
    # A default is filled in when it is read; what is there is ignored in labels.
    default = set() if classes.ignores_color else {"ignore_color"}
    # Indented, because `torch_file` takes no long text without a blank.
    return {
        "config": config.model_dump_json(indent=1),
        "classes": _CLASS_FILE.dump_json(classes, indent=1, exclude=default).decode(),
    }


def parse_experiment(record: Checkpoint, path: Path) -> tuple[Config, ClassFile]:
    """What the run in `record` was: its config and its classes.

    Raises:
        CheckpointError: this version of segtrain does not understand them.
    """
    try:
        config = Config.model_validate_json(record.config)
        return config, class_file_from_json(record.classes)
    except ConfigError as error:
        raise CheckpointError(f"{path}: its classes contradict themselves: {error}") from None
    except ValidationError as error:
        first = error.errors()[0]
        where = printable(".".join(map(str, first["loc"])), MAX_NAME)
        problem = printable(first["msg"], 2 * MAX_NAME)
        raise CheckpointError(
            f"{path}: its config does not fit this version of segtrain: {where}: {problem}"
        ) from None


def parse_data(record: Checkpoint, path: Path) -> DataFingerprint | None:
    """The data that the run in `record` saw; None where an older segtrain wrote it.

    Raises:
        CheckpointError: this version of segtrain does not understand it.
    """
    if record.data is None:
        return None
    try:
        return fingerprint_from_json(record.data)
    except ValidationError:
        raise CheckpointError(f"{path}: damaged: data is no fingerprint of a data set") from None
