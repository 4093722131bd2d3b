"""Divides the label files of a folder into sets of one kind: classes, objects, or versions."""

from collections import Counter, defaultdict
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from itertools import chain, combinations
from pathlib import Path, PurePosixPath

import numpy as np

from segtrain.desk.survey.class_masks import shows_object
from segtrain.desk.survey.class_words import LabelWords, differing_words, said_beside
from segtrain.desk.survey.contents import LabelFacts, spread
from segtrain.desk.survey.file_names import FileName
from segtrain.desk.survey.label_set import ONE_CLASS, LabelSet, total_values
from segtrain.desk.survey.pairs import Matches
from segtrain.errors import DataError

# Images of a set whose files are read where a sample is enough.
SAMPLE = 6
# Two masks with a higher IoU label the same thing.
_SAME_AREA = 0.5
# At most this many sets are compared pairwise.
_MOST_COMPARED = 6

_ByImage = Mapping[str, tuple[str, ...]]


def label_sets(
    folder: Path,
    matches: Matches,
    names: Mapping[str, FileName],
    facts: Mapping[str, list[LabelFacts]],
    classes: Collection[str] | None = (),
) -> Iterator[LabelSet]:
    """The labels of the images, in sets of one kind.

    names: of images and labels, by path. facts: of some files of each pattern. classes: words that
    are classes, even if their masks show nearly the same; None: all words are.

    Masks of cars and masks of dogs are one set: car is 1, dog 2.

    >>> from segtrain.desk.survey.contents import ValueFacts
    >>> from segtrain.desk.survey.affixes import parse_names
    >>> paths = ["img/1.jpg", "masks/car/1.png", "masks/big_dog/1.png"]
    >>> names = {name.path: name for name in parse_names(paths)}
    >>> mask = LabelFacts("ids", (4, 4), dict.fromkeys((0, 255), ValueFacts(8, 4, 1, "")))
    >>> facts = dict.fromkeys((name.pattern for name in names.values()), [mask])
    >>> matches = Matches({paths[0]: paths[1:]}, bands={}, unclear=[], alone=[])
    >>> (found,) = label_sets(Path(), matches, names, facts)
    >>> found.pattern, found.classes
    ('masks/car/*.png + masks/big_dog/*.png', ('car', 'big_dog'))
    """
    sets = _sets(folder, matches.labels, names, facts)
    samples = {key: _sample_of(by_image, names, facts) for key, by_image in sets.items()}
    # Several sets of two values each, such as masks/car/ and masks/road/, are one label together.
    binary = {key: by_image for key, by_image in sets.items() if is_binary(samples[key])}
    alike = _of_alike_places(binary)
    words = differing_words(key.text for key in alike)
    if words and _are_classes(folder, alike, words, classes):
        yield _together(alike, words, names)
        sets = {key: by_image for key, by_image in sets.items() if key not in binary}
    shown = {key: _pattern(key, by_image, names) for key, by_image in sets.items()}
    # Sets with equal patterns get folders of splits and scenes, too; if they are still equal, the
    # inner word of their names: *road* for um_road_1.
    shown |= {key: _whole_pattern(sets[key], names) for key in _of_several(shown)}
    inner = {key: f"*{key.word}*" if key.word else "*" for key in shown}
    shown |= {key: shown[key].replace("*", inner[key]) for key in _of_several(shown)}
    for key, by_image in sets.items():
        yield _of_one_kind(shown[key], by_image, samples[key])


def _of_several(shown: Mapping[LabelWords, str]) -> list[LabelWords]:
    """The sets that share their pattern with another set."""
    count = Counter(shown.values())
    return [key for key, pattern in shown.items() if count[pattern] > 1]


