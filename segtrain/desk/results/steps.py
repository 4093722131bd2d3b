"""Where two runs part, and why: `segtrain compare A B --steps`.

What the runs have left is compared in the order in which a difference arises: config, data,
versions, then the steps. Each is blamed only for what it can change: the learning rate for no
pixel, and for no loss of the first step.

Rounding is told by the size of the first difference of the loss. Over 30 steps (PSPNet on two
stages of ResNet-18, 4 crops of 33x41, float32) it was 3e-11 to 4e-9, relative, between one thread
and two, one rank and two, AVX2 and AVX-512; 2e-9 for one bit of a weight, 1e-9 for a weight decay
off by 1e-3; but 6e-7 to 1e-5 for one pixel of an image or label, or a learning rate off by 1e-4. In
bfloat16 another thread (3e-5) is more than a pixel. So where what was compared before leaves a
choice, the verdict says so. Gradient norms tell less (with OHEM, rounding moved one by 1e-4), and
growth nothing: 1e-9 becomes 1e-2 within 20 steps, whatever the cause.
"""

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import NamedTuple

from segtrain.checkpoint.format import Checkpoint, load, parse_data, parse_experiment
from segtrain.checkpoint.manager import kept_checkpoints
from segtrain.config import Config
from segtrain.config.loading import yaml_value
from segtrain.data.read.classes import class_differences
from segtrain.data.read.fingerprint import SplitFingerprint, file_difference, label_difference
from segtrain.data.read.label_formats import told_by
from segtrain.desk.results.differences import FIELDS, checkpoint_differences, receipt_differences
from segtrain.desk.results.runs import Run, differing, differing_recipes, read_run
from segtrain.run import directory as run_directory
from segtrain.run.receipts import Receipt, read_receipts
from segtrain.text import first_of, printable

_NUMBERS = "loss", "aux_loss", "grad_norm"
# The first field that options can change, by how they begin: the first line that fits counts.
_REACH = {
    **dict.fromkeys(("eval.", "data.eval_split"), None),
    **dict.fromkeys(("seed", "data.", "augment.", "train.batch_size"), "samples"),
    **dict.fromkeys(("optim.layers", "optim.sam_"), "gradients"),
    **dict.fromkeys(("optim.", "schedule.", "train.steps"), "weights"),
    "loss.": "loss",
    "": "start",
}
# The largest relative difference of losses that rounding makes; 10 times that of gradient norms.
_ROUNDING = {"float64": 1e-14, "float32": 2e-7, "bfloat16": 5e-4}
_HALF = 1e-4  # float16 and tf32
_TELL_MORE = "receipts tell more (--set train.shares=N)"
# What no step before has changed.
_EVIDENCE = {
    "samples": "samples: files were added, removed or renamed, or the code that draws them",
    "pixels": "pixels: an image, a label, or what reads and augments them",
    "start": "starting weights: the file they come from, or the code that draws them",
}


class Cause(NamedTuple):
    """Something in which the runs differ before any step.

    kind: what it is, in a word. reach: the first of FIELDS that it can change; None: none.
    """

    kind: str
    text: str
    reach: str | None


class First(NamedTuple):
    """Where the runs part.

    before: whether the step before is "equal" or "unknown", or there is "none".
    sizes: relative differences of losses and gradient norm; empty if these are equal.
    equal: the fields of this step that were compared and are equal; empty without receipts.
    """

    step: int
    field: str
    before: str
    sizes: Mapping[str, float] = {}
    equal: frozenset[str] = frozenset()


class Side(NamedTuple):
    """A run, with what it has left by step, and its newest checkpoint."""

    run: Run
    receipts: Mapping[int, Receipt]
    saved: Mapping[int, Path]
    newest: tuple[Checkpoint, Path] | None
    shares: Mapping[str, object]  # of the newest checkpoint; empty without


