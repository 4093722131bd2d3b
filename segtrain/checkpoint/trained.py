"""Trained models from checkpoints: ready for inference, or to start a run (train.init_from)."""

import os
import re
import shlex
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

import torch
from pydantic import ValidationError
from torch import Tensor, nn

from segtrain import plugins
from segtrain.checkpoint.format import (
    BEST,
    LAST,
    Checkpoint,
    load,
    parse_channels,
    parse_data,
    parse_experiment,
)
from segtrain.checkpoint.weights import check_fit, check_plain, load_weights
from segtrain.config import Config, load_config, recipes
from segtrain.config.loading import yaml_value
from segtrain.config.plugin_names import all_plugins
from segtrain.data.check.channels import Channels
from segtrain.data.read.classes import (
    ClassFile,
    class_differences,
    class_file_from_json,
    plain_names,
)
from segtrain.data.read.fingerprint import DataFingerprint
from segtrain.errors import CheckpointError, ConfigError
from segtrain.files import kind_of
from segtrain.models import SegModel, build_model
from segtrain.models.ensemble import Ensemble
from segtrain.models.norms import make_inference_norm
from segtrain.run.directory import CONFIG, flat, is_run, no_run
from segtrain.run.division import EXPERIMENT, read_division
from segtrain.task.tasks import task_of
from segtrain.text import first_of, say

# The share of zeros in kernels that is told although no option has asked for zeros.
_MANY_ZEROS = 0.01


class Member(NamedTuple):
    """One of the models of an ensemble: where it came from, and what it was trained with."""

    source: str
    config: Config
    step: int


class LoadedModel(NamedTuple):
    """A trained model in evaluation mode, and what it was trained with.

    members: of an ensemble; everything but the model is then that of the first.
    fits_thresholds: whether its training, or that of a member, chose the thresholds of the classes.
    files: the checkpoint of each member, or its own.
    """

    model: SegModel | Ensemble
    config: Config
    classes: ClassFile
    step: int
    data: DataFingerprint | None = None  # None: the checkpoint does not say
    channels: Channels | None = None  # the same
    members: tuple[Member, ...] = ()
    fits_thresholds: bool = False
    files: tuple[Path, ...] = ()

    @property
    def configs(self) -> list[Config]:
        """Those of the members, or its own."""
        return [member.config for member in self.members] or [self.config]

    @property
    def steps(self) -> str:
        """Those of the members, such as `400 + 400`, or its own."""
        return " + ".join(str(member.step) for member in self.members or [self])

    @property
    def about(self) -> str:
        """Which weights it has, in words: `step 400`."""
        if not self.members:
            return f"step {self.step}"
        each = first_of((f"{member.source} step {member.step}" for member in self.members), 5)
        return f"mean probability of {len(self.members)} models: {each}"

    def zeros(self) -> list[str]:
        """A line that says how much of the kernels is 0, where that is meant or stands out."""
        kernels = [weight for weight in self.model.parameters() if weight.dim() > 1]
        count = sum(int((weight == 0).sum()) for weight in kernels)
        whole = sum(weight.numel() for weight in kernels)
        if count <= _MANY_ZEROS * whole and not any(c.optim.prunes for c in self.configs):
            return []
        return [f"zeros: {100 * count / whole:.2f}% of the kernels ({count:,} of {whole:,})"]


