"""From a file of another program to a checkpoint of segtrain."""

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

import torch

from segtrain.checkpoint.experiment import experiment_fields
from segtrain.checkpoint.format import Checkpoint, save
from segtrain.checkpoint.weights import load_weights
from segtrain.config import Config
from segtrain.convert.build import describe, drops_aux_head, make_config, split_options
from segtrain.convert.classes import Choice, choose_classes, class_file_text, stored_file
from segtrain.convert.detect import Found, detect
from segtrain.convert.plan import Plan, State
from segtrain.convert.read import SourceFile, listed, read_file
from segtrain.convert.translate import Translation, check_numbers, reorder_classes, translate
from segtrain.data.class_file import load_class_file
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.files import write_atomic
from segtrain.models import SegModel, build_model
from segtrain.norm import make_inference_norm
from segtrain.text import printable


@dataclass(frozen=True)
class Converted:
    """A converted model in evaluation mode, and what to say of it."""

    model: SegModel
    config: Config
    classes: Choice
    lines: list[str]


def convert_file(
    path: Path,
    output: Path,
    *,
    classes: str | None = None,
    class_order: str | None = None,
    entry: str | None = None,
    ignored: Sequence[str] = (),
    overrides: Sequence[str] = (),
    overwrite: bool = False,
) -> Converted:
    """Writes the model in `path` to the checkpoint `output`; its step is 0.

    Where the file stores names of classes that no class file has, they are written beside `output`.

    Args:
        classes: a class file, by name or path; None: by the names that the file stores.
        class_order: see `choose_classes`.
        entry: see `read_file`.
        ignored: beginnings of keys that are no part of the model.
        overrides: `section.key=value`.
        overwrite: whether those names may replace a file.

    Raises:
        ConfigError: a wrong override or class file.
        CheckpointError: the file cannot be read, or not all of it fits.
        ExecutionError: the disk is full, or nothing can be written there.
    """
    source = read_file(path, entry)
    try:
        found = detect(source.state, source.beside, ignored)
        if drops_aux_head(overrides):
            found = found._replace(plan=found.plan.without_aux_head())
        plan = found.plan
        with _stored_classes(plan, classes, output, overwrite=overwrite) as spec:
            choice = choose_classes(plan, spec, class_order)
            config = make_config(plan, choice.spec, overrides)
            model, translation = load_plan(found, choice, config)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    checkpoint = Checkpoint(
        step=0,
        **experiment_fields(config, choice.classes),
        model=dict(model.state_dict()),
        average=None,
        optimizer=None,
        scaler=None,
        best=None,
    )
    save(output, checkpoint)
    lines = _report(source, found, translation, choice, config, overrides)
    return Converted(model, config, choice, lines)


@contextmanager
def _stored_classes(
    plan: Plan, classes: str | None, output: Path, *, overwrite: bool
) -> Iterator[str | None]:
    """The class file to use; one that is written here goes again if the conversion fails."""
    path = stored_file(plan, classes, output)
    if path is None:
        yield classes
        return
    if path.exists() and not overwrite:
        raise ConfigError(
            f"{path}: exists, and would be replaced by the names in the file; name it in --classes "
            "to use it, or pass --overwrite"
        )
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, class_file_text(plan))
    except OSError as error:
        raise ExecutionError(f"{path}: cannot be written: {error.strerror or error}") from error
    try:
        _check_stored(path)
        yield str(path)
    except BaseException:
        path.unlink(missing_ok=True)
        raise


def _check_stored(path: Path) -> None:
    try:
        load_class_file(str(path))
    except ConfigError as error:
        raise CheckpointError(
            f"the names of classes in the file cannot be used; name a class file in --classes: "
            f"{error}"
        ) from None


def load_plan(found: Found, choice: Choice, config: Config) -> tuple[SegModel, Translation]:
    """The model with the weights of the file, in evaluation mode.

    Raises:
        CheckpointError: not all of it fits, or a number is not finite.
    """
    options = {"num_classes": choice.classes.num_classes, "norm": make_inference_norm(config.norm)}
    try:
        with torch.device("meta"):
            wanted: State = build_model(config.model, **options).state_dict()
    except (RuntimeError, OverflowError):  # the number of bytes overflows
        raise CheckpointError("its shapes are those of a model too large for any machine") from None
    translation = translate(found.state, found.plan, wanted, found.outside)
    check_numbers(translation.weights, found.plan, found.prefix)
    if choice.order is not None:
        reorder_classes(translation.weights, choice.order)
    model = build_model(config.model, **options)
    load_weights(model, translation.weights, Path("the converted weights"))
    return model.eval(), translation


def _report(
    source: SourceFile,
    found: Found,
    translation: Translation,
    choice: Choice,
    config: Config,
    overrides: Sequence[str],
) -> list[str]:
    """What was read, decided and left out, a line each."""
    plan, model = found.plan, config.model
    where = f" under {source.entry}" if source.entry else ""
    if found.prefix:
        where += f", keys without '{printable(found.prefix)}'"
    lines = [
        f"source      {plan.source}: {len(source.state)} tensors{where}",
        f"model       {model.arch} {model.backbone}, {choice.classes.num_classes} classes of "
        f"{choice.classes.name}",
    ]
    data = config.data
    side = f", short side {data.short_side_px} px" if data.short_side_px else ""
    lines.append(f"input       RGB of 0..255, mean {data.mean}, std {data.std}{side}")
    options = split_options(plan, config, overrides)
    about = {
        "stated": "by the config of the file",
        "assumed": f"the file does not say; the defaults of {plan.source}, --set changes them",
        "set": "by --set",
    }
    for kind, values in options.items():
        if values:
            lines.append(f"{kind:<11} {describe(values)} ({about[kind]})")
    ignored = [("--ignore", list(found.ignored))] if found.ignored else []
    for why, keys in (*translation.left_out, *ignored):
        lines.append(f"left out    {len(keys)} tensors ({why}): {listed(keys)}")
    if translation.counters:
        lines.append(f"counters    {translation.counters} batch counters not in the file, set to 0")
    if translation.dtypes:
        lines.append(f"dtype       {', '.join(translation.dtypes)} in the file, float32 here")
    lines += [f"note        {note}" for note in (*source.notes, *plan.notes)]
    lines += [f"warning: {warning}" for warning in plan.warnings]
    return lines + [
        line if line.startswith("warning") else f"classes     {line}" for line in choice.lines
    ]