def steps_lines(a: Path, b: Path) -> list[str]:
    """Why two runs differ, in words; the last line is the verdict.

    Raises:
        ConfigError: one is no run.
        CheckpointError: a checkpoint is damaged.
    """
    sides = _read(a), _read(b)
    causes = [*_options(*sides), *_data(*sides), *_versions(*sides)]
    has_receipts = sides[0].receipts.keys() & sides[1].receipts
    more, first = (_by_receipts if has_receipts else _by_logs)(*sides)
    lines = [*_cause_lines(causes), *more, ("verdict", _conclusion(first, causes, sides))]
    return [f"{label:<11} {text}" for label, text in lines]


def _cause_lines(causes: Sequence[Cause]) -> list[tuple[str, str]]:
    """A line for each cause, then what has none."""
    lines = [(cause.kind, cause.text) for cause in causes]
    kinds = {cause.kind for cause in causes}
    equal = {"config": "", "data": ": classes, files by name and size, labels", "versions": ""}
    for kind, what in equal.items():
        if kind not in kinds:
            lines.append((kind, f"equal{what}"))
    return lines


def _conclusion(first: First | str, causes: Sequence[Cause], sides: tuple[Side, Side]) -> str:
    """The verdict, and what else makes scores differ. first: of `_by_receipts` or `_by_logs`."""
    if isinstance(first, First):
        verdict = _verdict(first, causes, _precision(*sides))
    else:
        others = first_of(dict.fromkeys(cause.kind for cause in causes if cause.reach))
        verdict = f"{first}; what differs: {others}" if others else first
    scores = [cause.text for cause in causes if cause.kind == "scores"]
    ends = [max(side.run.step, *side.receipts, *side.saved, 0) for side in sides]
    if ends[0] != ends[1] and all(ends):
        scores.append(f"the last step, {_in_both(ends)}")
    if scores:
        verdict += f"; scores may differ by {first_of(scores, 3, separator='; ')}"
    return verdict


def _read(directory: Path) -> Side:
    run, receipts = read_run(directory), directory / run_directory.RECEIPTS
    # Reversed, so that of equal steps the first one stays: step_N.pt, which a run that still trains
    # does not replace.
    saved = dict(reversed(kept_checkpoints(directory / run_directory.CHECKPOINTS)))
    newest = (load(saved[max(saved)]), saved[max(saved)]) if saved else None
    found = read_receipts(receipts) if receipts.is_file() else {}
    return Side(run, found, saved, newest, (newest and newest[0].shares) or {})


def _in_both(pair: Iterable[object]) -> str:
    return "{} in A, {} in B".format(*map(printable, pair))


def _options(a: Side, b: Side) -> Iterator[Cause]:
    configs = [a.run.config, b.run.config]
    recipe = differing_recipes(configs)
    for key, values in differing(configs).items():
        kind, reach = _consequence(key, configs[0], is_of_recipe=key in recipe)
        yield Cause(kind, f"{key}: {_in_both(map(yaml_value, values))}", reach)


def _consequence(key: str, config: Config, *, is_of_recipe: bool) -> tuple[str, str | None]:
    """The kind and the reach of a cause that is another value of an option."""
    # They change the order of sums, which shares fix.
    if key in ("train.compile", "train.split") and config.train.shares is None:
        return "rounding", "loss"
    # The last prefix is empty, and fits every option.
    reach = next(_REACH[prefix] for prefix in _REACH if key.startswith(prefix))
    if key == "eval.every_steps" and config.norm.precise_batches is not None:
        reach = "weights"  # an evaluation leaves other statistics
    if reach is None:
        return "scores", None
    return ("config", reach) if is_of_recipe else ("harmless", None)


def _data(a: Side, b: Side) -> Iterator[Cause]:
    """What the newest checkpoints know of the classes and of the files of the training split."""
    pair = [side.newest for side in (a, b)]
    prints = [saved and parse_data(*saved) for saved in pair]
    if None in prints:
        yield Cause("data", "not known: a run has no checkpoint that tells", None)
        return
    before, now = (parse_experiment(*saved, needed=())[1] for saved in pair)
    reach = "pixels" if before.num_classes == now.num_classes else "start"
    for change in class_differences(before, now, told_by(a.run.config.data.label_format))[0]:
        yield Cause("data", f"{change} (there: A, now: B)", reach)
    for split, kind in (("train", "data"), ("eval", "scores")):
        change, reach = _file_change(split, *(getattr(data, split) for data in prints))
        if change:
            yield Cause(kind, f"{change} (there: A, now: B)", reach if kind == "data" else None)


