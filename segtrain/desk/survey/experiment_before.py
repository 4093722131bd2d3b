"""What `init --like` takes from the experiment before: its options and the order of its classes."""

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from segtrain.config import load_config
from segtrain.data.read.classes import load_class_file
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.questions import Answers, names_option
from segtrain.errors import ConfigError
from segtrain.run.directory import CONFIG
from segtrain.text import first_of, printable

# Of classes that nobody has named; see `default_names`.
_NO_NAME = re.compile(r"class_\d+|color_[0-9a-f]{6}|foreground")


def _values(text: str) -> frozenset[Any]:
    words = [] if text == "none" else text.split(",")
    return frozenset(tuple(bytes.fromhex(x[1:])) if x[0] == "#" else int(x) for x in words)


# Options that say how a folder is read, and what makes answers of them. --like and --val divide it.
_OPTIONS: Mapping[str, Callable[[str], Any]] = {
    "names": lambda text: tuple(text.split(",")),
    "leave_out": lambda text: frozenset(text.split(",")),
    "ignore": _values,
    "threshold": float,
    "channels": int,
    "group": re.compile,
    **dict.fromkeys(("images", "labels", "attribute", "pairs", "exif", "missing"), str),
    **dict.fromkeys(("instances", "task", "resize"), str),
}


def options_before(experiment: Path, given: Mapping[str, Any]) -> dict[str, Any]:
    """Answers of the command that made `experiment`, without those that are given now.

    Empty where its config does not tell the command, as that of a run. What images without a label
    are is one answer in two options: --missing and --leave-out.
    """
    said = {key for key, x in given.items() if x is not None and (key, x) != ("leave_out", set())}
    said |= {"missing", "leave_out"} if said & {"missing", "leave_out"} else set()
    try:
        first = (experiment / CONFIG).read_text("utf-8").partition("\n")[0]
        if first.endswith("..."):  # cut off
            return {}
        words = shlex.split(first.partition(": segtrain init ")[2])[1:]
        keys = [word.removeprefix("--").replace("-", "_") for word in words[::2]]
        before = dict(zip(keys, words[1::2], strict=True))
        return {k: read(before[k]) for k, read in _OPTIONS.items() if k in before and k not in said}
    except (OSError, ValueError, re.error):  # the config of a run, or written by hand
        return {}


def with_classes_before(classes: Classes, answers: Answers) -> Classes:
    """`classes`, which keep the order of those of `answers.like`; new ones are said.

    ConfigError: they have other names, or another order: a class would be taken for another one.
    """
    if answers.like is None:
        return classes
    option, config = f"--like {printable(answers.like)}", load_config(answers.like / CONFIG)
    now, place = [x.name for x in classes.classes], printable(config.data.classes)
    try:
        overlapping = config.task == "multilabel"
        before = load_class_file(config.data.classes, overlapping=overlapping)
    except ConfigError as error:
        note = f"{option}: its classes are not compared: {error}"
        return replace(classes, warnings=(*classes.warnings, note))
    old, way = before.names, f"--val {shlex.quote(config.data.eval_split)} instead of --like"
    way += " (new images are all trained on then, until their lines are put into that file)"
    # Labels that were drawn have other values than those of the folder.
    if config.data.labels_dir is None and config.data.label_format == "ids":
        ids = {x.name: {*x.ids} for x in before.classes}
        for name, values, *_ in classes.classes:
            if ids.get(name, {*values}).isdisjoint(values):
                what = f"{name} is {values[0]} here, and {min(ids[name])} in {place}"
                raise ConfigError(f"{option}: {what}; if this is right, {printable(way)}")
    if _is_continued(old, now, is_said=answers.names is not None):
        added = [name for name in now if name not in old]
        notes = [f"classes that {place} does not have: {first_of(added)}"] if added else []
    elif _is_named(old, now):
        notes = [f"classes {first_of(now, 20)}: {place} calls them {first_of(old, 20)}"]
    else:
        what = f"classes are {first_of(now, 20)} here, and {first_of(old, 20)} in {place}"
        way = f"{names_option(old)}, if the labels mean what they did; else {way}"
        raise ConfigError(f"{option}: {what}; {printable(way)}")
    return replace(classes, warnings=(*classes.warnings, *notes))


def _is_continued(old: Sequence[str], now: Sequence[str], *, is_said: bool) -> bool:
    """Whether `now` has the names in this order, and others behind them.

    Or between them, unless --names says them: the first values would get another name.
    """
    rest = iter(now)
    return [*now[: len(old)]] == [*old] or (not is_said and all(name in rest for name in old))


def _is_named(old: Sequence[str], now: Sequence[str]) -> bool:
    """Whether they differ in names of classes that had none."""
    return len(old) <= len(now) and all(
        a == b or (_NO_NAME.fullmatch(a) and not _NO_NAME.fullmatch(b) and b not in old)
        for a, b in zip(old, now, strict=False)
    )
