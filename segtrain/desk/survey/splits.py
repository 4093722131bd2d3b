"""The decision: which images to train and to evaluate on; a pure function of the survey."""

import hashlib
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import NamedTuple, Self

from segtrain.data.read.sources import groups_of, sources_of, stems_of
from segtrain.data.read.tiles import overlapping, strips
from segtrain.desk.survey.contents import Value
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.label_set import LabelSet
from segtrain.desk.survey.questions import Answers
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError, DataError
from segtrain.text import counted, first_of

DEFAULT_VAL = 0.2
# Fewer groups are no division: all of one would be missing from training.
_MIN_GROUPS = 4
_BANDS = 5


@dataclass(frozen=True)
class Splits:
    """Images with labels; reason: of the division."""

    train: tuple[Image, ...]
    val: tuple[Image, ...]
    reason: str
    warnings: tuple[str, ...] = ()


def choose_splits(survey: Survey, labels: LabelSet, answers: Answers) -> Splits:
    """The images to train on and those to evaluate on; only images with a label.

    Raises:
        DataError: fewer than two images have labels.
    """
    images = [image for image in survey.images if image.path in labels.labels]
    if len(images) < 2:
        raise DataError(
            f"{survey.root}: {counted(len(images), 'image has', 'images have')} a "
            "label; training and evaluation need one each at least"
        )
    train, val, reason = [], [], ""
    # Splits that are there count, unless --val is a fraction, by which all are divided anew.
    if survey.split_source and not isinstance(answers.val, float):
        train, val, reason = _given(survey, images)
        if not any(labels.labels[image.path] for image in train):  # good parts alone, as MVTec's
            train, val = [], []
            images = [replace(image, split=None) for image in images]
        images = train or val or images  # the other one is hidden, perhaps
    if not (train and val):
        train, val, reason = _divided(survey, labels, images, answers)
    if answers.group is not None:
        _check_groups(answers.group, train, val)
    leak = _leak(survey, train, val)
    return Splits(tuple(train), tuple(val), reason, (leak,) if leak else ())


def _given(survey: Survey, images: Sequence[Image]) -> tuple[list[Image], list[Image], str]:
    """The splits of the folder or its lists; one may be empty."""
    by_split: dict[str | None, list[Image]] = defaultdict(list)
    for image in images:
        by_split[image.split].append(image)
    train = by_split.pop("train", [])
    val_name = "val" if by_split["val"] else "test"
    # Labels of val and test alone: val is divided, and test stays apart.
    if not train and by_split["val"] and by_split["test"]:
        return [], by_split["val"], ""
    val = by_split.pop(val_name, []) if train else []
    unused = "".join(
        f"; {len(of_split)} of {name or 'no split'} are not used"
        for name, of_split in by_split.items()
        if of_split
    )
    return train, val, f"the splits of {survey.split_source}: train and {val_name}{unused}"


class _Division(NamedTuple):
    """A way to divide the images.

    how: in words. left_out: tiles that show what is evaluated on. num_lost: values that images
    show, and none to train on. cost: shares of values that are not trained on, half of those that
    are not evaluated, and of images that are not trained on.
    """

    train: list[Image]
    val: list[Image]
    how: str
    left_out: set[str]
    num_lost: int
    cost: float

    @classmethod
    def of(
        cls,
        labels: LabelSet,
        images: Sequence[Image],
        how: str,
        is_val: Sequence[bool],
        pairs: Sequence[tuple[str, str]],
    ) -> Self:
        """is_val: whether each image is to be evaluated on. pairs: tiles that overlap."""
        val = [image for image, there in zip(images, is_val, strict=True) if there]
        others = [image for image, there in zip(images, is_val, strict=True) if not there]
        left_out = _overlapping(pairs, others, val)
        train = [image for image in others if image.path not in left_out]
        num_lost, not_evaluated = (len(_lost(labels, images, part)) for part in (train, val))
        cost = (num_lost + not_evaluated / 2) / max(1, len(labels.shown_in))
        cost += 1 - len(train) / len(images)
        # Tiles that overlap are better than nothing to train on.
        return cls(train or others, val, how, left_out, num_lost, cost)


