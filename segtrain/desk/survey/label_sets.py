"""The label files of a folder in sets of one kind, and what their images say about them."""

import math
import re
from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence, Set
from contextlib import suppress
from dataclasses import dataclass, field
from itertools import chain, combinations
from pathlib import Path, PurePosixPath
from typing import NamedTuple

import cv2
import numpy as np

from segtrain.data.read import image_formats
from segtrain.data.read.classes import says_no_class
from segtrain.data.read.decode import to_stored
from segtrain.desk.survey import contents, file_names
from segtrain.desk.survey.contents import Color, Kind, LabelFacts, Value, ValueFacts, spread
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.pairs import Matches
from segtrain.errors import DataError

# Files of a set that are read where a sample is enough; images that are compared with labels.
SAMPLE, _COMPARED = 6, 24
# Two masks that share so much of their area are two labels of one thing.
_SAME_AREA = 0.5
# Objects that are numbered from 1 have so many areas each, at most.
_MOST_NUMBERS, _AREAS = 255, 1.1


@dataclass(frozen=True)
class LabelSet:
    """Labels of the same kind: one file for each image, or several.

    pattern: of their names, such as `masks/*_mask.png`; pattern_of: by file, where sets were
        joined. labels: by the path of the image; none where an image shows background alone.
    values: of the sample; after `count_values`, of all files.
    classes: with several files an image, the word that each stands for; their place among these,
        from 1, by file, if there are several words.
    palette: the colours of ids, known after `count_values`.
    twin: the colours of ids in a set that divides the images alike, in a sample.
    no_data, shown_in, claimed: values that files mark as none; the images that show each value;
        pixels that the files of several classes show. All are known after `count_values`.
    numbered: whether values number objects, all of the one class.
    upright: whether labels follow the EXIF orientation of their images, as `count_values` finds;
        unclear: images that EXIF turns, if no size tells.
    overlapping: whether a pixel may have several of `classes`.
    threshold: of the grey levels of its files, from which on they show their class.
    """

    pattern: str
    kind: Kind
    labels: Mapping[str, tuple[str, ...]]
    values: Mapping[Value, ValueFacts]
    classes: tuple[str, ...] = ()
    class_of: Mapping[str, int] = field(default_factory=dict)
    palette: tuple[Color, ...] = ()
    twin: Mapping[int, Color] = field(default_factory=dict)
    no_data: frozenset[float] = frozenset()
    shown_in: Mapping[Value, Set[str]] = field(default_factory=dict)
    claimed: int = 0
    numbered: bool = False
    upright: bool = False
    unclear: Set[str] = frozenset()
    pattern_of: Mapping[str, str] = field(default_factory=dict)
    overlapping: bool = False
    threshold: float | None = None

    @property
    def void(self) -> list[int]:
        """The numbers of classes whose name says that there is none."""
        return [i for i, name in enumerate(self.classes, start=1) if says_no_class(name)]

    @property
    def has_background(self) -> bool:
        """Whether an image that shows nothing can have a label: 0, or no file of any class."""
        return bool(self.classes) or self.kind == "annotations" or 0 in self.values

    def class_files(self, folder: Path, image: str) -> list[tuple[Path, int]]:
        """The files of an image in `folder` and the number of the class of each, from 1."""
        return [(folder / file, self.class_of.get(file, 1)) for file in self.labels[image]]


_ByImage = Mapping[str, tuple[str, ...]]
Equal = tuple[frozenset[str], dict[int, Color]]
"""Patterns of two sets that divide the images alike, and the colours of ids if one has colours."""


