"""Checkpoints: one record that holds everything an update changes, written whole or not at all.

A record holds tensors, numbers, strings, lists and dicts only, and is loaded with weights_only, so
that a checkpoint from anywhere cannot run code.
"""

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

from segtrain import __version__, files, manifest, torch_file
from segtrain.config import Config
from segtrain.data.classes import ClassFile, class_file_from_json
from segtrain.data.fingerprint import DataFingerprint, fingerprint_from_json
from segtrain.engine import TrainState
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.files import NotRegularError
from segtrain.manifest import Entry, HashingFile
from segtrain.models import SegModel, build_model
from segtrain.norm import make_inference_norm
from segtrain.text import MAX_NAME, printable
from segtrain.torch_file import is_plain

FORMAT_VERSION = 1

LAST, BEST = "last.pt", "best.pt"


class Record(NamedTuple):
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


def save(path: Path, record: Record) -> None:
    """Writes `record` to `path`: at every instant the old file or the new one is there, whole.

    Raises:
        ExecutionError: the disk is full, or the directory cannot be written.
        CheckpointError: as `unnamed`.
    """
    with unnamed(path, record) as (temporary, _):
        temporary.replace(path)
        files.sync_directory(path.parent)


@contextmanager
def unnamed(path: Path, record: Record) -> Iterator[tuple[Path, Entry]]:
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
            if manifest.digest_of(temporary) != hashing.digest():
                raise OSError("the disk gives back other bytes than were written")
            yield temporary, Entry(record.step, hashing.num_bytes, hashing.digest())
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


def load(path: Path) -> Record:
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
                if files.is_at(file.fileno(), path):
                    raise
                continue
            file.seek(0)
            return torch_file.load(file)


def _others(path: Path) -> str:
    """What else may be tried, for the end of a message."""
    names = sorted(other.name for other in path.parent.glob("*.pt") if other.name != path.name)
    return f"; beside it there is {', '.join(names[:5])}" if names else ""


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


def _as_record(content: Any, path: Path) -> Record:
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
    missing = [field for field in Record._fields if field not in content]
    if missing:
        raise CheckpointError(f"{path}: incomplete: {', '.join(missing)} missing")
    for field, kinds in _KINDS.items():
        if type(content[field]) not in kinds:
            kind = type(content[field]).__name__
            raise CheckpointError(f"{path}: damaged: {field} is a {kind}")
    best = content["best"]
    if best is not None and [type(best.get(key)) for key in ("step", "mean_iou")] != [int, float]:
        raise CheckpointError(f"{path}: damaged: best has no step and mean_iou")
    return Record(**{field: content[field] for field in Record._fields})


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
    # The state dict brings every weight, so none has to be fetched.
    model_config = config.model.model_copy(update={"pretrained": None})
    model = build_model(
        model_config,
        num_classes=classes.num_classes,
        norm=make_inference_norm(config.norm),
    )
    load_weights(model, record.model if record.average is None else record.average, file)
    loaded = LoadedModel(model.eval().to(device), config, classes, record.step)
    return loaded, parse_data(record, file)


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
    _check_plain(weights, file)
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


def _class_names(record: Record, path: Path) -> tuple[str, ...]:
    try:
        return class_file_from_json(record.classes).names
    except (ConfigError, ValidationError) as error:
        raise CheckpointError(f"{path}: damaged: its classes cannot be read") from error


def load_weights(model: nn.Module, weights: dict[str, Any], path: Path) -> None:
    """Copies a state dict into `model`, all of it or nothing.

    Raises:
        CheckpointError: keys are missing, unexpected or of another shape; the first ten are named.
    """
    _check_plain(weights, path)
    own = model.state_dict()
    findings = [f"{key}: missing in the checkpoint" for key in own.keys() - weights.keys()]
    foreign = weights.keys() - own.keys()
    findings += [f"{printable(key, MAX_NAME)}: not in the model" for key in foreign]
    findings += [
        f"{key}: {tuple(weights[key].shape)} in the checkpoint, "
        f"{tuple(own[key].shape)} in the model"
        for key in own.keys() & weights.keys()
        if own[key].shape != weights[key].shape
    ]
    if findings:
        more = f"\n  and {len(findings) - 10} more" if len(findings) > 10 else ""
        listed = "\n  ".join(sorted(findings)[:10])
        raise CheckpointError(f"{path}: the weights do not fit the model\n  {listed}{more}")
    model.load_state_dict(weights)


def _check_plain(weights: dict[str, Any], path: Path) -> None:
    odd = [key for key, value in weights.items() if type(key) is not str or not is_plain(value)]
    if odd:
        names = ", ".join(printable(key, MAX_NAME) for key in odd[:10])
        raise CheckpointError(f"{path}: damaged: no weights under {names}")


def restore(state: TrainState, record: Record, path: Path) -> None:
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
    _restore_optimizer(state.optimizer, record.optimizer, path)
    # Without float16 there was none to record; a new one finds its scale within some steps.
    if state.scaler.is_enabled() and record.scaler:
        own = state.scaler.state_dict()
        kinds = {key: type(value) for key, value in own.items()}
        if {key: type(value) for key, value in record.scaler.items()} != kinds:
            raise CheckpointError(f"{path}: the state of the loss scale is damaged")
        state.scaler.load_state_dict(record.scaler)
    state.step = record.step


def _restore_optimizer(optimizer: torch.optim.Optimizer, saved: dict[str, Any], path: Path) -> None:
    # What the config says counts, not what it said: loading would bring the old values back.
    settings = [
        {key: value for key, value in group.items() if key != "params"}
        for group in optimizer.param_groups
    ]
    try:
        optimizer.load_state_dict(saved)
        misfits = _misfits(optimizer)
    # Whatever lies where it looks for a dict, a list or a tensor.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        misfits = str(error) or type(error).__name__
    if misfits:
        raise CheckpointError(
            f"{path}: the optimizer's state belongs to another optimizer or to other groups of "
            f"weights: {misfits}"
        )
    for group, own in zip(optimizer.param_groups, settings, strict=True):
        group.update(own)


def _misfits(optimizer: torch.optim.Optimizer) -> str:
    """What the next step would fail at; empty if nothing."""
    sgd = isinstance(optimizer, torch.optim.SGD)
    names = {"momentum_buffer"} if sgd else {"step", "exp_avg", "exp_avg_sq"}
    for parameter, values in optimizer.state.items():
        if values.keys() not in (names, set()):
            found = ", ".join(printable(name, MAX_NAME) for name in list(values)[:10])
            return f"has {found}, not {', '.join(sorted(names))}"
        for name, value in values.items():
            shape = () if name == "step" else parameter.shape
            if not (sgd and value is None) and not (is_plain(value) and value.shape == shape):
                return f"{name} does not fit weights of shape {tuple(parameter.shape)}"
    return ""


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


def parse_experiment(record: Record, path: Path) -> tuple[Config, ClassFile]:
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


def parse_data(record: Record, path: Path) -> DataFingerprint | None:
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