def _divided(
    survey: Survey, labels: LabelSet, images: Sequence[Image], answers: Answers
) -> tuple[list[Image], list[Image], str]:
    """A division by a hash of names; what belongs together stays together.

    Unless training would lose a class by it, as where a folder of images is one.
    """
    share = answers.val if isinstance(answers.val, float) else DEFAULT_VAL
    # A test split of the folder is kept for the test, if anything else is left.
    rest = [image for image in images if image.split != "test"]
    unused = len(images) - len(rest) if len(rest) > 1 else 0
    images = rest if unused else images
    pairs = _shared_pixels(survey, images)
    tried: list[_Division] = []
    for key, how in _groupings(survey, images, answers.group):
        groups = list(map(key, images))
        few = chosen_groups(groups, share)
        more = few | _with_rare_classes(labels, images, key, few)
        # Each tile to evaluate on costs those that overlap it: fewer groups may lose less.
        for chosen in (more, few) if pairs else (more,):
            is_val = [group in chosen for group in groups]
            tried.append(_Division.of(labels, images, how, is_val, pairs))
        if not (pairs or tried[-1].num_lost):  # the first that costs no class is the best
            tried = tried[-1:]
            break
    best = min(tried, key=lambda division: division.cost)
    train, val, what, beside = best.train, best.val, best.how, best.left_out
    reason = f"{len(val)} of {len(images)} images, {what}, chosen by a hash of the names (--val)"
    reason += f"; {unused} of test are not used" if unused else ""
    if beside and len(train) + len(val) < len(images):
        which = counted(len(beside), "tile that overlaps", "tiles that overlap")
        reason += f"; {which} them left out"
    return train, val, reason


def chosen_groups(groups: Sequence[str], share: float) -> set[str]:
    """The groups to evaluate on: about this share of the images; groups: that of each image."""
    sizes = Counter(groups)
    # By a hash, so that no order of names decides, and equal names give equal splits.
    order = sorted(sizes, key=lambda name: hashlib.sha256(name.encode()).hexdigest())
    chosen, size = set(), 0
    # The last group is always left to train on.
    for name in order[:-1]:
        if size + sizes[name] / 2 <= max(share * len(groups), 1):
            chosen.add(name)
            size += sizes[name]
    return chosen or {order[0]}


def _lost(labels: LabelSet, images: Sequence[Image], train: Sequence[Image]) -> list[Value]:
    """The values that images show, and none to train on."""
    here, kept = ({image.path for image in part} for part in (images, train))
    return [value for value, where in labels.shown_in.items() if where & here and not where & kept]


def _with_rare_classes(
    labels: LabelSet, images: Sequence[Image], key: Callable[[Image], str], chosen: set[str]
) -> set[str]:
    """Groups to evaluate on beside those `chosen`, so that each class is evaluated.

    Of each class that at least two groups show, and none of the chosen, the first group by name, if
    all that the group shows can be trained on without it.
    """
    added: set[str] = set()
    # The rarest class first: it has the fewest groups to choose from.
    by_count = sorted(labels.shown_in.items(), key=lambda item: (len(item[1]), str(item[0])))
    for _, where in by_count:
        groups = sorted({key(image) for image in images if image.path in where})
        if len(groups) < 2 or (chosen | added).intersection(groups):
            continue
        for group in groups:
            out = chosen | added | {group}
            if not _lost(labels, images, [image for image in images if key(image) not in out]):
                added.add(group)
                break
    return added


def _check_groups(group: re.Pattern[str], train: Sequence[Image], val: Sequence[Image]) -> None:
    """Refuses given splits that divide a group."""
    both = set(groups_of(group, [x.path for x in train])) & set(
        groups_of(group, [x.path for x in val])
    )
    if both:
        what = counted(len(both), "group is", "groups are")
        raise ConfigError(
            f"--group {group.pattern}: {what} on both sides of the splits that are there: "
            f"{first_of(sorted(both))}; --val {DEFAULT_VAL} divides anew"
        )