def label_sets(
    folder: Path,
    matches: Matches,
    pattern_of: Mapping[str, str],
    facts: Mapping[str, list[LabelFacts]],
    classes: Collection[str] | None = (),
) -> Iterator[LabelSet]:
    """The labels of the images, in sets of one kind.

    facts: of some files of each pattern. classes: words known to be classes, even if their masks
    show nearly the same; None: all words are.

    Masks of cars and of roads are one set, if they belong to the same images: car is 1, road 2.

    >>> masks = ["masks/car/1.png", "masks/road/1.png"]
    >>> pattern_of = {masks[0]: "masks/car/*.png", masks[1]: "masks/road/*.png"}
    >>> mask = LabelFacts("ids", (4, 4), dict.fromkeys((0, 255), ValueFacts(8, 4, 1, "")))
    >>> facts = dict.fromkeys(pattern_of.values(), [mask])
    >>> matches = Matches({"img/1.jpg": masks}, bands={}, unclear=[], alone=[])
    >>> (found,) = label_sets(Path(), matches, pattern_of, facts)
    >>> found.pattern, found.classes
    ('masks/car/*.png + masks/road/*.png', ('car', 'road'))
    """
    sets = _sets_by_form(matches.labels, pattern_of, facts)
    samples = {form: _sample_of(by_image, pattern_of, facts) for form, by_image in sets.items()}
    # Several sets of two values each, such as masks/car/ and masks/road/, are one label together.
    binary = {form: by_image for form, by_image in sets.items() if _is_binary(samples[form])}
    words = differing_words(binary)
    known = {x.partition("=")[0].lower() for x in classes or ()}
    are_said = classes is None or {x.lower() for x in words} <= known
    # Masks of two people show nearly the same: two labels of one thing, and not two classes.
    differ = are_said or not words or not _show_the_same(folder, *binary.values())
    if words and _share_images(binary.values()) and differ:
        yield _together(binary, words)
        sets = {form: by_image for form, by_image in sets.items() if form not in binary}
    for form, by_image in sets.items():
        yield _of_one_kind(form, by_image, samples[form])


def _sets_by_form(
    labels: Mapping[str, Sequence[str]],
    pattern_of: Mapping[str, str],
    facts: Mapping[str, list[LabelFacts]],
) -> dict[str, _ByImage]:
    """The labels by the form of their names, so that in a set each image has one label.

    It may have several if they are masks of its objects. facts: as for `label_sets`.
    """

    def are_binary(by_image: _ByImage) -> bool:
        patterns = {pattern_of[label] for files in by_image.values() for label in files}
        return all(_is_binary(facts[pattern]) for pattern in patterns)

    sets = _grouped(labels, lambda image, label: _form(pattern_of[label], image))
    # Several files for an image: one for each class, or one for each object.
    for form, by_image in list(sets.items()):
        if not _several(by_image):
            continue
        if are_binary(by_image) and _are_named_by_class(by_image):
            # masks/s01/liver.png is of masks/liver.png
            parts = _grouped(by_image, lambda _, x, form=form: form.replace("*", _stem(x)))
        # 0a1b/masks/*.png beside 0a1b/images/0a1b.png: objects, which stay together.
        elif are_binary(by_image) and _have_own_folders(by_image):
            continue
        else:
            # By the whole pattern without splits: `_form` has kept one folder only.
            parts = _grouped(by_image, lambda _, label: file_names.form_of(pattern_of[label]))
        # One of the parts may have the name of the whole: labels/ beside instances/labels/.
        del sets[form]
        sets |= parts
    for form, by_image in list(sets.items()):
        if not _several(by_image) or (are_binary(by_image) and _have_one_folder(by_image)):
            continue
        del sets[form]  # versions: v1.2/labels/ and v2.0/labels/; classes: 1/ and 2/
        sets |= _grouped(by_image, lambda _, label: pattern_of[label])
    return sets


def _grouped(
    labels: Mapping[str, Sequence[str]], form_of: Callable[[str, str], str]
) -> dict[str, _ByImage]:
    """The labels of each image, by their form, which `form_of` tells of image and label."""
    by_form: dict[str, dict[str, tuple[str, ...]]] = defaultdict(lambda: defaultdict(tuple))
    for image, files in labels.items():
        for label in files:
            by_form[form_of(image, label)][image] += (label,)
    return {form: dict(by_image) for form, by_image in by_form.items()}


def _sample_of(
    by_image: _ByImage, pattern_of: Mapping[str, str], facts: Mapping[str, list[LabelFacts]]
) -> list[LabelFacts]:
    """The facts about files of a set, each once."""
    patterns = (pattern_of[label] for labels in by_image.values() for label in labels)
    # Patterns that differ in folders of splits share one list.
    lists = {id(facts[pattern]): facts[pattern] for pattern in patterns}
    return list(chain.from_iterable(lists.values()))


