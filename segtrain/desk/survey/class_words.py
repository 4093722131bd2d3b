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

# Words that tell a folder of labels; the others in LABEL_WORDS may be classes, as the ground is.
_ROLES = LABEL_WORDS - {"ground", "index", "gray", "grey", "target", "targets", "y", "l"}
# So many words that do not come again may be classes of an image or two.
_MOST_CLASSES_ONCE = 4
_NUMBER = re.compile(r"\d")
# If so large a share of a kind of labels has the names of its images, its folders do not have them.
_NAMED = 0.9
# What all files are called where a number alone tells the class: class_1.png, or label_1.png.
_CALLED_BY_NUMBER = {"class", "label"}


@dataclass(frozen=True)
class LabelWords:
    """What tells label files of one image apart; equal where `folders` and `word` are.

    Of `ann/v1/masks/car/1_x.png`, the label of `img/1.jpg`:

    folders: masks, car. The last one that says "labels", and those below that have no number;
        `with_numbers` adds v1, and `with_folders` adds ann.
    word: x. What the name says beside that of the image, without numbers.
    all_folders: ann, v1, masks, car. All but those of splits and of the image.
    number_folders: v1. Those of them that have numbers.
    upper_folders: ann. Those above "labels" that have none.
    pattern: *_x.png. That of the whole name.
    """

    folders: tuple[str, ...]
    word: str
    all_folders: tuple[str, ...] = field(default=(), compare=False)
    number_folders: tuple[str, ...] = field(default=(), compare=False)
    upper_folders: tuple[str, ...] = field(default=(), compare=False)
    pattern: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """Folders and word, in the form of a path."""
        return "/".join([*self.folders, self.word])

    @property
    def beside_roles(self) -> tuple[str, ...]:
        """Folders and word without those that say labels alone: car of `masks/car`."""
        return tuple(x for x in (*self.folders, self.word) if not {*words_of(x)} <= _ROLES)

    def with_numbers(self) -> "LabelWords":
        """With the numbers: v1.2/labels/ beside v2.0/labels/, masks/1/ beside masks/2/."""
        return self._with_folders_in_path_order(self.number_folders)

    def with_folders(self) -> "LabelWords":
        """With the folders above: ann/masks/ beside bob/masks/."""
        return self._with_folders_in_path_order(self.upper_folders)

    def _with_folders_in_path_order(self, more: tuple[str, ...]) -> "LabelWords":
        wanted = {*self.folders, *more}
        return replace(self, folders=tuple(x for x in self.all_folders if x in wanted))

    def with_pattern(self) -> "LabelWords":
        """With all that names have in common."""
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
        # masks/3/1.png of 1.jpg is in a folder of a class or of a bucket, and not of an image 3.
        are_named = [label.core == names[images[label.path]].core for label in group]
        has_folders = sum(are_named) < _NAMED * len(group)
        for label in group:
            image = names[images[label.path]]
            # A railway in masks/train/, of an image that has a label in masks/car/, too.
            beside = [x for x in folders_of[image.path] if not is_split(PurePosixPath(x).name)]
            is_class = any(_are_siblings(label.folder, folder) for folder in beside)
            said[label.path] = _words_of_label(
                label, image, has_folders=has_folders, last_is_class=is_class
            )
    said = _with_numbers_that_count(said)
    said = _without_object_names(said)
    return _with_number_of_class(said, names, images)


def _are_siblings(one: str, other: str) -> bool:
    """Whether two folders lie in one, which is not the uppermost."""
    above = PurePosixPath(one).parent
    return one != other and above == PurePosixPath(other).parent and bool(above.name)


def _with_numbers_that_count(said: _Said) -> dict[str, LabelWords]:
    """masks/A1/ beside masks/liver/ is a word; masks/1/ beside masks/2/ may be a bucket."""
    below: dict[tuple[str, ...], set[str]] = defaultdict(set)  # by the uppermost folder, if any
    for words in said.values():
        below[words.folders[:1]] |= {*words.folders[1:], *words.number_folders}
    have_word = {top for top, folders in below.items() if not all(map(_NUMBER.search, folders))}
    return {
        label: words.with_numbers() if words.folders[:1] in have_word else words
        for label, words in said.items()
    }


def _without_object_names(said: _Said) -> dict[str, LabelWords]:
    """Words of a folder that do not come again, as hashes, are names of objects."""
    changed = dict(said)
    for labels in _by_folders(said):
        words = {said[label].word for label in labels}
        if 2 * len(words) > len(labels) and len(words) > _MOST_CLASSES_ONCE:
            changed |= {label: replace(said[label], word="") for label in labels}
    return changed


def _with_number_of_class(
    said: _Said, names: Mapping[str, FileName], images: Mapping[str, str]
) -> dict[str, LabelWords]:
    """Of class_1.png and class_2.png beside each other, the number tells the class."""
    changed = dict(said)
    for labels in _by_folders(said):
        are_several = len({images[label] for label in labels}) < len(labels)
        words = {said[label].word.lower() for label in labels}
        if are_several and words <= _CALLED_BY_NUMBER:
            changed |= {label: replace(said[label], word=names[label].stem) for label in labels}
    return changed


