"""Which classes the channels of a converted classifier are."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.config.loading import yaml_value
from segtrain.convert.layout import Plan
from segtrain.data.read.classes import ClassFile, known_names, load_class_file
from segtrain.errors import CheckpointError, ConfigError
from segtrain.text import MAX_NAME, first_of, printable

STORED = "stored"
"""As `--class-order`: the names that the file itself stores."""


class Choice(NamedTuple):
    """The classes of the converted model.

    spec: what data.classes gets: a name or a path.
    order: the channel of the file for each class; None: as they are.
    """

    spec: str
    classes: ClassFile
    order: list[int] | None
    lines: list[str]


def choose_classes(plan: Plan, spec: str | None, class_order: str | None) -> Choice:
    """The classes of `plan`: those of the class file `spec`, or those that its file stores.

    class_order: a class file that lists the classes in the order of the channels in the file, or
        `STORED`; channels are then put into the order of `spec`, by name.

    Raises:
        ConfigError: no class file, or another number of classes; missing or extra names.
        CheckpointError: one channel, which is no softmax over classes.
    """
    if plan.num_classes == 1:
        raise CheckpointError(
            "the classifier has one channel, a sigmoid; segtrain's softmax needs a channel for "
            "each class, the background too"
        )
    if spec is None:
        if class_order is not None:
            raise ConfigError("--class-order: needs --classes, which gives the new order")
        spec = _equal_known(plan.class_names)
    if spec is None:
        raise ConfigError(
            f"--classes: the file has a classifier of {plan.num_classes} classes and no usable "
            f"names; name its class file, a YAML{_suggestion(plan.num_classes)}"
        )
    classes = load_class_file(spec)
    if classes.num_classes != plan.num_classes:
        raise ConfigError(
            f"--classes {printable(spec)}: {classes.num_classes} classes, and the classifier of "
            f"the file has {plan.num_classes}{_suggestion(plan.num_classes)}"
        )
    if class_order is None:
        lines = _compare(plan.class_names, classes.names, "--classes")
        lines += _compare_ids(plan, classes)
        return Choice(spec, classes, None, lines)
    there = _order_names(plan, class_order)
    order = _matched(there, classes.names, class_order)
    lines = _compare(plan.class_names, there, "--class-order") + _compare_ids(plan, classes)
    moved = sum(i != j for i, j in enumerate(order))
    if moved == 0:
        return Choice(spec, classes, None, [*lines, "they come in this order already"])
    line = f"{moved} of {len(order)} channels moved, by their names"
    return Choice(spec, classes, order, [*lines, line])


def class_file_text(plan: Plan) -> str:
    """A class file of the names that a checkpoint stores, in their order."""
    names, palette = plan.class_names, plan.palette
    lines = ["# Written by segtrain convert, from the names in the checkpoint."]
    if plan.drops_zero:
        lines.append("# The config in the checkpoint has reduce_zero_label: id 0 is ignored.")
    lines.append("classes:")
    colors = palette if len(set(palette)) == len(names) else [None] * len(names)
    for i, (name, color) in enumerate(zip(names, colors, strict=True)):
        shown = "" if color is None else f", color: {yaml_value(color)}"
        shown += f", ids: [{i + 1}]" if plan.drops_zero else ""
        lines.append(f"  - {{name: {yaml_value(name)}{shown}}}")
    if plan.drops_zero:
        lines.append("ignore_ids: [0, 255]")
    return "\n".join(lines) + "\n"


def stored_file(plan: Plan, spec: str | None, output: Path) -> Path | None:
    """Where the names of the file's classes must be written; None: a class file has them."""
    if spec is not None or not plan.class_names or len(plan.class_names) != plan.num_classes:
        return None
    return None if _equal_known(plan.class_names) else output.with_suffix(".classes.yaml")


def _compare_ids(plan: Plan, classes: ClassFile) -> list[str]:
    """A warning if the labels of the file's config have other ids than those of `classes`."""
    if not plan.drops_zero or not any(0 in c.ids for c in classes.classes):
        return []
    return [
        "warning: the config in the file has reduce_zero_label: id 0 of its labels is ignored and "
        f"class i has id i + 1; in {classes.name} id 0 is a class"
    ]


def _equal_known(names: Sequence[str]) -> str | None:
    wanted = list(map(_plain, names))
    for known in known_names() if wanted else ():
        if list(map(_plain, load_class_file(known).names)) == wanted:
            return known
    return None


def _suggestion(num_classes: int) -> str:
    fitting = [name for name in known_names() if load_class_file(name).num_classes == num_classes]
    return f"; {' and '.join(fitting)} has as many" if fitting else ""


def _compare(there: Sequence[str], here: Sequence[str], option: str) -> list[str]:
    """Lines about names that the file stores and that are not those that `option` gives.

    Raises:
        ConfigError: they are the same names in another order.
    """
    if there and len(there) != len(here):
        return [f"warning: the file stores {len(there)} names for {len(here)} channels"]
    different = [
        (i, _shown(a), _shown(b))
        for i, (a, b) in enumerate(zip(there, here, strict=False))
        if _plain(a) != _plain(b)
    ]
    if not different:
        return []
    if sorted(map(_plain, there)) == sorted(map(_plain, here)):
        i, a, b = different[0]
        raise ConfigError(
            f"{option}: the file stores the same {len(here)} classes in another order (class {i} "
            f"is {a} there, {b} here); --class-order {STORED} puts the channels in order by name"
        )
    pairs = [f"{i} {a} there, {b} here" for i, a, b in different]
    listed = first_of(pairs, 5, separator="; ")
    return [f"warning: {len(pairs)} of {len(here)} classes have other names: {listed}"]


def _order_names(plan: Plan, class_order: str) -> Sequence[str]:
    if class_order != STORED:
        return load_class_file(class_order).names
    if not plan.class_names:
        raise ConfigError(f"--class-order {STORED}: the file stores no names of classes")
    return plan.class_names


def _matched(there: Sequence[str], here: Sequence[str], source: str) -> list[int]:
    """The position in `there` of each name in `here`."""
    theirs, ours = list(map(_plain, there)), list(map(_plain, here))
    missing = [name for name in here if _plain(name) not in theirs]
    extra = [name for name in there if _plain(name) not in ours]
    only = {"--classes": missing, "--class-order": extra}
    problems = [f"  {len(n)} only in {where}: {first_of(n)}" for where, n in only.items() if n]
    if len(set(theirs)) != len(theirs) or len(there) != len(here):
        problems.append(f"  {len(there)} names there and {len(here)} here; expected each name once")
    if problems:
        raise ConfigError(
            f"--class-order {printable(source)}: expected the names of --classes in another "
            "order:\n" + "\n".join(problems)
        )
    return [theirs.index(name) for name in ours]


def _plain(name: str) -> str:
    """A name without what data sets write differently."""
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())


def _shown(name: str) -> str:
    return printable(name, MAX_NAME)