def _together(sets: Mapping[str, _ByImage], classes: tuple[str, ...]) -> LabelSet:
    """One set of several, each of which shows one of the classes."""
    labels: dict[str, tuple[str, ...]] = defaultdict(tuple)
    class_of: dict[str, int] = {}
    for number, by_image in enumerate(sets.values(), start=1):
        for image, files in by_image.items():
            labels[image] += files
            class_of |= dict.fromkeys(files, number)
    return LabelSet(" + ".join(sets), "ids", dict(labels), {}, classes, class_of)


def _of_one_kind(form: str, by_image: _ByImage, sample: Sequence[LabelFacts]) -> LabelSet:
    """The set of these labels, whose kind is that of most files in the sample."""
    usable = [file for file in sample if file.kind != "picture"]
    return LabelSet(
        pattern=form,
        kind=Counter(file.kind for file in usable).most_common(1)[0][0],
        labels=by_image,
        values=total_values(file.values for file in usable),
        classes=("foreground",) if _several(by_image) else (),
    )


def total_values(found: Iterable[Mapping[Value, ValueFacts]]) -> dict[Value, ValueFacts]:
    """The facts of several files added up."""
    sums: dict[Value, ValueFacts] = {}
    for values in found:
        for value, facts in values.items():
            sums[value] = sums[value].added(facts) if value in sums else facts
    return sums


# The names of sets


def _form(pattern: str, image: str) -> str:
    """The pattern without folders of splits and scenes.

    >>> _form("labels/train/zurich/*.png", image="images/train/zurich/1.png")
    'labels/*.png'
    >>> _form("masks/train/car/*.png", image="images/train/1.png")
    'masks/car/*.png'
    """
    scenes = PurePosixPath(image).with_suffix("").parts
    *folders, name = pattern.split("/")
    kept = [x for x in folders if not file_names.is_split(x)]
    roles = [x for x in kept if set(file_names.words_of(x)) & file_names.LABEL_WORDS]
    # Below the folder that says "labels", classes come, or scenes, which have numbers or are
    # folders of the image too.
    below = kept[kept.index(roles[-1]) + 1 :] if roles else []
    words = [x for x in below if not re.search(r"\d", x) and x not in scenes]
    return "/".join([*(roles or kept[:1]), *words[:1], name])


def differing_words(forms: Iterable[str]) -> tuple[str, ...]:
    """The one word in which the names of several sets differ, of each; empty if it is not one."""
    parts = [re.split(r"[/_\-.* ]+", form) for form in forms]
    if len({len(part) for part in parts}) != 1:
        return ()
    # masks/car/*.png and masks/road/*.png differ in the second word alone.
    columns = [column for column in zip(*parts, strict=True) if len(set(column)) > 1]
    return columns[0] if len(columns) == 1 else ()


# Sets of two values


def _is_binary(facts: Sequence[LabelFacts]) -> bool:
    value_sets = [set(file.values) for file in facts if file.kind in ("ids", "two")]
    return bool(value_sets) and all(len(values | {0}) <= 2 for values in value_sets)


def _stem(path: str) -> str:
    return PurePosixPath(path).stem


def _are_named_by_class(by_image: _ByImage) -> bool:
    """Whether names of files come again and again, one for each class: `liver`, not `mask_1`."""
    images = Counter(_stem(label).lower() for files in by_image.values() for label in {*files})
    words = {re.sub(r"[\d_\-. ]", "", stem) for stem in images}
    # liver.png in each folder, or class_1.png; but not mask_1.png, which numbers objects.
    is_word = len(words) == len(images) and all(stem[:1].isalpha() for stem in images)
    return 2 * len(images) <= images.total() and (is_word or words <= {"class", "label"})


def _several(by_image: _ByImage) -> bool:
    """Whether any image has several files."""
    return any(len(files) > 1 for files in by_image.values())


def _have_own_folders(by_image: _ByImage) -> bool:
    """Whether the labels of each image lie in one folder, which no other image shares."""
    folders = {PurePosixPath(label).parent for files in by_image.values() for label in files}
    return _have_one_folder(by_image) and len(folders) == len(by_image)


def _have_one_folder(by_image: _ByImage) -> bool:
    return all(len({PurePosixPath(x).parent for x in files}) == 1 for files in by_image.values())


