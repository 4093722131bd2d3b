"""What the path of a label says beside its role, its split, its scene and its image.

It may be a class: `masks/car/1.png` or `1_car.png` of `img/1.jpg`.
"""

import re
from collections import defaultdict
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import PurePosixPath

from segtrain.desk.survey.conventions.claims import is_word
from segtrain.desk.survey.file_names import LABEL_WORDS, FileName, is_split, split_of, words_of
from segtrain.desk.survey.pairs import groups_of_labels

# Words that tell a folder of labels; the others in LABEL_WORDS may be classes, as the ground is.
_ROLES = LABEL_WORDS - {"ground", "index", "gray", "grey", "target", "targets", "y", "l"}
_NUMBER = re.compile(r"\d")
# So many labels of one kind have the names of their images, if any convention says so.
_NAMED = 0.9
# What all files are called where a number alone tells the class: class_1.png, class_2.png.
_NUMBERED = {"class", "label"}


@dataclass(frozen=True)
class Said:
    """What tells label files of one image apart.

    folders: that say "labels", and all below. word: of the name, without numbers. The others count
    where these are equal. all: folders. numbers: those of them with numbers. above: those above.
    pattern: of the whole name.
    """

    folders: tuple[str, ...]
    word: str
    all: tuple[str, ...] = field(default=(), compare=False)
    numbers: tuple[str, ...] = field(default=(), compare=False)
    above: tuple[str, ...] = field(default=(), compare=False)
    pattern: str = field(default="", compare=False)

    @property
    def text(self) -> str:
        """All that counts, in the form of a path."""
        return "/".join([*self.folders, self.word])

    def with_numbers(self) -> "Said":
        """With the numbers: v1.2/labels/ beside v2.0/labels/, masks/1/ beside masks/2/."""
        return self._with(self.numbers)

    def with_folders(self) -> "Said":
        """With the folders above: ann/masks/ beside bob/masks/."""
        return self._with(self.above)

    def _with(self, more: tuple[str, ...]) -> "Said":
        return replace(self, folders=tuple(x for x in self.all if x in {*self.folders, *more}))

    def with_pattern(self) -> "Said":
        """With all that names have in common."""
        return replace(self, word=f"{self.word}{self.pattern}", pattern="")


def said_beside(images: Mapping[str, str], names: Mapping[str, FileName]) -> dict[str, Said]:
    """What the path of each label says; images: the image of each label, by paths."""
    said: dict[str, Said] = {}
    for group in groups_of_labels(names[label] for label in images):
        # masks/3/1.png of 1.jpg is in a folder of a class or of a bucket, and not of an image 3.
        are_named = [label.core == names[images[label.path]].core for label in group]
        has_folders = sum(are_named) < _NAMED * len(group)
        for label in group:
            image = names[images[label.path]]
            said[label.path] = _said(label, image, has_folders=has_folders)
    # A1/ beside liver/ is a word, but 1/ beside 2/ may count.
    below: dict[str, set[str]] = defaultdict(set)
    for one in said.values():
        below[one.folders[0] if one.folders else ""] |= {*one.folders[1:], *one.numbers}
    for label, one in said.items():
        there = below[one.folders[0] if one.folders else ""]
        if not all(map(_NUMBER.search, there)):
            said[label] = one.with_numbers()
    groups: dict[tuple[str, ...], list[str]] = defaultdict(list)
    for label, one in said.items():
        groups[one.folders].append(label)
    for labels in groups.values():
        words = {said[label].word for label in labels}
        # Words that do not come again, as hashes, are names of objects.
        are_names = 2 * len(words) > len(labels) and len(words) > 2
        for label in labels if are_names else ():
            said[label] = replace(said[label], word="")
        # class_1.png in each folder: the number is the class.
        if words <= _NUMBERED:
            for label in labels:
                said[label] = replace(said[label], word=names[label].stem)
    return said


def _said(label: FileName, image: FileName, *, has_folders: bool) -> Said:
    """has_folders: whether folders are called as the images are."""
    folders = PurePosixPath(label.path).parts[:-1]
    of_image = {*PurePosixPath(image.path).parts[:-1]}
    image_words = {*words_of(image.stem)}
    called = (image.core, image.stem) if has_folders else ()
    kept = [
        _without_split(x)
        for x in folders
        # zurich of masks/zurich/zurich_001.png is no class.
        if not (is_split(x) or x in of_image or x.lower() in called)
        and not (is_word(x) and {*words_of(x)} <= image_words)
    ]
    roles = [i for i, x in enumerate(kept) if not _ROLES.isdisjoint(words_of(x))]
    last = roles[-1] if roles else 0
    numbers = tuple(x for i, x in enumerate(kept) if i not in roles[-1:] and _NUMBER.search(x))
    return Said(
        folders=tuple(x for x in kept[last:] if x not in numbers),
        word=_beside_the_image(label, image),
        all=tuple(kept),
        numbers=numbers,
        above=tuple(x for x in kept[:last] if x not in numbers),
        pattern=PurePosixPath(label.pattern).name,
    )


def _without_split(folder: str) -> str:
    """`masks` of `train_masks`."""
    words = words_of(folder)
    kept = [word for word in words if not split_of(word)]
    return folder if len(kept) == len(words) else "_".join(kept)


def _beside_the_image(label: FileName, image: FileName) -> str:
    """What the name of a label says beside that of its image, without numbers."""
    rest = PurePosixPath(label.path).stem
    for name in filter(None, (image.stem, image.core)):
        # 1 is not in 11_mask, and a not in mask_a.
        sign, end = (r"\d" if x.isdigit() else "[a-z]" for x in (name[0], name[-1]))
        whole = re.compile(f"(?<!{sign}){re.escape(name)}(?!{end})", re.IGNORECASE)
        if whole.search(rest):
            rest = whole.sub("_", rest, count=1)
            break
    # Of gt_tile_3 and img_tile_3, tile says nothing of the label.
    said = {*words_of(image.stem)} if name != image.stem else set()
    # A letter behind a digit, as in 3f2a, is of a hash; numbers behind words count objects.
    parts = (x for x in re.split(r"[_\-. ()]+", rest) if not re.search(r"\d[A-Za-z]", x))
    words = (re.sub(r"\d", "", part) for part in parts)
    return "_".join(
        word for word in words if not (word.lower() in {"", *said} or split_of(word.lower()))
    )


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
    is_one_part = all(word.strip("/") and "/" not in word.strip("/") for word in words)
    return tuple(word.strip("/") for word in words) if is_one_part else ()


def _number_common(parts: Iterable[list[str]], most: int) -> int:
    """How many of the first parts are equal in all."""
    number = 0
    for column in list(zip(*parts, strict=False))[:most]:
        if len(set(column)) > 1:
            break
        number += 1
    return number
