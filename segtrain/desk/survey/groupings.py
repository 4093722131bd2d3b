"""Which images stay on one side of a division: copies, scenes, sequences, bands of one picture."""

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence

from segtrain.data.read.sources import groups_of, sources_of, stems_of
from segtrain.data.read.tiles import overlapping, strips
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.survey import Survey
from segtrain.errors import ConfigError

Groups = Mapping[str, str]
"""The group of each image, by its path."""
# The part of the images that is evaluated on, where --val names none.
DEFAULT_VAL = 0.2
# Fewer groups are no division: all of one would be missing from training.
_MIN_GROUPS = 4
# Bands of a picture, one of which is evaluated on: as large a part as DEFAULT_VAL.
_BANDS = 5
# Blocks of frames of one video, likewise.
_BLOCKS = 5


def groupings(
    survey: Survey, images: Sequence[Image], group: re.Pattern[str] | None
) -> Iterator[tuple[Groups, str]]:
    """What stays together when images are divided, and what that is called: the best first.

    The last one is single images. `group` leaves no choice.

    Raises:
        ConfigError: all images are of one group.
    """
    paths = [image.path for image in images]
    if group is not None:
        yield _asked_for(group, paths)
        return
    alike = _alike(survey, images)
    sizes = Counter(alike.values())
    most = max(sizes.values())
    # Tiles that overlap hang together all over the picture: only bands of it can be divided.
    if most > len(images) / 2 and shared_pixels(survey, images):
        bands = (_bands(survey, images, side, i) for side in (None, 1, 2) for i in range(_BANDS))
        for band in bands:
            if len(set(band.values())) > 1:  # not of one place only
                yield band, "a band of the picture that they are tiles of"
    first: dict[str, str] = {}
    # The first image of each group with the others, to join named groups that share copies.
    same = [(first.setdefault(group, path), path) for path, group in alike.items()]
    for of_one, what, least in named_groups(images):
        # Copies of a picture may have names of several sequences: img_001, img_001_aug1.
        joined = _joined(of_one, same)
        if len(set(joined.values())) >= least:
            yield joined, what
    if _MIN_GROUPS <= len(sizes) < len(images) and most <= len(images) / 2:
        yield alike, "copies and like images kept together"
    if survey.similar or survey.moving:
        # Frames of one video: some of them in a row.
        ordered = sorted(images, key=lambda image: image.place)
        size = max(1, len(images) // _BLOCKS)
        yield {x.path: str(i // size) for i, x in enumerate(ordered)}, "a block of one sequence"
    yield dict(zip(paths, paths, strict=True)), "single images"


def named_groups(images: Sequence[Image]) -> Iterator[tuple[Groups, str, int]]:
    """The groups that names tell; what they are; how few are a division."""
    keys: dict[str, Callable[[Image], str]] = {
        # zurich of images/train/zurich/1.png.
        "scenes": lambda image: image.scene,
        # 0016e5_ of 0016E5_00390.png, as CamVid has it.
        "sequences": lambda image: f"{image.scene}/{image.sequence}",
        # p01 of p01_t1.png, which `stems_of` makes of it.
        "series, by names with a counter": lambda image: image.name,
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


def shared_pixels(survey: Survey, images: Sequence[Image]) -> list[tuple[str, str]]:
    """Tiles that show the same part of a larger picture, by their paths."""
    boxes = [survey.tiles.get(image.path) for image in images]
    return [(images[i].path, images[j].path) for i, j in overlapping(boxes)]


def _asked_for(group: re.Pattern[str], paths: Sequence[str]) -> tuple[Groups, str]:
    groups = dict(zip(paths, groups_of(group, paths), strict=True))
    number = len(set(groups.values()))
    if number in (1, len(paths)):
        what = "all images are of one group" if number == 1 else "each image is a group"
        raise ConfigError(f"--group {group.pattern}: {what}")
    return groups, f"whole groups ({number}, --group)"


def _alike(survey: Survey, images: Sequence[Image]) -> Groups:
    """Copies by name, near-duplicates, tiles that overlap."""
    sources = sources_of([image.name for image in images])
    of_one = dict(zip((image.path for image in images), sources, strict=True))
    return _joined(of_one, [*survey.similar, *shared_pixels(survey, images)])


def _joined(group_of: Groups, pairs: Iterable[tuple[str, str]]) -> Groups:
    """The groups, those of the two images of a pair as one.

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


def _bands(survey: Survey, images: Sequence[Image], side: int | None, turn: int) -> Groups:
    """A fifth of the tiles as one group, from the top down (side 1) or from the left (2).

    side: None: along the longer side of the picture. turn: which band is called the first.
    """
    boxes = [survey.tiles.get(image.path) for image in images]
    placed = zip(images, strips(boxes, _BANDS, side), strict=True)
    return {
        image.path: image.path if strip is None else f"band {(strip + turn) % _BANDS}"
        for image, strip in placed
    }