def _share_images(sets: Iterable[_ByImage]) -> bool:
    """Whether many images have labels in several of the sets."""
    images = Counter(image for by_image in sets for image in by_image)
    return images.total() > 1.2 * len(images)


def _show_the_same(folder: Path, one: _ByImage, other: _ByImage, *_: _ByImage) -> bool:
    """Whether files of two values show the same area: two labels of one thing, not two classes."""
    overlaps = []
    for image in spread(sorted(one.keys() & other.keys()), SAMPLE):
        with suppress(DataError):
            a, b = (contents.shows_object(folder / labels[image][0]) for labels in (one, other))
            if a.shape == b.shape and (a | b).any():
                overlaps.append((a & b).sum() / (a | b).sum())
    return bool(overlaps) and float(np.median(overlaps)) > _SAME_AREA


# Comparisons


def equal_sets(folder: Path, sets: Sequence[LabelSet]) -> Iterator[Equal]:
    """Two sets whose labels divide the images alike: ids and the same in colours."""
    for one, other in combinations(sets, 2):
        images = spread(sorted(one.labels.keys() & other.labels.keys()), SAMPLE)
        files = [(folder / one.labels[x][0], folder / other.labels[x][0]) for x in images]
        pairs = [_pairs_of_values(*two) for two in files]
        if not pairs or any(found is None for found in pairs):
            continue
        rows = chain.from_iterable(pairs)
        yield frozenset((one.pattern, other.pattern)), _colors_of_ids(one.kind, other.kind, rows)


def _colors_of_ids(kind: Kind, other: Kind, rows: Iterable[np.ndarray]) -> dict[int, Color]:
    """The colour beside each id; empty unless one kind is ids and the other colours.

    rows: values of the first kind and of the other in the same place.
    """
    if (kind, other) == ("ids", "colors"):
        return {int(row[0]): tuple(row[-3:].tolist()) for row in rows}
    if (kind, other) == ("colors", "ids"):
        return {int(row[-1]): tuple(row[:3].tolist()) for row in rows}
    return {}


def _pairs_of_values(*paths: Path) -> np.ndarray | None:
    """Values that two labels have in the same place, (N, channels of both); None: they divide the
    image into other areas."""
    try:
        stored = [image_formats.read_stored(path) for path in paths]
    except DataError:
        return None
    if stored[0].shape[:2] != stored[1].shape[:2]:
        return None
    stored = [contents.without_alpha(pixels) for pixels in stored]
    numbers = [len(_pixel_values(pixels)) for pixels in stored]
    both = _pixel_values(np.dstack(stored))
    # More pairs than values in either label: their areas differ, and not only the values.
    if max(numbers) < len(both):
        return None
    if min(numbers) == len(both):
        return both
    # In a picture in colours, several ids without a class may be black together.
    channels = stored[numbers.index(min(numbers))].shape[2]
    fewer = both[:, :channels] if numbers[0] < numbers[1] else both[:, -channels:]
    distinct, count = np.unique(fewer, axis=0, return_counts=True)
    are_black = channels > 1 and not distinct[count > 1].any()
    return both if are_black else None


def _pixel_values(stored: np.ndarray) -> np.ndarray:
    """The different pixels of (H, W, C), (N, C)."""
    return np.unique(stored.reshape(-1, stored.shape[2]), axis=0)


@dataclass(frozen=True)
class EdgeScores:
    """What a sample of images says about their labels.

    scores: how much stronger the edges of an image are along the borders of its own label, of its
        neighbours' by name, and of its own when turned, than elsewhere; medians by these words.
    black: of the pixels labelled 0, the part that is black or NaN in the image.
    are_numbered: whether each label has an area of each value from 1 to a number of its own.
    """

    scores: Mapping[str, float]
    black: float
    are_numbered: bool


OWN = "their own"
_TURNS = {"upside down": (-1, 1), "mirrored": (1, -1), "turned by 180 degrees": (-1, -1)}


