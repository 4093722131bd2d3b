"""What a convention claims: which label belongs to which image. Names alone; no file is opened."""

import re
from collections.abc import Collection, Mapping, Sequence, Set
from dataclasses import dataclass, field
from pathlib import PurePosixPath

from segtrain.desk.survey.file_names import FileName

# Longer numbers are times in nanoseconds or hashes, which do not count images.
_MOST_DIGITS = 18


@dataclass(frozen=True)
class OwnerClaim:
    """What one convention makes of some labels; all files by their paths.

    owners: the image of each label that it accounts for.
    whole: labels found by a whole name with letters in it, which is no accident: img_3/1.png of
        img_3.jpg, but not 3/1.png of 3.jpg.
    bands: further files of an image, perhaps its bands.
    unclear: labels that fit several images equally well.
    others: labels that fit an image of another scene alone: scene_2/mask/2.png, where there is
        scene_1/img/2.png, and scene_2 has other images.
    renamed: images whose names have other parts than `parse_names` sees.
    shared: further images of a label, each of which it is the label of.
    """

    owners: Mapping[str, str]
    whole: Set[str] = frozenset()
    bands: Mapping[str, Sequence[str]] = field(default_factory=dict)
    unclear: Sequence[str] = ()
    others: Sequence[str] = ()
    renamed: Mapping[str, FileName] = field(default_factory=dict)
    shared: Mapping[str, Sequence[str]] = field(default_factory=dict)

    @property
    def images(self) -> set[str]:
        """The images that have a label by this claim."""
        return set(self.owners.values())


def nearest(label: FileName, images: Collection[FileName]) -> list[FileName]:
    """Those of `images` with the most folders and words in common with `label`, if any fits."""
    # Never across splits: train/1.png and val/1.png are two images.
    images = [x for x in images if None in (x.split, label.split) or x.split == label.split]
    if len(images) < 2:
        return images
    scores = [
        # Of `img_1` and its copy `img_1_flip`, the former is that of `img_1_mask`.
        (
            len(image.folders & label.folders),
            len(image.words & label.words),
            -len(image.words - label.words),
        )
        for image in images
    ]
    best = max(scores)
    images = [image for image, score in zip(images, scores, strict=True) if score == best]
    if len({image.words for image in images}) == 1:  # `img-1` and `img_1` differ in a sign
        stem = PurePosixPath(label.path).stem
        images = [x for x in images if PurePosixPath(x.path).stem in stem] or images
    return images


def number_of(name: FileName) -> int | None:
    """The only number in the core of a name; None: it has none, several, or one too long."""
    numbers = re.findall(r"\d+", name.core)
    return int(numbers[0]) if len(numbers) == 1 and len(numbers[0]) <= _MOST_DIGITS else None


def has_letter(text: str) -> bool:
    """Whether a name is more than a number, which files of another count may have as well."""
    return any(x.isalpha() for x in text)
