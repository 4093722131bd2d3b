"""A folder that has grown: images stay on the side where an experiment has them, and classes."""

import hashlib
import os
import re
import shlex
from collections import Counter, defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

from segtrain.config import load_config
from segtrain.data.read.classes import load_class_file
from segtrain.data.read.find import IMAGE_SUFFIXES, visible_files
from segtrain.data.read.lists import listed_images
from segtrain.desk.survey.class_table import Classes
from segtrain.desk.survey.groupings import Groups, groupings, shared_pixels
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.questions import Answers, names_option
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError
from segtrain.run.directory import CONFIG
from segtrain.text import first_of, printable

Sides = dict[str, str]
"""One of _SIDES of each image, by its path."""
_SIDES = "train", "val"
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


def continued(
    survey: Survey, images: Sequence[Image], answers: Answers
) -> tuple[list[Image], list[Image], str, list[str]]:
    """Images to train and to evaluate on, the reason, and warnings.

    Old ones are where `answers.like` has them. New ones go to those that they belong with, else by
    a hash, so that evaluation keeps its share.

    ConfigError: `answers.like` divides no images of this folder.
    """
    option, old = f"--like {printable(answers.like)}", _sides_in(answers.like)
    here = {image.path for image in images}
    kept = {path: side for path, side in old.items() if path in here}
    if {*kept.values()} != {*_SIDES}:
        what = f"of its {len(old)} images {len(kept)} have a label in {printable(survey.root)}"
        raise ConfigError(f"{option}: {what}; expected some to train and some to evaluate on")
    # A test split of the folder is kept for the test.
    new = [x.path for x in images if x.path not in old and x.split != "test"]
    group_of, how = next(iter(groupings(survey, images, answers.group)))
    share = Counter(old.values())["val"] / len(old)
    share = answers.val if isinstance(answers.val, float) else share
    added = _sides_of(new, kept, group_of, share * (len(kept) + len(new)))
    sides = kept | added
    # Whichever side such a new tile goes to, the other one shows pixels of it.
    shared = [pair for pair in shared_pixels(survey, images) if {*pair} <= {*sides}]
    beside = {x for a, b in shared if sides[a] != sides[b] for x in (a, b) if x in added}
    used = [x for x in images if x.path in sides and x.path not in beside]
    train, val = ([x for x in used if sides[x.path] == side] for side in _SIDES)
    count = [sum(x.path in added for x in part) for part in (train, val)]
    reason = f"{len(kept)} images as {printable(answers.like)} has them; of {len(added)} new ones "
    reason += f"{count[0]} to train and {count[1]} to evaluate on: {how}"
    reason += f"; {len(beside)} that overlap the other side left out" if beside else ""
    lost = [path for path in old if path not in here]
    what = f"{len(lost)} of {len(old)} images have no label or are gone: {first_of(lost, 3)}"
    gone = f"{option}: {what}; an image under another name counts as new, on either side"
    return train, val, reason, [gone] if lost else []


def unlisted(config: Path, folder: Path) -> list[str]:
    """Pictures below `folder` that came after `config` was written: labels and images alike.

    By the time at which a file got its place there. Those that were left out then are older.
    """
    written_ns, found = config.stat().st_mtime_ns, []
    for name in visible_files(folder):
        with suppress(OSError):  # a link to nothing
            is_new = (folder / name).stat().st_ctime_ns > written_ns
            found += [name] if is_new and name.lower().endswith(IMAGE_SUFFIXES) else []
    if not found or load_config(config).data.layout != "list":
        return []
    return sorted({*found} - {path.partition("#xywh=")[0] for path in _sides_in(config.parent)})


def gone_files(config: Path) -> tuple[list[str], list[str]]:
    """Lists that `config` names, and else images of its lists, that are no longer there."""
    data = load_config(config).data
    if data.layout != "list":
        return [], []
    root = Path(os.path.expanduser(data.root))
    lists = [str(x) for x in (data.train_split, data.eval_split) if not (root / x).exists()]
    files = () if lists else (path.partition("#xywh=")[0] for path in _sides_in(config.parent))
    return lists, [x for x in files if not (root / x).exists()]


def _sides_in(experiment: Path) -> Sides:
    """The sides of an experiment that `segtrain init` has written, by the paths in its lists."""
    data = load_config(experiment / CONFIG).data
    if data.layout != "list":
        what = f"expected data.layout list, as segtrain init writes it, found {data.layout}"
        raise ConfigError(f"--like {printable(experiment)}: {what}")
    root = Path(os.path.expanduser(data.root))
    lists = zip(_SIDES, (data.train_split, data.eval_split), strict=True)
    return {path: side for side, name in lists for path in listed_images(root / name)}


def _sides_of(new: Sequence[str], kept: Mapping[str, str], group_of: Groups, size: float) -> Sides:
    """Sides of new images; size: how many of all are to be evaluated on."""
    sides_of_group: dict[str, set[str]] = defaultdict(set)
    for path, side in kept.items():
        sides_of_group[group_of[path]].add(side)
    of_group = {path: sides_of_group.get(group_of[path], set()) for path in new}
    sides = {path: min(found) for path, found in of_group.items() if len(found) == 1}
    # A group on both sides was not kept together: its new images go one by one.
    free = {x: x if of_group[x] else group_of[x] for x in new if x not in sides}
    room, sizes = size - Counter([*kept.values(), *sides.values()])["val"], Counter(free.values())
    chosen = set()
    for group in sorted(sizes, key=lambda x: hashlib.sha256(os.fsencode(x)).hexdigest()):
        if sizes[group] / 2 <= room:
            chosen.add(group)
            room -= sizes[group]
    return sides | {path: "val" if group in chosen else "train" for path, group in free.items()}
