"""What the path of a label says beside its role, its split, its scene and its image.

It may be a class: `masks/car/1.png` or `1_car.png` of `img/1.jpg`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from segtrain.desk.survey.conventions.claims import has_letter
from segtrain.desk.survey.file_names import LABEL_WORDS, FileName, is_split, split_of, words_of
from segtrain.desk.survey.pairs import groups_of_labels

# Words that name a folder of labels. The other LABEL_WORDS may be classes: ground is one.
_ROLES = LABEL_WORDS - {"ground", "index", "gray", "grey", "target", "targets", "y", "l"}
# Up to this many distinct words may be classes, even if most occur once.
_MOST_CLASSES_ONCE = 4
_NUMBER = re.compile(r"\d")
# If this share of a kind of labels has the image's name in the file name, folders do not have it.
_NAMED = 0.9
# Names of files whose number tells the class: class_1.png, label_1.png.
_CALLED_BY_NUMBER = {"class", "label"}


@dataclass(frozen=True)
class LabelWords:
    """What tells the label files of one image apart; equal if `folders` and `word` are.

    Of `ann/v1/masks/car/1_x.png`, the label of `img/1.jpg`:

    folders: masks, car. The last folder that says "labels", and folders without a number below it.
        `with_numbers` adds v1, and `with_folders` adds ann.
    word: x. What the name says beside the image's name, without numbers.
    all_folders: ann, v1, masks, car. All folders but those of splits and of the image.
    number_folders: v1. Folders with a number, without the last one that says "labels".
    upper_folders: ann. Folders without a number above "labels".
    pattern: *_x.png. The pattern of the file name.
    """

    folders: tuple[str, ...]
    word: str
    all_folders: tuple[str, ...] = field(default=(), compare=False)
    number_folders: tuple[str, ...] = field(default=(), compare=False)
    upper_folders: tuple[str, ...] = field(default=(), compare=False)
    pattern: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """Folders and word, joined as a path."""
        return "/".join([*self.folders, self.word])

    @property
    def beside_roles(self) -> tuple[str, ...]:
        """Folders and word without the names that only say "labels": car of `masks/car`."""
        return tuple(x for x in (*self.folders, self.word) if not {*words_of(x)} <= _ROLES)

    def with_numbers(self) -> "LabelWords":
        """Adds the folders with numbers: v1.2/labels/ beside v2.0/labels/."""
        return self._with_folders_in_path_order(self.number_folders)

    def with_folders(self) -> "LabelWords":
        """Adds the folders above "labels": ann/masks/ beside bob/masks/."""
        return self._with_folders_in_path_order(self.upper_folders)

    def _with_folders_in_path_order(self, more: tuple[str, ...]) -> "LabelWords":
        wanted = {*self.folders, *more}
        return replace(self, folders=tuple(x for x in self.all_folders if x in wanted))

    def with_pattern(self) -> "LabelWords":
        """Adds the pattern of the file name to the word."""
        return replace(self, word=f"{self.word}{self.pattern}", pattern="")


_Said = Mapping[str, LabelWords]
"""What the path of each label says."""


def said_beside(images: Mapping[str, str], names: Mapping[str, FileName]) -> dict[str, LabelWords]:
    """What the path of each label says; images: the image of each label, by paths."""
    said: dict[str, LabelWords] = {}
    folders_of: dict[str, set[str]] = defaultdict(set)
    for label, image in images.items():
        folders_of[image].add(names[label].folder)
    for group in groups_of_labels(names[label] for label in images):
        # In masks/1/1.png of 1.jpg, the file names the image, so folder 1 is a class or a bucket.
        are_named = [label.core == names[images[label.path]].core for label in group]
        folders_name_images = sum(are_named) < _NAMED * len(group)
        for label in group:
            image = names[images[label.path]]
            # masks/train/ is the railway if the image has a label in masks/car/, too.
            beside = [x for x in folders_of[image.path] if not is_split(PurePosixPath(x).name)]
            is_class = any(_are_siblings(label.folder, folder) for folder in beside)
            said[label.path] = _words_of_label(
                label, image, folders_name_images=folders_name_images, last_is_class=is_class
            )
    said = _with_numbers_that_count(said)
    said = _without_object_names(said)
    return _with_number_of_class(said, names, images)


def _are_siblings(one: str, other: str) -> bool:
    """Whether two folders lie in the same folder, below the root of the data."""
    above = PurePosixPath(one).parent
    return one != other and above == PurePosixPath(other).parent and bool(above.name)


def _with_numbers_that_count(said: _Said) -> dict[str, LabelWords]:
    """Adds the number folder masks/A1/ if masks/liver/ lies beside it; masks/1/ may be a bucket."""
    below: dict[tuple[str, ...], set[str]] = defaultdict(set)  # by the first of `folders`, if any
    for words in said.values():
        below[words.folders[:1]] |= {*words.folders[1:], *words.number_folders}
    have_word = {top for top, folders in below.items() if not all(map(_NUMBER.search, folders))}
    return {
        label: words.with_numbers() if words.folders[:1] in have_word else words
        for label, words in said.items()
    }


def _without_object_names(said: _Said) -> dict[str, LabelWords]:
    """Drops the words of a folder if there are many and most occur once: hashes name objects."""
    changed = dict(said)
    for labels in _by_folders(said):
        words = {said[label].word for label in labels}
        if 2 * len(words) > len(labels) and len(words) > _MOST_CLASSES_ONCE:
            changed |= {label: replace(said[label], word="") for label in labels}
    return changed


def _with_number_of_class(
    said: _Said, names: Mapping[str, FileName], images: Mapping[str, str]
) -> dict[str, LabelWords]:
    """Takes the whole name as the word where class_1.png and class_2.png label one image."""
    changed = dict(said)
    for labels in _by_folders(said):
        are_several = len({images[label] for label in labels}) < len(labels)
        words = {said[label].word.lower() for label in labels}
        if are_several and words <= _CALLED_BY_NUMBER:
            changed |= {label: replace(said[label], word=names[label].stem) for label in labels}
    return changed


def _by_folders(said: _Said) -> list[list[str]]:
    """The labels in groups of equal `folders`."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for label, words in said.items():
        groups[words.folders].append(label)
    return [*groups.values()]


