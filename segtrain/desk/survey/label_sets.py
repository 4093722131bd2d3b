"""The label files of a folder in sets of one kind: files of classes, of objects, or of versions."""

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

# Files of a set that are read where a sample is enough.
SAMPLE = 6
# Two masks of a higher IoU are two labels of one thing.
_SAME_AREA = 0.5
# Classes are compared two by two: of more, some.
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

    names: of images and labels, by path. facts: of some files of each pattern. classes: words known
    to be classes, even if their masks show nearly the same; None: all words are.

    Masks of cars and of roads are one set: car is 1, road 2.

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
    # Where folders of splits or scenes tell sets apart, they are shown; where a word in the midst
    # of names does, as road of um_road_1, it stands in the star.
    shown |= {key: _whole_pattern(sets[key], names) for key in _of_several(shown)}
    shown |= {key: shown[key].replace("*", f"*{key.word}*") for key in _of_several(shown)}
    for key, by_image in sets.items():
        yield _of_one_kind(shown[key], by_image, samples[key])


def _of_several(shown: Mapping[LabelWords, str]) -> list[LabelWords]:
    """The sets whose patterns others have, too."""
    count = Counter(shown.values())
    return [key for key, pattern in shown.items() if count[pattern] > 1]


def _of_alike_places(sets: Mapping[LabelWords, _ByImage]) -> dict[LabelWords, _ByImage]:
    """The sets, train/label/car/ and val/segmentation label/car/ as one; of different images."""
    joined: dict[LabelWords, _ByImage] = {}
    for key, by_image in sets.items():
        places = (x for x in joined if x.beside_roles == key.beside_roles)
        first = next((x for x in places if joined[x].keys().isdisjoint(by_image)), key)
        joined[first] = {**joined.get(first, {}), **by_image}
    return joined


def _are_classes(
    folder: Path,
    binary: Mapping[LabelWords, _ByImage],
    words: Sequence[str],
    classes: Collection[str] | None,
) -> bool:
    """Whether the words of sets are classes, and not people who labelled the same, or places."""
    known = {x.partition("=")[0].lower() for x in classes or ()}
    if classes is None or {x.lower() for x in words} <= known:
        return True
    # Where each image has a file of one word, this may be a class, a place, or who drew it: asked.
    files = Counter(chain.from_iterable(binary.values()))
    if max(files.values()) == 1:
        return False
    # Classes may lie on each other, but not each on all others.
    some = combinations(list(binary.values())[:_MOST_COMPARED], 2)
    return not all(_sets_overlap(folder, *two) for two in some)


def _sets(
    folder: Path,
    labels: Mapping[str, Sequence[str]],
    names: Mapping[str, FileName],
    facts: Mapping[str, list[LabelFacts]],
) -> dict[LabelWords, _ByImage]:
    """The labels by what their paths say, so that in a set each image has one label.

    It may have several if they are masks of its objects. facts: as for `label_sets`.
    """
    said = said_beside({file: image for image, files in labels.items() for file in files}, names)
    sets = _grouped(labels, said)
    # What paths say less clearly counts only where an image has several files in a set.
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
    divided: Iterable[LabelWords],
    more: Callable[[LabelWords], LabelWords],
) -> dict[str, LabelWords]:
    """What paths say, with more of the files of the sets that are to be divided."""
    files = chain.from_iterable(chain(*sets[key].values()) for key in divided)
    return {**said, **{file: more(said[file]) for file in files}}


def _divided(
    sets: Mapping[LabelWords, _ByImage],
    divided: Sequence[LabelWords],
    said: Mapping[str, LabelWords],
) -> dict[LabelWords, _ByImage]:
    """The sets, with some of them divided by what their paths say; their parts come last."""
    parts = {key: x for key, x in sets.items() if key not in divided}
    for key in divided:
        parts |= _grouped(sets[key], said)
    return parts


def _grouped(
    labels: Mapping[str, Sequence[str]], said: Mapping[str, LabelWords]
) -> dict[LabelWords, _ByImage]:
    """The labels of each image, by what the path of each file says."""
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
    """The facts about files of a set, each once."""
    patterns = {names[file].pattern for files in by_image.values() for file in files}
    # Patterns that differ in folders of splits share one list.
    lists = {id(facts[pattern]): facts[pattern] for pattern in sorted(patterns)}
    return list(chain.from_iterable(lists.values()))


def _pattern(key: LabelWords, by_image: _ByImage, names: Mapping[str, FileName]) -> str:
    """The patterns of the files, without folders of splits and scenes."""
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
    """One set of several, each of which shows one of the classes; equal words are one class."""
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
    """The set of these labels, whose kind is that of most files in the sample."""
    usable = [file for file in sample if file.kind != "picture"]
    return LabelSet(
        pattern=pattern,
        kind=Counter(file.kind for file in usable).most_common(1)[0][0],
        labels=by_image,
        values=total_values(file.values for file in usable),
        classes=ONE_CLASS if _has_several_files(by_image) else (),
    )


def is_binary(facts: Iterable[LabelFacts]) -> bool:
    """Whether files hold 0 and one more value, each its own."""
    value_sets = [set(file.values) for file in facts if file.kind in ("ids", "two")]
    return bool(value_sets) and all(len(values | {0}) <= 2 for values in value_sets)


def _sets_overlap(folder: Path, one: _ByImage, other: _ByImage) -> bool:
    """Whether masks of two sets are labels of one thing, and not of two classes."""
    images = spread(sorted(one.keys() & other.keys()), SAMPLE)
    return _median_iou_is_high(folder, [(one[image][0], other[image][0]) for image in images])


def _are_objects(folder: Path, by_image: _ByImage, sample: Iterable[LabelFacts]) -> bool:
    """Whether masks lie beside each other: those of two people lie on each other."""
    return is_binary(sample) and not _files_overlap(folder, by_image)


def _files_overlap(folder: Path, by_image: _ByImage) -> bool:
    """Whether masks of one image lie on each other: the first two, in a sample of images."""
    images = spread(sorted(x for x, files in by_image.items() if len(files) > 1), SAMPLE)
    return _median_iou_is_high(folder, [by_image[image][:2] for image in images])


def _median_iou_is_high(folder: Path, pairs: Iterable[tuple[str, ...]]) -> bool:
    """Whether two masks share most of their area, in the median of all pairs."""
    ious = []
    for pair in pairs:
        with suppress(DataError):
            a, b = (shows_object(folder / file) for file in pair)
            if a.shape == b.shape and (a | b).any():
                ious.append((a & b).sum() / (a | b).sum())
    return bool(ious) and float(np.median(ious)) > _SAME_AREA