def _groupings(
    survey: Survey, images: Sequence[Image], group: re.Pattern[str] | None
) -> Iterator[tuple[Callable[[Image], str], str]]:
    """What stays together when images are divided: scene, sequence, or blocks of like images.

    The best first, the last one is single images. `group` leaves no choice.

    Raises:
        ConfigError: all images are of one group.
    """
    if group is not None:
        paths = [image.path for image in images]
        group_by_path = dict(zip(paths, groups_of(group, paths), strict=True))
        number = len(set(group_by_path.values()))
        if number in (1, len(images)):
            what = "all images are of one group" if number == 1 else "each image is a group"
            raise ConfigError(f"--group {group.pattern}: {what}")
        yield lambda image: group_by_path[image.path], f"whole groups ({number}, --group)"
        return
    alike = _alike(survey, images)
    sizes = Counter(alike.values())
    first: dict[str, str] = {}
    # The first image of each group with the others, to join named groups that share copies.
    same = [(first.setdefault(group, path), path) for path, group in alike.items()]
    # Tiles that overlap hang together all over the picture: only bands of it can be divided.
    if _shared_pixels(survey, images) and max(sizes.values()) > len(images) / 2:
        for side in (None, 1, 2):
            for turn in range(_BANDS):
                band = _bands(survey, images, side, turn)
                what = "a band of the picture that they are tiles of"
                if len(set(band.values())) > 1:  # not of one place only
                    yield lambda image, band=band: band[image.path], what
    for of_one, what, least in _named_groups(images):
        # Copies of a picture may have names of several sequences: img_001, img_001_aug1.
        joined = _joined(of_one, same)
        if len(set(joined.values())) >= least:
            yield lambda image, joined=joined: joined[image.path], what
    if _MIN_GROUPS <= len(sizes) < len(images) and max(sizes.values()) <= len(images) / 2:
        yield lambda image: alike[image.path], "copies and like images kept together"
    if survey.similar or survey.moving:
        # Frames of one video: a fifth of them in a row.
        ordered = sorted(images, key=lambda image: image.place)
        size = max(1, len(images) // 5)
        fifths = {image.path: i // size for i, image in enumerate(ordered)}
        yield lambda image: str(fifths[image.path]), "a block of one sequence"
    yield lambda image: image.path, "single images"


def _alike(survey: Survey, images: Sequence[Image]) -> dict[str, str]:
    """The group of each image, by path: copies by name, near-duplicates, tiles that overlap."""
    sources = sources_of([image.name for image in images])
    of_one = dict(zip((image.path for image in images), sources, strict=True))
    return _joined(of_one, [*survey.similar, *_shared_pixels(survey, images)])


def _joined(group_of: Mapping[str, str], pairs: Iterable[tuple[str, str]]) -> dict[str, str]:
    """The group of each image, by path; those of the two images of a pair are one.

    >>> _joined({"1.png": "a", "2.png": "b", "3.png": "c"}, [("1.png", "2.png")])
    {'1.png': 'b', '2.png': 'b', '3.png': 'c'}
    """
    parent: dict[str, str] = {}

    def root(group: str) -> str:
        # Union-find: each step shortens the way to the root.
        while (above := parent.setdefault(group, group)) != group:
            parent[group] = group = parent[above]
        return group

    for one, other in pairs:
        if one in group_of and other in group_of:
            parent[root(group_of[one])] = root(group_of[other])
    return {path: root(group) for path, group in group_of.items()}


def _shared_pixels(survey: Survey, images: Sequence[Image]) -> list[tuple[str, str]]:
    """Tiles that show the same part of a larger picture, by their paths."""
    boxes = [survey.tiles.get(image.path) for image in images]
    return [(images[i].path, images[j].path) for i, j in overlapping(boxes)]


def _overlapping(
    pairs: Sequence[tuple[str, str]], train: Sequence[Image], val: Sequence[Image]
) -> set[str]:
    """The tiles to train on that show what tiles to evaluate on show, too; pairs: that overlap."""
    trained, evaluated = ({image.path for image in part} for part in (train, val))
    both = {two for pair in pairs for two in (pair, pair[::-1])}
    return {tile for tile, other in both if tile in trained and other in evaluated}


def _bands(survey: Survey, images: Sequence[Image], side: int | None, turn: int) -> dict[str, str]:
    """A fifth of the tiles as one group, from the top down (side 1) or from the left (2).

    None: along the longer side of the picture. turn: which band is called the first.
    """
    boxes = [survey.tiles.get(image.path) for image in images]
    placed = zip(images, strips(boxes, _BANDS, side), strict=True)
    return {
        image.path: image.path if strip is None else f"band {(strip + turn) % _BANDS}"
        for image, strip in placed
    }


def _leak(survey: Survey, train: Sequence[Image], val: Sequence[Image]) -> str:
    """A warning if many images to evaluate on have a near-duplicate among those to train on."""
    pairs = set(survey.similar)
    if survey.moving:
        # Neighbours in a video are nearly alike, whether the sample of thumbnails shows it or not.
        frames = pairwise(sorted(survey.images, key=lambda image: image.place))
        pairs |= {(a.path, b.path) for a, b in frames if a.place[:2] == b.place[:2]}
    names = [image.name for image in (*train, *val)]
    source_by_name = dict(zip(names, sources_of(names), strict=True))
    sources = {source_by_name[image.name] for image in train}
    copies = _overlapping(_shared_pixels(survey, [*train, *val]), val, train)
    copies |= {image.path for image in val if source_by_name[image.name] in sources}
    copies |= _of_divided_sequences(train, val)
    trained = {image.path for image in train}
    near = copies | {b for pair in pairs for a, b in (pair, pair[::-1]) if a in trained}
    leaked = [image for image in val if image.path in near]
    if len(leaked) * 3 < len(val):
        return ""
    return (
        f"{len(leaked)} of {len(val)} images to evaluate on have a near-duplicate or a neighbour "
        f"among those to train on, such as {leaked[0].path}: scores will be too good; keep "
        "sequences together"
    )


def _of_divided_sequences(train: Sequence[Image], val: Sequence[Image]) -> set[str]:
    """The images to evaluate on of sequences or scenes that are trained on, too.

    Where names show as many of these as `_groupings` would keep whole.
    """
    for group_of, _, _ in _named_groups([*train, *val]):
        trained = {group_of[image.path] for image in train}
        return {image.path for image in val if group_of[image.path] in trained}
    return set()


def _named_groups(images: Sequence[Image]) -> Iterator[tuple[dict[str, str], str, int]]:
    """The group of each image by its name, by path; what they are; how few are a division."""
    keys: dict[str, Callable[[Image], str]] = {
        # zurich of images/train/zurich/1.png.
        "scenes": lambda image: image.scene,
        # 0016e5_ of 0016E5_00390.png, as CamVid has it.
        "sequences": lambda image: f"{image.scene}/{image.sequence}",
        # p01 of p01_t1.png, which `stems_of` makes of it.
        "patients, by names with a counter": lambda image: image.name,
    }
    for what, key in keys.items():
        names = list(map(key, images))
        groups = stems_of(names)
        number = len({*groups})
        # `stems_of` has taken off a counter, as of p01_t1 and p01_t2. Names that tell so clearly
        # may divide from two groups on.
        are_counted = number < len({*names})
        if are_counted or _MIN_GROUPS <= number <= len(images) / 2:
            of_one = dict(zip((image.path for image in images), groups, strict=True))
            yield of_one, f"whole {what} ({number})", 2 if are_counted else _MIN_GROUPS