def _file_change(split: str, one: SplitFingerprint, other: SplitFingerprint) -> tuple[str, str]:
    """How the files of a split differ, or empty, and what that reaches."""
    # A checkpoint knows no names of files.
    numbers = range(1, one.num_pairs + 1)
    pairs = [SimpleNamespace(image=f"image {i}", label=f"label {i}") for i in numbers]
    files = SimpleNamespace(split=split, pairs=pairs)
    change = file_difference(one, other, files)
    if change or other.labels is None:
        return change, "samples"
    return label_difference(one, other.labels, files), "pixels"


def _versions(a: Side, b: Side) -> Iterator[Cause]:
    """Versions, which may change anything; as `rounding`, what changes that alone."""
    pair = [side.run.environment for side in (a, b)]
    libraries = [of_run.get("libraries") for of_run in pair]
    if None in libraries:
        yield Cause("versions", "not known: a run has lost its environment.json", None)
        return
    versions = {name: [of_run.get(name) for of_run in libraries] for name in libraries[0]}
    own = "segtrain", "segtrain_commit", "python", "git"
    versions |= {name: [of_run.get(name) for of_run in pair] for name in own}
    # With shares the bits do not depend on the number of ranks, so it is no cause.
    has_shares = a.run.config.train.shares and b.run.config.train.shares
    devices = [list(map(str, of_run.get("devices") or ())) for of_run in pair]
    ranks = ["" if has_shares else f"{len(of_run)} x " for of_run in devices]
    machines = {
        "platform": [of_run.get("platform") for of_run in pair],
        "devices": [
            f"{n}{first_of(sorted({*of_run}))}" for n, of_run in zip(ranks, devices, strict=True)
        ],
        "bits of a small step": [side.shares.get("arithmetic") for side in (a, b)],
    }
    for kind, reach, facts in (("versions", "samples", versions), ("rounding", "loss", machines)):
        for name, values in facts.items():
            if values[0] != values[1] and None not in values:
                yield Cause(kind, f"{name}: {_in_both(values)}", reach)


def _by_receipts(a: Side, b: Side) -> tuple[list[tuple[str, str]], First | str]:
    """Lines, and where the receipts part, or else the verdict."""
    pairs = {s: (a.receipts[s], b.receipts[s]) for s in sorted(a.receipts.keys() & b.receipts)}
    begun = [min(side.receipts) for side in (a, b)]
    span, gaps = f"{min(pairs)} to {max(pairs)}", max(pairs) - min(pairs) + 1 - len(pairs)
    but = f" but for {gaps} of them" if gaps else ""
    late = "" if begun == [1, 1] else f"; they begin at {_in_both(begun)}"
    lines = [("steps", f"{span} have receipts in both runs{but}{late}")]

    weights = list(a.newest[0].model) if a.newest else []
    names = {"gradients": list(a.shares.get("exponents", ())), "weights": weights}
    # Lazy: receipts behind the first difference are never unpacked.
    each = ((s, receipt_differences(*pairs[s], names, ("in A", "in B"))) for s in pairs)
    step, differences = next(((s, differences) for s, differences in each if differences), (0, {}))
    if not differences:
        # Receipts do not hold the moments of the optimizer; checkpoints do.
        step = max(pairs.keys() & a.saved.keys() & b.saved.keys(), default=0)
        changed = _saved_differences(a, b, step) if step else None
        if not changed:
            return lines, f"the runs are equal in every bit of steps {span}{but}"
        differences = {"weights": f"checkpoints: {'; '.join(changed)}"}
    lines += [(f"step {step}", line) for line in differences.values()]

    at_first = "none" if begun[0] == begun[1] else "unknown"
    before = "equal" if step > min(pairs) else at_first
    return lines, _parted(step, differences, pairs[step], before)