def load_model(
    path: str | Path, *others: str | Path, device: torch.device | str = "cpu"
) -> LoadedModel:
    """The model of a run directory or checkpoint, in evaluation mode.

    Its batch norms are plain nn.BatchNorm2d. If the run averaged its weights, it has the averages.
    With `others`, or of a directory of `segtrain folds`, it is an `Ensemble`.

    Raises:
        CheckpointError: there is no checkpoint, its weights do not fit its config, or the models
            of an ensemble do not fit together.
    """
    sources = [member for source in (path, *others) for member in members_of(source)]
    models = [_load_single(source, device) for source in sources]
    if len(models) == 1:
        return models[0]
    # By their files: a run and its best.pt are the same model.
    first, files = models[0], [resolve(source).resolve() for source in sources]
    for source, loaded, file in zip(sources, models, files, strict=True):
        problem = "named twice" if files.count(file) > 1 else _misfit(loaded, first)
        if problem:
            raise CheckpointError(f"{source}: no member of an ensemble with {path}: {problem}")
    mean = task_of(first.config.task).mean
    model = Ensemble([member.model for member in models], mean).eval()
    members = [Member(str(s), x.config, x.step) for s, x in zip(sources, models, strict=True)]
    joined = first._replace(model=model, members=tuple(members), files=tuple(files))
    if any(member.config.eval.thresholds for member in models):
        # Those of one member alone would hang on the order in which they are named.
        each = [member.config.eval.thresholds_of(first.classes.num_classes) for member in models]
        thresholds = tuple(sum(column) / len(models) for column in zip(*each, strict=True))
        fits = any(member.fits_thresholds for member in models)
        config = _with_thresholds(first.config, thresholds)
        joined = joined._replace(config=config, fits_thresholds=fits)
    if read_division(Path(path)) is None:
        return joined
    # A fold evaluates on images that the others have trained on; the experiment does not.
    data = load_config(Path(path) / EXPERIMENT, imports=False).data
    return joined._replace(config=joined.config.model_copy(update={"data": data}), data=None)


def members_of(source: str | Path) -> list[str | Path]:
    """The runs in a directory of `segtrain folds`; of anything else itself.

    Raises:
        CheckpointError: folds are not trained to their ends yet.
    """
    division = read_division(Path(source))
    if division is None:
        return [source]
    left = [fold.run for fold in division.folds if not fold.finished]
    if left:
        raise CheckpointError(
            f"{source}: not trained to the end: {first_of(left)}; go on with segtrain folds "
            f"{shlex.quote(str(source))} --resume"
        )
    return [Path(source) / fold.run for fold in division.folds]


# What an image has to go through before it reaches a model.
OF_IMAGES = ("channels", "mean", "std", "value_range", "clip", "short_side_px", "neighbours")


def _misfit(loaded: LoadedModel, first: LoadedModel) -> str:
    """Why two models cannot take the same images and name the same classes; empty if they can."""
    if loaded.config.task != first.config.task:
        return f"task is {loaded.config.task} here, {first.config.task} there"
    if loaded.classes.names != first.classes.names:
        (difference,), _ = class_differences(first.classes, loaded.classes, "ids")
        return difference
    thresholds = loaded.config.eval.thresholds_of(loaded.classes.num_classes)
    if len(thresholds) != loaded.classes.num_classes:
        return (
            f"eval.thresholds: {len(thresholds)} numbers for {loaded.classes.num_classes} classes"
        )
    for key in OF_IMAGES:
        here, there = (getattr(side.config.data, key) for side in (loaded, first))
        if here != there:
            return f"data.{key} is {yaml_value(here)} here, {yaml_value(there)} there"
    return ""


# The kinds of plugins that a model consists of: what has trained it need not be here.
_OF_MODELS = ("backbone", "head", "task")


def _load_single(path: str | Path, device: torch.device | str) -> LoadedModel:
    file = resolve(path)
    checkpoint = load(file)
    config, classes = parse_experiment(checkpoint, file, needed=_OF_MODELS)
    # Before the model is made: a config can ask for more memory than there is.
    check_sizes(checkpoint, config, classes, file)
    if os.environ.get("RANK", "0") == "0":  # once
        for line in plugins.changes(checkpoint.plugins or []):
            say(f"warning: {file}: {line}")
    model = _inference_model(config, classes)
    load_weights(model, inference_weights(checkpoint), file)
    data, channels = parse_data(checkpoint, file), parse_channels(checkpoint, file)
    fitted = checkpoint.thresholds
    # Thresholds that a user has set go before those that the training has fitted.
    fits = fitted is not None and config.eval.thresholds is None
    if fits:
        if len(fitted) != classes.num_classes:
            raise CheckpointError(f"{file}: damaged: {len(fitted)} thresholds")
        config = _with_thresholds(config, tuple(fitted))
    about = (config, classes, checkpoint.step, data, channels)
    files = (file.resolve(),)
    return LoadedModel(model.eval().to(device), *about, fits_thresholds=fits, files=files)


