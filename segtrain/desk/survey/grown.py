"""A folder that has grown: images stay on the side where an experiment has them."""

import hashlib
import os
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path

from segtrain.config import load_config
from segtrain.data.read.find import IMAGE_SUFFIXES, visible_files
from segtrain.data.read.lists import listed_images
from segtrain.desk.survey.groupings import Groups, groupings, shared_pixels
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError
from segtrain.files.manifest import sha256_of
from segtrain.run.directory import CONFIG
from segtrain.text import first_of, printable

Sides = dict[str, str]
"""One of _SIDES of each image, by its path."""
_SIDES = "train", "val"


def continued(
    survey: Survey, images: Sequence[Image], answers: Answers
) -> tuple[list[Image], list[Image], str, list[str]]:
    """Images to train and to evaluate on, the reason, and warnings.

    Old ones are where `answers.like` has them; under another name, if that still has the file. New
    ones go to those that they belong with, else by a hash, so that evaluation keeps its share.

    ConfigError: `answers.like` divides no images of this folder.
    """
    option, old = f"--like {printable(answers.like)}", _sides_in(answers.like)
    here = {image.path for image in images}
    kept = {path: side for path, side in old.items() if path in here}
    renamed = _renamed(answers.like, old, survey.root, here)
    kept |= {path: old[before] for path, before in renamed.items()}
    if {*kept.values()} != {*_SIDES}:
        what = f"of its {len(old)} images {len(kept)} have a label in {printable(survey.root)}"
        raise ConfigError(f"{option}: {what}; expected some to train and some to evaluate on")
    # A test split of the folder is kept for the test.
    new = [x.path for x in images if x.path not in kept and x.split != "test"]
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
    reason += f"; {len(renamed)} old ones have another name here" if renamed else ""
    lost = [path for path in old if path not in here and path not in renamed.values()]
    what = f"{len(lost)} of {len(old)} images have no label or are gone: {first_of(lost, 3)}"
    count_val = sum(old[path] == "val" for path in lost)
    what += f"; {count_val} of them were evaluated on"
    gone = f"{option}: {what}; one under another name, whose old file is gone, is new"
    return train, val, reason, [gone] if lost else []


def _renamed(experiment: Path, old: Sides, root: Path, here: set[str]) -> dict[str, str]:
    """The old name of files below `root` with the bytes of one that is no longer `here`."""
    there, of_bytes = Path(os.path.expanduser(load_config(experiment / CONFIG).data.root)), {}
    for path in sorted(old.keys() - here, key=lambda path: (old[path], path)):  # val is kept
        with suppress(OSError):  # gone there too, or a window
            of_bytes[sha256_of(there / path)] = path
    new = sorted(here - old.keys()) if of_bytes else []
    hashes = {path: sha256_of(root / path) for path in new if (root / path).is_file()}
    return {path: of_bytes[found] for path, found in hashes.items() if found in of_bytes}


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