def _of_alike_places(sets: Mapping[LabelWords, _ByImage]) -> dict[LabelWords, _ByImage]:
    """Joins sets that differ only in role folders and share no image: label/car/, mask/car/."""
    joined: dict[LabelWords, _ByImage] = {}
    for key, by_image in sets.items():
        places = (x for x in joined if x.beside_roles == key.beside_roles)
        first = next((x for x in places if joined[x].keys().isdisjoint(by_image)), key)
        joined[first] = {**joined.get(first, {}), **by_image}
    return joined


def _are_classes(
    folder: Path,
    alike: Mapping[LabelWords, _ByImage],
    words: Sequence[str],
    classes: Collection[str] | None,
) -> bool:
    """Whether the words of the sets are classes, not places or people who labelled the same."""
    known = {x.partition("=")[0].lower() for x in classes or ()}
    if classes is None or {x.lower() for x in words} <= known:
        return True
    # If each image is in one set, the word may be a class, a place or a person: the user is asked.
    sets_per_image = Counter(chain.from_iterable(alike.values()))
    if max(sets_per_image.values()) == 1:
        return False
    # Some classes may lie on each other, but not all.
    some = combinations(list(alike.values())[:_MOST_COMPARED], 2)
    return not all(_sets_overlap(folder, *two) for two in some)


def _sets(
    folder: Path,
    labels: Mapping[str, Sequence[str]],
    names: Mapping[str, FileName],
    facts: Mapping[str, list[LabelFacts]],
) -> dict[LabelWords, _ByImage]:
    """Groups the labels by what their paths say, until each image has one label in a set.

    It may have several if they are masks of objects. facts: as for `label_sets`.
    """
    said = said_beside({file: image for image, files in labels.items() for file in files}, names)
    sets = _grouped(labels, said)
    # Folders that `said_beside` left out divide only sets in which an image has several files.
    for more in (LabelWords.with_numbers, LabelWords.with_folders):
        divided = [key for key, by_image in sets.items() if _has_several_files(by_image)]
        said = _said_more(said, sets, divided, more)
        sets = _divided(sets, divided, said)
    divided = [
        key
        for key, by_image in sets.items()
        if _has_several_files(by_image)
        and not _are_objects(folder, by_image, _sample_of(by_image, names, facts))
    ]
    said = _said_more(said, sets, divided, LabelWords.with_pattern)
    return _divided(sets, divided, said)


def _said_more(
    said: Mapping[str, LabelWords],
    sets: Mapping[LabelWords, _ByImage],
    to_divide: Iterable[LabelWords],
    more: Callable[[LabelWords], LabelWords],
) -> dict[str, LabelWords]:
    """`said`, with `more` applied to every file of the sets `to_divide`."""
    files = chain.from_iterable(chain(*sets[key].values()) for key in to_divide)
    return {**said, **{file: more(said[file]) for file in files}}


def _divided(
    sets: Mapping[LabelWords, _ByImage],
    to_divide: Sequence[LabelWords],
    said: Mapping[str, LabelWords],
) -> dict[LabelWords, _ByImage]:
    """Divides the sets `to_divide` by what their paths say; the parts come last."""
    parts = {key: x for key, x in sets.items() if key not in to_divide}
    for key in to_divide:
        parts |= _grouped(sets[key], said)
    return parts


def _grouped(
    labels: Mapping[str, Sequence[str]], said: Mapping[str, LabelWords]
) -> dict[LabelWords, _ByImage]:
    """Groups labels by what their paths say: the files of each image in each group."""
    by_key: dict[LabelWords, dict[str, tuple[str, ...]]] = defaultdict(lambda: defaultdict(tuple))
    for image, files in labels.items():
        for file in files:
            by_key[said[file]][image] += (file,)
    return {key: dict(by_image) for key, by_image in by_key.items()}


def _has_several_files(by_image: _ByImage) -> bool:
    """Whether any image has several files."""
    return any(len(files) > 1 for files in by_image.values())