def compared(folder: Path, images: Sequence[Image], labels: LabelSet) -> EdgeScores:
    """Compares a sample of the images with their labels, with others' and with turned ones."""
    compared = [image for image in images if len(labels.labels.get(image.path, ())) == 1]
    pairs = [
        ([folder / file for file in image.files], folder / labels.labels[image.path][0])
        for image in compared
    ]
    seen: list[_EdgeFacts] = []
    for i in spread(range(len(pairs)), _COMPARED) if len(pairs) > 2 else ():
        with suppress(DataError):
            before, own, after = (
                contents.read_bands(pairs[k % len(pairs)][0]) for k in (i - 1, i, i + 1)
            )
            label = contents.read_label_part(pairs[i][1])
            if labels.upright:
                label = to_stored(label, compared[i].orientation)
            scores = _edge_scores(label, own, {"the previous": before, "the next": after})
            numbers = _numbers(label) if labels.kind == "ids" else None
            seen.append(_EdgeFacts(scores, *_black_and_zero(own, label), numbers))
    # Each comparison has its median over all images: a single picture proves little.
    medians = {}
    for words in seen[0].scores if seen else ():
        known = [facts.scores[words] for facts in seen if not np.isnan(facts.scores[words])]
        if known:
            medians[words] = float(np.median(known))
    black, zeros = sum(facts.black for facts in seen), sum(facts.zeros for facts in seen)
    are_numbered = _are_numbered([facts.numbers for facts in seen])
    return EdgeScores(medians, black / zeros if zeros else 0.0, are_numbered)


def compared_turned(folder: Path, images: Sequence[Image], labels: LabelSet) -> tuple[float, float]:
    """How labels lie on unclear images as stored, and as EXIF turns them: medians, or NaN."""
    scores = []
    for image in spread([x for x in images if x.path in labels.unclear], _COMPARED):
        with suppress(DataError):
            own = contents.read_bands([folder / file for file in image.files])
            for file in labels.labels[image.path]:
                label = contents.read_label_part(folder / file)
                ways = label, to_stored(label, image.orientation)
                scores.append([contents.alignment(own, way) for way in ways])
    told = [pair for pair in scores if not np.isnan(pair).any()]
    if not told:
        return math.nan, math.nan
    stored, turned = np.median(told, axis=0).tolist()
    return stored, turned


class _EdgeFacts(NamedTuple):
    """What one image says about its label.

    scores: as in `EdgeScores`. zeros, black: pixels labelled 0, and those of them that are black.
    numbers: of `_numbers`; None also in colours.
    """

    scores: Mapping[str, float]
    black: int
    zeros: int
    numbers: tuple[int, int] | None


def _edge_scores(
    label: np.ndarray, own: np.ndarray, others: Mapping[str, np.ndarray]
) -> dict[str, float]:
    """How the label lies on its own image, on others, and on its own when it is turned."""
    scores = {OWN: contents.alignment(own, label)}
    scores |= {words: contents.alignment(image, label) for words, image in others.items()}
    for words, (down, right) in _TURNS.items():
        scores[words] = contents.alignment(own, label[::down, ::right])
    return scores


def _black_and_zero(image: np.ndarray, label: np.ndarray) -> tuple[int, int]:
    """The pixels that are black, or NaN, and labelled 0, and all that are labelled 0."""
    if image.shape[:2] != label.shape[:2]:
        return 0, 0
    is_zero = (label == 0).all(axis=2)
    is_black = ((image == 0) | np.isnan(image)).all(axis=2)
    return int((is_zero & is_black).sum()), int(is_zero.sum())


def _numbers(label: np.ndarray) -> tuple[int, int] | None:
    """k and the number of areas if a label (H, W, C) holds 1 to k, and else 0 alone."""
    channel = np.ascontiguousarray(label[..., 0])
    values = np.setdiff1d(channel, 0)
    if len(values) > _MOST_NUMBERS or (values != np.arange(1, len(values) + 1)).any():
        return None
    parts = (cv2.connectedComponents((channel == value).astype(np.uint8))[0] for value in values)
    return len(values), sum(part - 1 for part in parts)


def _are_numbered(numbers: Sequence[tuple[int, int] | None]) -> bool:
    """Whether labels number objects, nearly all of which are one area; numbers: of `_numbers`."""
    if not numbers or None in numbers:
        return False
    most, areas = zip(*numbers, strict=True)
    # Images show the same classes often, but seldom the same number of objects.
    return len(set(most)) > 1 and max(most) > 2 and sum(areas) <= _AREAS * sum(most)