def _words_of_label(
    label: FileName, image: FileName, *, folders_name_images: bool, last_is_class: bool
) -> LabelWords:
    """What the path of one label says.

    folders_name_images: whether folders may be named after images.
    last_is_class: whether the last folder names a class, even if it says a split.
    """
    folders = PurePosixPath(label.path).parts[:-1]
    # The folder of a class stays whole; words of splits are cut off the others.
    own = folders[-1:] if last_is_class else ()
    others = [_without_split(x) for x in folders[: len(folders) - len(own)] if not is_split(x)]
    kept = [
        x
        for x in (*others, *own)
        if not _says_the_image(x, image, folders_name_images=folders_name_images)
    ]
    roles = [i for i, x in enumerate(kept) if not _ROLES.isdisjoint(words_of(x))]
    last = roles[-1] if roles else 0
    numbered = [i for i, x in enumerate(kept) if i not in roles[-1:] and _NUMBER.search(x)]
    without_number = [(i, x) for i, x in enumerate(kept) if i not in numbered]
    return LabelWords(
        folders=tuple(x for i, x in without_number if i >= last),
        word=_beside_the_image(label, image),
        all_folders=tuple(kept),
        number_folders=tuple(kept[i] for i in numbered),
        upper_folders=tuple(x for i, x in without_number if i < last),
        pattern=PurePosixPath(label.pattern).name,
    )


def _says_the_image(folder: str, image: FileName, *, folders_name_images: bool) -> bool:
    """Whether the image lies in such a folder, has its name, or has all its words in its own name.

    zurich of masks/zurich/zurich_001.png is no class.
    """
    above = PurePosixPath(image.path).parts[:-1]
    holds_image = folder in {*above, *map(_without_split, above)}
    is_its_name = folders_name_images and folder.lower() in (image.core, image.stem)
    words_are_in_name = has_letter(folder) and {*words_of(folder)} <= {*words_of(image.stem)}
    return holds_image or is_its_name or words_are_in_name


def _without_split(folder: str) -> str:
    """Cuts off the words of splits: `masks` of `train_masks`."""
    words = words_of(folder)
    kept = [word for word in words if not split_of(word)]
    return folder if len(kept) == len(words) else "_".join(kept)


def _beside_the_image(label: FileName, image: FileName) -> str:
    """What the name of a label says beside the name of its image, without numbers."""
    if label.stem == image.stem:  # mostly so, and a regex for each name is slow
        return ""
    stem = PurePosixPath(label.path).stem
    found = _found_name(stem, image)
    rest, times = _as_a_whole(found).subn("_", stem, count=1)
    # Words of the image's name say nothing of the label: tile of gt_tile_3 and img_tile_3.
    said = {*words_of(image.stem)} if found != image.stem or not times else set()
    # A letter behind a digit tells a hash: 3f2a. A number behind a word counts objects.
    parts = (x for x in re.split(r"[_\-. ()]+", rest) if not re.search(r"\d[A-Za-z]", x))
    words = (re.sub(r"\d", "", part) for part in parts)
    return "_".join(
        word for word in words if not (word.lower() in {"", *said} or split_of(word.lower()))
    )


def _found_name(stem: str, image: FileName) -> str:
    """The image's name inside the label's stem: the image's stem, or else its core."""
    return image.stem if not image.core or _as_a_whole(image.stem).search(stem) else image.core


def _as_a_whole(name: str) -> re.Pattern[str]:
    """A regex that finds a whole name: no 1 in 11_mask, no a in mask."""
    sign, end = (r"\d" if x.isdigit() else "[a-z]" for x in (name[0], name[-1]))
    return re.compile(f"(?<!{sign}){re.escape(name)}(?!{end})", re.IGNORECASE)


def differing_words(texts: Iterable[str]) -> tuple[str, ...]:
    """For each path, the part that differs from the others.

    Empty for fewer than two paths, or if they differ in more than one part.

    >>> differing_words(["masks/car/mask", "masks/big_dog/mask"])
    ('car', 'big_dog')
    >>> differing_words(["a/masks/x", "b/masks/y"])
    ()
    """
    parts = [re.split(r"([/_\-. ]+)", text) for text in texts]
    if len(parts) < 2:
        return ()
    # Leave one word of each path: dog is no common end of dog and big_dog.
    most = min(map(len, parts)) - 1
    start = _number_common(parts, most)
    end = _number_common([part[::-1] for part in parts], most - start)
    words = ["".join(part[start : len(part) - end]).strip("_-. ") for part in parts]
    # Paths that differ in a folder and in a name differ in more than one part.
    return tuple(words) if all(word and "/" not in word for word in words) else ()


def _number_common(parts: Iterable[list[str]], most: int) -> int:
    """How many leading parts all lists share, up to `most`."""
    number = 0
    for column in list(zip(*parts, strict=False))[:most]:
        if len(set(column)) > 1:
            break
        number += 1
    return number
