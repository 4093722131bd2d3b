"""Which classes the channels of a converted classifier are."""

from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from segtrain.config.loading import yaml_value
from segtrain.data.read.classes import (
    ClassFile,
    known_names,
    load_class_file,
    parse_class_file,
    plain_names,
)
from segtrain.desk.convert.conversion import Conversion
from segtrain.errors import CheckpointError, ConfigError
from segtrain.text import MAX_NAME, first_of, printable

STORED = "stored"
"""As `--class-order`: the names that the file itself stores."""


class Choice(NamedTuple):
    """The classes of the converted model.

    spec: what data.classes gets: a name or a path.
    order: the channel of the file for each class; None: as they are.
    text: of the class file at `spec`, which is yet to be written; None: there is one.
    lines: for the report.
    """

    spec: str
    classes: ClassFile
    order: list[int] | None = None
    text: str | None = None
    lines: Sequence[str] = ()


def choose_classes(
    plan: Conversion, spec: str | None, class_order: str | None, *, own: Path
) -> Choice:
    """The classes of `plan`: those of the class file `spec`, or those that its file stores.

    class_order: a class file that lists the classes in the order of the channels in the file, or
        `STORED`; channels are then put into the order of `spec`, by name.
    own: where stored names can be written that no class file has.

    Raises:
        ConfigError: no class file, or another number of classes; missing or extra names.
        CheckpointError: one channel, which is no softmax over classes; unusable stored names.
    """
    if plan.num_classes == 1:
        what = "segtrain's softmax needs a channel for each class, the background too"
        raise CheckpointError(f"the classifier has one channel, a sigmoid; {what}")
    if spec is None and class_order is not None:
        raise ConfigError("--class-order: needs --classes, which gives the new order")
    # Names that a known class file has need no file of their own.
    spec = spec or _equal_known(plan.class_names)
    if spec is None and len(plan.class_names) == plan.num_classes:
        return _stored(plan, own)
    if spec is None:
        there = f"the file has {plan.num_classes} classes and no usable names"
        raise ConfigError(f"--classes: {there}; name its class file, a YAML")
    classes = load_class_file(spec)
    if classes.num_classes != plan.num_classes:
        there = f"{classes.num_classes} classes, and the file has {plan.num_classes}"
        raise ConfigError(f"--classes {printable(spec)}: {there}")
    there, order, option = classes.names, None, "--classes"
    if class_order is not None:
        stored = class_order == STORED
        there = plan.class_names if stored else load_class_file(class_order).names
        order, option = _matched(there, classes.names, class_order), "--class-order"
    lines = _compare(plan.class_names, there, option)
    if plan.drops_zero and any(0 in c.ids for c in classes.classes):
        lines.append(
            "warning: the config in the file has reduce_zero_label: id 0 of its labels is ignored "
            f"and class i has id i + 1; in {classes.name} id 0 is a class"
        )
    return Choice(spec, classes, order, lines=lines)


def _stored(plan: Conversion, path: Path) -> Choice:
    """The names that the file stores, in their order."""
    entries: list[dict[str, object]] = [{"name": name} for name in plan.class_names]
    lines = ["# Written by segtrain convert, from the names in the checkpoint."]
    if plan.drops_zero:
        lines += ["# The config in the checkpoint has reduce_zero_label.", "ignore_ids: [0, 255]"]
        entries = [entry | {"ids": [i]} for i, entry in enumerate(entries, start=1)]
    text = "\n".join([*lines, "classes:", *(f"  - {yaml_value(e)}" for e in entries), ""])
    try:
        return Choice(str(path), parse_class_file(text, path), text=text)
    except ConfigError as error:
        what = "the names of classes in the file cannot be used; name a class file in --classes"
        raise CheckpointError(f"{what}: {error}") from None


def _equal_known(names: Sequence[str]) -> str | None:
    for known in known_names() if names else ():
        if plain_names(load_class_file(known).names) == plain_names(names):
            return known
    return None


def _compare(there: Sequence[str], here: Sequence[str], option: str) -> list[str]:
    """A warning if the names that the file stores are not those that `option` gives.

    Raises:
        ConfigError: they are the same names in another order.
    """
    theirs, ours = plain_names(there), plain_names(here)
    if not there or theirs == ours:
        return []
    # The same names in another order would score each class as another one.
    if sorted(theirs) == sorted(ours):
        raise ConfigError(
            f"{option}: the file stores the same {len(here)} classes in another order; "
            f"--class-order {STORED} puts the channels in order by name"
        )
    pairs = [
        f"{i} {printable(a, MAX_NAME)} there, {printable(b, MAX_NAME)} here"
        for i, (a, b) in enumerate(zip(there, here, strict=False))
        if theirs[i] != ours[i]
    ]
    listed = first_of(pairs, 5, separator="; ")
    return [f"warning: the file stores {len(there)} names for {len(here)} classes: {listed}"]


def _matched(there: Sequence[str], here: Sequence[str], source: str) -> list[int]:
    """The position in `there` of each name in `here`; each name must stand once in both."""
    theirs, ours = plain_names(there), plain_names(here)
    if sorted(theirs) != sorted(ours) or len(set(ours)) < len(ours):
        missing = [name for name, plain in zip(here, ours, strict=True) if plain not in theirs]
        raise ConfigError(
            f"--class-order {printable(source)}: expected the {len(here)} names of --classes in "
            f"another order, each once; found {len(there)}, without {first_of(missing) or 'none'}"
        )
    return [theirs.index(name) for name in ours]