def _parted(
    step: int, found: Mapping[str, str], pair: tuple[Receipt, Receipt], before: str
) -> First:
    """Where the runs part: in the fields `found` of these receipts."""
    compared = {f for f in FIELDS if None not in (getattr(receipt, f) for receipt in pair)}
    numbers = [
        {name: float.fromhex(getattr(receipt, name) or "nan") for name in _NUMBERS}
        for receipt in pair
    ]
    field = next(f for f in FIELDS if f in found)
    return First(step, field, before, _sizes(*numbers), frozenset(compared - found.keys()))


def _saved_differences(a: Side, b: Side, step: int) -> list[str] | None:
    """How the checkpoints of a step differ; None: they cannot be compared."""
    pair = [
        side.newest[0] if step == max(side.saved) else load(side.saved[step]) for side in (a, b)
    ]
    # Precise statistics change the model after its step.
    if pair[0].evaluated != pair[1].evaluated and a.run.config.norm.precise_batches is not None:
        return None
    return checkpoint_differences(*pair)


def _logged(run: Run) -> dict[int, dict[str, float]]:
    """Losses and gradient norm of metrics.jsonl by step; NaN: there is none."""
    curves = {name: run.curves.get(f"train/{name}", ([], [])) for name in _NUMBERS}
    points = {name: dict(zip(*curve, strict=True)) for name, curve in curves.items()}
    return {s: {name: points[name].get(s, math.nan) for name in points} for s in points["loss"]}


def _sizes(a: Mapping[str, float], b: Mapping[str, float]) -> dict[str, float]:
    """The relative differences of what differs; infinite or NaN where a number is not finite."""
    # As text, NaN is equal to itself.
    pairs = {name: (a[name], b[name]) for name in a if str(a[name]) != str(b[name])}
    return {name: abs(x - y) / (max(abs(x), abs(y)) or 1) for name, (x, y) in pairs.items()}


def _by_logs(a: Side, b: Side) -> tuple[list[tuple[str, str]], First | str]:
    """As `_by_receipts`, of checkpoints and logged losses."""
    sides = {"A": a, "B": b}.items()
    lost = [name for name, x in sides if x.run.config.train.shares and not x.receipts]
    more = f"{' and '.join(lost)} lost them" if lost else _TELL_MORE
    about, equal, parted = _by_checkpoints(a, b)
    lines = [("steps", f"none has receipts in both runs; {more}"), *about]

    logs = [_logged(side.run) for side in (a, b)]
    steps = logs[0].keys() & logs[1]
    if a.run.config.log.every_steps != b.run.config.log.every_steps:
        lines.append(("losses", "not compared: means over other numbers of steps"))
        steps = set()
    # The mean after an interruption may be of fewer steps. What is equal later was equal before.
    equal = max([equal, *(s for s in steps if not _sizes(*(log[s] for log in logs)))])
    steps = sorted(s for s in steps if s > equal)
    if not steps and parted:
        return lines, parted
    if not steps and equal:
        return lines, f"the runs are equal as far as they can be compared, to step {equal}"
    if not steps:
        return lines, "not known: no checkpoints or losses of the same steps are left"

    step = steps[0]
    sizes = _sizes(*(log[step] for log in logs))
    for name in sizes:
        lines.append((f"step {step}", f"{name}: {_in_both(log[step][name] for log in logs)}"))
    before = "none" if step == 1 else "equal" if step == equal + 1 else "unknown"
    return lines, First(step, next(iter(sizes)), before, sizes)


def _by_checkpoints(a: Side, b: Side) -> tuple[list[tuple[str, str]], int, First | None]:
    """Lines, the last step of equal checkpoints, and the first where they differ; 0, None: none."""
    lines, equal = [], 0
    for step in sorted(a.saved.keys() & b.saved):
        differences = _saved_differences(a, b, step)
        if differences is None:
            continue
        lines += [(f"step {step}", f"checkpoints: {x}") for x in differences or ["equal"]]
        if differences:
            return lines, equal, First(step, "weights", "unknown")
        equal = step
    return lines, equal, None