def _with_thresholds(config: Config, thresholds: tuple[float, ...]) -> Config:
    evaluation = config.eval.model_copy(update={"thresholds": thresholds})
    return config.model_copy(update={"eval": evaluation})


def inference_weights(checkpoint: Checkpoint) -> dict[str, Tensor]:
    """The averaged weights if there are any, otherwise those of the last step."""
    return checkpoint.model if checkpoint.average is None else checkpoint.average


def resolve(run_or_file: str | Path) -> Path:
    """The given checkpoint file, or the best (otherwise the last) one of a run directory.

    The name of a config may stand for the weights that come with it.
    """
    path = Path(run_or_file)
    if path.is_file():
        return path
    if not path.exists():
        if (shipped := recipes.weights(str(run_or_file))) is not None:
            return shipped
        raise CheckpointError(f"{path}: no such run or checkpoint")
    if not path.is_dir():
        raise CheckpointError(f"{path}: not a regular file")
    for file in (path / "checkpoints" / name for name in (BEST, LAST)):
        if file.is_file():
            return file
        # There is something, and no file: a folder, or a link that leads nowhere.
        if os.path.lexists(file):
            kind = kind_of(file)
            raise CheckpointError(f"{file}: expected a checkpoint, found {kind}; move it away")
    if (path / CONFIG).is_file() and not is_run(path):
        raise CheckpointError(no_run(path))
    raise CheckpointError(f"{path}: no checkpoints/{BEST} or checkpoints/{LAST} in this directory")


def check_sizes(checkpoint: Checkpoint, config: Config, classes: ClassFile, path: Path) -> None:
    """Refuses a config that describes another model than the weights; allocates no memory.

    A config of a few characters can ask for more memory than any machine has.
    """
    try:
        with torch.device("meta"):
            model = _inference_model(config, classes)
    except (RuntimeError, OverflowError) as error:  # the number of bytes overflows
        what = "its config describes a model that is too large for any machine"
        if all_plugins(config.model):
            what += f", or a plugin's, which torch's meta device cannot make ({error})"
        raise CheckpointError(f"{path}: {what}") from None
    check_fit(model, checkpoint.model, path)
    if checkpoint.average is not None:
        check_fit(model, checkpoint.average, path)


def _inference_model(config: Config, classes: ClassFile) -> SegModel:
    # The checkpoint has every weight: download none.
    model = config.model.model_copy(update={"pretrained": None})
    norm = make_inference_norm(config.norm)
    return build_model(
        model, num_classes=classes.num_classes, in_channels=config.data.channels, norm=norm
    )


# Options that change what the weights compute and neither their keys nor their shapes.
_SILENT = {
    "task",
    *("model.output_stride", "model.variant", "model.multi_grid", "model.align_corners"),
    *("model.ppm_bins", "model.aspp_rates"),
    *("data.mean", "data.std", "data.value_range", "data.clip"),
    *("data.short_side_px", "data.neighbours"),
}
# Options that may change keys or shapes.
_MODEL = re.compile(r"model\.(?!pretrained|dropout)|norm\.kind|data\.channels")


class Initial(NamedTuple):
    """What `load_initial` did."""

    lines: list[str]  # for the log
    random: list[str]  # the keys that stay random