def _sample_of(
    by_image: _ByImage, names: Mapping[str, FileName], facts: Mapping[str, list[LabelFacts]]
) -> list[LabelFacts]:
    """The facts of the files of a set, without repeats."""
    patterns = {names[file].pattern for files in by_image.values() for file in files}
    # Patterns that differ only in folders of splits share one list of facts.
    lists = {id(facts[pattern]): facts[pattern] for pattern in sorted(patterns)}
    return list(chain.from_iterable(lists.values()))


def _pattern(key: LabelWords, by_image: _ByImage, names: Mapping[str, FileName]) -> str:
    """The first three patterns of the files, without folders of splits and scenes."""
    patterns = {
        "/".join([*key.folders, PurePosixPath(names[file].pattern).name])
        for files in by_image.values()
        for file in files
    }
    return ", ".join(sorted(patterns)[:3])


def _whole_pattern(by_image: _ByImage, names: Mapping[str, FileName]) -> str:
    return ", ".join(sorted({names[x].pattern for files in by_image.values() for x in files}))


def _together(
    sets: Mapping[LabelWords, _ByImage], words: Sequence[str], names: Mapping[str, FileName]
) -> LabelSet:
    """Joins sets of one class each into one set; equal words are one class."""
    labels: dict[str, tuple[str, ...]] = defaultdict(tuple)
    class_of: dict[str, int] = {}
    classes = tuple(dict.fromkeys(words))
    for word, by_image in zip(words, sets.values(), strict=True):
        for image, files in by_image.items():
            labels[image] += files
            class_of |= dict.fromkeys(files, classes.index(word) + 1)
    pattern = " + ".join(_pattern(key, by_image, names) for key, by_image in sets.items())
    return LabelSet(pattern, "ids", dict(labels), {}, classes, class_of)


def _of_one_kind(pattern: str, by_image: _ByImage, sample: Sequence[LabelFacts]) -> LabelSet:
    """The set of these labels; its kind is that of most files in the sample, pictures left out."""
    usable = [file for file in sample if file.kind != "picture"]
    return LabelSet(
        pattern=pattern,
        kind=Counter(file.kind for file in usable).most_common(1)[0][0],
        labels=by_image,
        values=total_values(file.values for file in usable),
        classes=ONE_CLASS if _has_several_files(by_image) else (),
    )


def is_binary(facts: Iterable[LabelFacts]) -> bool:
    """Whether each file holds at most one value beside 0; files may differ in that value."""
    value_sets = [set(file.values) for file in facts if file.kind in ("ids", "two")]
    return bool(value_sets) and all(len(values | {0}) <= 2 for values in value_sets)


def _sets_overlap(folder: Path, one: _ByImage, other: _ByImage) -> bool:
    """Whether masks of two sets mostly show the same area, so that they are not two classes."""
    images = spread(sorted(one.keys() & other.keys()), SAMPLE)
    return _median_iou_is_high(folder, [(one[image][0], other[image][0]) for image in images])


def _are_objects(folder: Path, by_image: _ByImage, sample: Iterable[LabelFacts]) -> bool:
    """Whether masks of one image are objects, beside each other, not one area by two people."""
    return is_binary(sample) and not _files_overlap(folder, by_image)


def _files_overlap(folder: Path, by_image: _ByImage) -> bool:
    """Whether the first two masks of an image mostly show the same area, in a sample of images."""
    images = spread(sorted(x for x, files in by_image.items() if len(files) > 1), SAMPLE)
    return _median_iou_is_high(folder, [by_image[image][:2] for image in images])


def _median_iou_is_high(folder: Path, pairs: Iterable[tuple[str, ...]]) -> bool:
    """Whether the median IoU of all pairs of masks is above `_SAME_AREA`."""
    ious = []
    for pair in pairs:
        with suppress(DataError):
            a, b = (shows_object(folder / file) for file in pair)
            if a.shape == b.shape and (a | b).any():
                ious.append((a & b).sum() / (a | b).sum())
    return bool(ious) and float(np.median(ious)) > _SAME_AREA