def _acts(cause: Cause, first: First) -> bool:
    """Whether a cause can have made the first difference."""
    # Where the pixels are equal, the data are not to blame, except for the field that they change
    # first.
    is_past = cause.kind == "data" and cause.reach != first.field and "pixels" in first.equal
    if cause.reach is None or is_past:
        return False
    if first.field not in _EVIDENCE and first.before != "none":
        return True  # through the weights that the steps before left
    # FIELDS is in the order of computation: a cause acts on its own field and on those behind it.
    return FIELDS.index(cause.reach) <= FIELDS.index(first.field)


def _precision(*sides: Side) -> str:
    """In which the runs were computed: on a CPU, tf32 is float32."""
    precision = sides[0].run.config.train.precision
    devices = [str(one) for side in sides for one in side.run.environment.get("devices") or ()]
    on_cpu = all(device.startswith("cpu") for device in devices)
    return "float32" if precision == "tf32" and on_cpu else precision


def _verdict(first: First, causes: Sequence[Cause], precision: str) -> str:
    """The first cause, in a sentence.

    A learning rate changes the weights that a step leaves, so it explains another loss of step 2,
    and not of step 1.

    >>> rate = Cause("config", "optim.lr: 0.01 in A, 0.02 in B", "weights")
    >>> _verdict(First(2, "loss", "equal", {"loss": 1e-3}), [rate], "float32")
    'config: optim.lr: 0.01 in A, 0.02 in B; first seen at step 2: loss'
    >>> _verdict(First(1, "loss", "none", {"loss": 1e-3}), [rate], "float32").partition(";")[0]
    'more than rounding: images, starting weights or code'
    """
    where = f"first seen at step {first.step}: {first.field}"
    acting = [cause for cause in causes if _acts(cause, first)]
    for kind in ("config", "data"):
        if texts := [cause.text for cause in acting if cause.kind == kind]:
            return f"{kind}: {first_of(texts, 3, separator='; ')}; {where}"
    reasons = first_of((cause.text for cause in acting), 3, separator="; ")
    losses = [size for name, size in first.sizes.items() if name != "grad_norm"]
    # Gradient norms scatter ten times as much. They count only where no loss differs.
    sizes = losses or [size / 10 for size in first.sizes.values()]
    can_round = first.field not in (*_EVIDENCE, "weights", "average")
    if can_round and all(size <= _ROUNDING.get(precision, _HALF) for size in sizes):
        if reasons:
            return f"only rounding: {reasons}; {where}"
        if not first.equal:
            other = "or a cause as small, such as one bit of a weight"
            return f"only rounding, such as of other threads, {other}; {_TELL_MORE}; {where}"
    # Another version may have made the difference, and need not; rounding may have grown.
    if any(cause.kind == "versions" for cause in acting):
        return f"versions: {reasons}; or {_large(first)}; {where}"
    also = f"{reasons}; or " if reasons and first.before == "unknown" else ""
    return f"{also}{_large(first)}; {where}"


def _large(first: First) -> str:
    """What to conclude where no known cause can have made the difference."""
    if first.field in _EVIDENCE:
        return _EVIDENCE[first.field]
    if first.before == "unknown":
        hint = "of which a run has no receipts" if first.equal else _TELL_MORE
        return f"not known: rounding or another cause in the steps before, {hint}"
    if not first.equal:
        return f"more than rounding: images, starting weights or code; {_TELL_MORE}"
    is_after = first.field in ("weights", "average")
    if is_after or first.before == "equal":
        step = first.step if is_after else first.step - 1
        update = f"the update after step {step}, whose gradients are equal"
        return f"{update}: the optimizer's code, or weights that were changed since"
    if not first.equal >= {"pixels", "start"}:
        return "pixels, starting weights (older receipts do not hold them) or code"
    return "the code of model, loss or gradient: what goes into the step is equal"
