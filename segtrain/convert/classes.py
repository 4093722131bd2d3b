"""Which classes the channels of a converted classifier are."""

import json
from collections.abc import Sequence
from pathlib import Path
from typing import NamedTuple

from pydantic import ValidationError

from segtrain.config.loading import yaml_value
from segtrain.convert.layout import Plan
from segtrain.data.read.classes import (
    ClassFile,
    class_file_from_json,
    known_names,
    load_class_file,
)
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


def choose_classes(plan: Plan, spec: str | None, class_order: str | None, *, own: Path) -> Choice:
    """The classes of `plan`: those of the class file `spec`, or those that its file stores.

    class_order: a class file that lists the classes in the order of the channels in the file, or
        `STORED`; channels are then put into the order of `spec`, by name.
    own: where stored names can be written that no class file has.

    Raises:
        ConfigError: no class file, or another number of classes; missing or extra names.
        CheckpointError: one channel, which is no softmax over classes; unusable stored names.
    """
    if plan.num_classes == 1:
        raise CheckpointError(
            "the classifier has one channel, a sigmoid; segtrain's softmax needs a channel for "
            "each class, the background too"
        )
    if spec is None and class_order is not None:
        raise ConfigError("--class-order: needs --classes, which gives the new order")
    spec = spec or _equal_known(plan.class_names)
    if spec is None and len(plan.class_names) == plan.num_classes:
        return _stored(plan, own)
    if spec is None:
        fitting = [n for n in known_names() if load_class_file(n).num_classes == plan.num_classes]
        suggestion = f"; {' and '.join(fitting)} has as many" if fitting else ""
        raise ConfigError(
            f"--classes: the file has a classifier of {plan.num_classes} classes and no usable "
            f"names; name its class file, a YAML{suggestion}"
        )
    classes = load_class_file(spec)
    if classes.num_classes != plan.num_classes:
        raise ConfigError(
            f"--classes {printable(spec)}: {classes.num_classes} classes, and the classifier of "
            f"the file has {plan.num_classes}"
        )
    there, order, lines = classes.names, None, []
    if class_order is not None:
        there = _order_names(plan, class_order)
        order = _matched(there, classes.names, class_order)
        moved = sum(i != j for i, j in enumerate(order))
        lines = [f"classes     {moved} of {len(order)} channels moved, by their names"]
    option = "--classes" if class_order is None else "--class-order"
    lines = _compare(plan.class_names, there, option) + lines
    if plan.drops_zero and any(0 in c.ids for c in classes.classes):
        lines.append(
            "warning: the config in the file has reduce_zero_label: id 0 of its labels is ignored "
            f"and class i has id i + 1; in {classes.name} id 0 is a class"
        )
    return Choice(spec, classes, order, lines=lines)


def _stored(plan: Plan, path: Path) -> Choice:
    """The names that the file stores, in their order."""
    entries: list[dict[str, object]] = [{"name": name} for name in plan.class_names]
    lines = ["# Written by segtrain convert, from the names in the checkpoint."]
    if len(set(plan.palette)) == len(entries):
        entries = [e | {"color": c} for e, c in zip(entries, plan.palette, strict=True)]
    file: dict[str, object] = {"name": path.stem}
    if plan.drops_zero:
        lines.append("# The config in the checkpoint has reduce_zero_label: id 0 is ignored.")
        entries = [entry | {"ids": [i]} for i, entry in enumerate(entries, start=1)]
        file["ignore_ids"] = [0, 255]
    try:
        classes = class_file_from_json(json.dumps(file | {"classes": entries}))
    except (ConfigError, ValidationError) as error:
        what = error.errors()[0]["msg"] if isinstance(error, ValidationError) else error
        raise CheckpointError(
            "the names of classes in the file cannot be used; name a class file in --classes: "
            f"{what}"
        ) from None
    lines += ["classes:", *(f"  - {yaml_value(entry)}" for entry in entries)]
    lines += ["ignore_ids: [0, 255]"] if plan.drops_zero else []
    return Choice(str(path), classes, text="\n".join(lines) + "\n")


def _equal_known(names: Sequence[str]) -> str | None:
    wanted = list(map(_plain, names))
    for known in known_names() if wanted else ():
        if list(map(_plain, load_class_file(known).names)) == wanted:
            return known
    return None


def _compare(there: Sequence[str], here: Sequence[str], option: str) -> list[str]:
    """A warning if the names that the file stores are not those that `option` gives.

    Raises:
        ConfigError: they are the same names in another order.
    """
    if there and len(there) != len(here):
        return [f"warning: the file stores {len(there)} names for {len(here)} channels"]
    different = [
        (i, printable(a, MAX_NAME), printable(b, MAX_NAME))
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
    """The position in `there` of each name in `here`; each name must stand once in both."""
    theirs, ours = list(map(_plain, there)), list(map(_plain, here))
    if sorted(theirs) != sorted(ours) or len(set(ours)) < len(ours):
        missing = [name for name in here if _plain(name) not in theirs]
        extra = [name for name in there if _plain(name) not in ours]
        raise ConfigError(
            f"--class-order {printable(source)}: expected the {len(here)} names of --classes in "
            f"another order, each once; found {len(there)}, only in --classes: "
            f"{first_of(missing) or 'none'}; only in --class-order: {first_of(extra) or 'none'}"
        )
    return [theirs.index(name) for name in ours]


def _plain(name: str) -> str:
    """A name without what data sets write differently."""
    return " ".join(name.lower().replace("_", " ").replace("-", " ").split())