def load_initial(
    model: nn.Module,
    spec: str | Path,
    class_names: Sequence[str] = (),
    config: Config | None = None,
) -> Initial:
    """Fills `model` with the weights of another run, the averaged ones if it has them.

    Classifier layers keep the rows of the classes that have the same plain name there, and are
    random in the others. A layer with random rows counts as random. CheckpointError if any other
    layer does not fit, or a name is that of several classes. `class_names` are the classes of
    `model` in order; (): not known, and a classifier of another number of classes stays random.
    `config` is that of `model`: a warning names options that the weights were trained with
    otherwise.
    """
    file = resolve(spec)
    checkpoint = load(file)
    weights = dict(inference_weights(checkpoint))
    check_plain(weights, file)
    own = model.state_dict()
    lines = [f"init       {file}, step {checkpoint.step}"]
    try:
        there = class_file_from_json(checkpoint.classes).names
    except (ConfigError, ValidationError) as error:
        raise CheckpointError(f"{file}: damaged: its classes cannot be read") from error
    in_place = list(range(len(there)))
    # Where the own classes are not known, equal numbers of classes are taken for equal classes.
    rows = rows_by_name(there, class_names, file) if class_names else in_place
    if rows != in_place:
        lines.append(_class_line(there, class_names, rows))
    random = []
    for key in sorted(key for key in weights.keys() & own.keys() if ".classifier." in key):
        old, new = tuple(weights[key].shape), tuple(own[key].shape)
        # Rows are those of classes only if they are as many as there are classes.
        if old[:1] != (len(there),) or new != (len(rows), *old[1:]):
            lines.append(f"init       {key} stays random: {old} there, {new} here")
            # `load_weights` takes whole state dicts only, so the random rows stand in.
            weights[key] = own[key]
            random.append(key)
        elif rows != in_place:
            weights[key] = _with_rows(own[key], weights[key], rows)
            random += [key] if None in rows else []
    options = {} if config is None else _other_options(checkpoint, config, file)
    # In the order of the config: head and backbone first, then what changes a part of them.
    larger = [f"{key}: {shown}" for key, shown in options.items() if _MODEL.match(key)]
    load_weights(model, weights, file, differences=larger)
    lines += [
        f"warning: init: {key} is {shown}: the weights load, and compute something else"
        for key, shown in options.items()
        if key in _SILENT
    ]
    return Initial(lines, random)


def _other_options(there: Checkpoint, here: Config, path: Path) -> dict[str, str]:
    """Both values, in words, of each option that is another one in the config of `there`."""
    before = flat(parse_experiment(there, path, needed=())[0])
    return {
        key: f"{yaml_value(before.get(key))} there, {yaml_value(new)} here"
        for key, new in flat(here).items()
        if new != before.get(key)
    }


def rows_by_name(there: Sequence[str], here: Sequence[str], path: Path) -> list[int | None]:
    """For each class `here` the index `there` of the one with its plain name; None: there is none.

    Raises:
        CheckpointError: such a name is that of several classes.
    """
    theirs, ours = plain_names(there), plain_names(here)
    for name in set(theirs) & set(ours):
        if theirs.count(name) + ours.count(name) > 2:
            equal = [
                [full for full, plain in zip(names, plains, strict=True) if plain == name]
                for names, plains in ((there, theirs), (here, ours))
            ]
            raise CheckpointError(
                f"{path}: classes {first_of(equal[0])} there, {first_of(equal[1])} here: names "
                "are compared without case, _ and -, and these are one; rename classes in "
                "data.classes"
            )
    return [theirs.index(name) if name in theirs else None for name in ours]


def _class_line(there: Sequence[str], here: Sequence[str], rows: Sequence[int | None]) -> str:
    """For the log: which classes keep their rows of the classifiers."""
    kept = [name for name, row in zip(here, rows, strict=True) if row is not None]
    new = [name for name, row in zip(here, rows, strict=True) if row is None]
    left = [name for i, name in enumerate(there) if i not in rows]
    line = f"init       classes that keep their rows of the classifiers: {first_of(kept) or 'none'}"
    line += f"; new, from random numbers: {first_of(new)}" if new else ""
    return line + (f"; only there: {first_of(left)}" if left else "")


def _with_rows(own: Tensor, old: Tensor, rows: Sequence[int | None]) -> Tensor:
    """`own` (K, ...) with the rows of `old` that `rows` names; the others stay."""
    kept = [i for i, row in enumerate(rows) if row is not None]
    merged = own.clone()
    merged[kept] = old[[rows[i] for i in kept]].to(merged)
    return merged