def _by_folders(said: _Said) -> list[list[str]]:
    """The labels whose folders say the same."""
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for label, words in said.items():
        groups[words.folders].append(label)
    return [*groups.values()]


def _words_of_label(
    label: FileName, image: FileName, *, has_folders: bool, last_is_class: bool
) -> LabelWords:
    """has_folders: whether folders are called as the images are.

    last_is_class: whether the last folder is one of a class, even if it says a split.
    """
    folders = PurePosixPath(label.path).parts[:-1]
    # The folder of a class stays as it is, and what says a split is cut off the others.
    own = folders[-1:] if last_is_class else ()
    others = [_without_split(x) for x in folders[: len(folders) - len(own)] if not is_split(x)]
    kept = [x for x in (*others, *own) if not _says_the_image(x, image, has_folders=has_folders)]
    roles = [i for i, x in enumerate(kept) if not _ROLES.isdisjoint(words_of(x))]
    last = roles[-1] if roles else 0
    numbers = tuple(x for i, x in enumerate(kept) if i not in roles[-1:] and _NUMBER.search(x))
    return LabelWords(
        folders=tuple(x for x in kept[last:] if x not in numbers),
        word=_beside_the_image(label, image),
        all_folders=tuple(kept),
        number_folders=numbers,
        upper_folders=tuple(x for x in kept[:last] if x not in numbers),
        pattern=PurePosixPath(label.pattern).name,
    )


def _says_the_image(folder: str, image: FileName, *, has_folders: bool) -> bool:
    """Whether a folder is one of the image, is called as it, or is the beginning of its name.

    zurich of masks/zurich/zurich_001.png is no class.
    """
    is_of_image = folder in PurePosixPath(image.path).parts[:-1]
    is_called_so = has_folders and folder.lower() in (image.core, image.stem)
    begins_name = has_letter(folder) and {*words_of(folder)} <= {*words_of(image.stem)}
    return is_of_image or is_called_so or begins_name


def _without_split(folder: str) -> str:
    """`masks` of `train_masks`."""
    words = words_of(folder)
    kept = [word for word in words if not split_of(word)]
    return folder if len(kept) == len(words) else "_".join(kept)


def _beside_the_image(label: FileName, image: FileName) -> str:
    """What the name of a label says beside that of its image, without numbers."""
    if label.stem == image.stem:  # most are, and a pattern for each name takes long
        return ""
    stem = PurePosixPath(label.path).stem
    found = _found_name(stem, image)
    rest, times = _as_a_whole(found).subn("_", stem, count=1)
    # Of gt_tile_3 and img_tile_3, tile says nothing of the label, nor um of um_road_3 and um_3.
    said = {*words_of(image.stem)} if found != image.stem or not times else set()
    # A letter behind a digit, as in 3f2a, is of a hash; numbers behind words count objects.
    parts = (x for x in re.split(r"[_\-. ()]+", rest) if not re.search(r"\d[A-Za-z]", x))
    words = (re.sub(r"\d", "", part) for part in parts)
    return "_".join(
        word for word in words if not (word.lower() in {"", *said} or split_of(word.lower()))
    )


def _found_name(stem: str, image: FileName) -> str:
    """The stem of the image, if that of the label has it inside; its core, if not."""
    return image.stem if not image.core or _as_a_whole(image.stem).search(stem) else image.core


def _as_a_whole(name: str) -> re.Pattern[str]:
    """Finds a name, but not 1 in 11_mask, nor the a of mask."""
    sign, end = (r"\d" if x.isdigit() else "[a-z]" for x in (name[0], name[-1]))
    return re.compile(f"(?<!{sign}){re.escape(name)}(?!{end})", re.IGNORECASE)


def differing_words(texts: Iterable[str]) -> tuple[str, ...]:
    """The word or words in which several paths differ, of each; empty if it is not in one part.

    >>> differing_words(["masks/car/mask", "masks/big_dog/mask"])
    ('car', 'big_dog')
    >>> differing_words(["a/masks/x", "b/masks/y"])
    ()
    """
    parts = [re.split(r"([/_\-. ]+)", text) for text in texts]
    if len(parts) < 2:
        return ()
    # One word is left of each: of dog and big_dog, dog is no common end.
    most = min(map(len, parts)) - 1
    start = _number_common(parts, most)
    end = _number_common([part[::-1] for part in parts], most - start)
    words = ["".join(part[start : len(part) - end]).strip("_-. ") for part in parts]
    # A folder beside a part of a name tells no classes apart.
    return tuple(words) if all(word and "/" not in word for word in words) else ()


def _number_common(parts: Iterable[list[str]], most: int) -> int:
    """How many of the first parts are equal in all."""
    number = 0
    for column in list(zip(*parts, strict=False))[:most]:
        if len(set(column)) > 1:
            break
        number += 1
    return number
