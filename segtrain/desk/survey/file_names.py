"""What the name of a file is in its parts, and what its words say: roles, splits and bands.

`affixes.parse_names` takes names apart: `masks/0001_mask.png` has the core `0001`.
"""

import posixpath
import re
from collections.abc import Sequence
from fnmatch import fnmatchcase
from functools import lru_cache
from typing import NamedTuple

from segtrain.data.read.sequences import SPLIT_WORDS


def _words(text: str) -> frozenset[str]:
    return frozenset(text.split())


IMAGE_WORDS = _words(
    "image images img imgs im rgb photo photos picture pictures pic pics jpegimages leftimg8bit "
    "input inputs raw frame frames orig origin original originals sat scan scans src source x"
)
LABEL_WORDS = _words(
    "label labels lbl lbls mask masks msk annotation annotations annot annots ann anns anno annos "
    "gt gts gtfine gtcoarse groundtruth ground truth seg segs segm segmentation segmentations "
    "segmentationclass segmentationobject semantic semantics target targets labelled labelids "
    "labeltrainids trimap trimaps matte mattes class classes index gray grey y l"
)
# Pictures made for people, or predictions: neither images nor labels to train on.
MADE_WORDS = _words(
    "overlay overlays vis viz visual visualization visualizations preview previews blend blended "
    "debug pred preds prediction predictions contact thumbs thumbnails"
)
_PHOTO_WORDS = IMAGE_WORDS | {"vi", "vis", "visible", "color", "colour"}
ROLE_WORDS = IMAGE_WORDS | LABEL_WORDS | {"dir", "folder", "png", "jpg", "tif", "data", "file"}
# `train2017`, `traincrop`, `trainaug`
_GLUED = re.compile(r"(train|training|val|valid|validation|te|test|testing)(\d+|crops?|set|aug)")
# Words beside that of a split: `a. Training Set`.
_OF_LISTS = {"set", "data", "dataset", "split", "a", "b", "c", "1", "2", "3"}
# Words that say which band or kind of picture a file is, of satellites, radar and medicine.
_BAND = re.compile(
    r"(b|band|ch|channel)\d*a?|coastal|blue|green|red|re\d?|rededge\d?|nir\d?|swir\d?|tir\d?|"
    r"thermal|pan|[vh][vh]|t[12](ce|gd|[cnfw])?|flair|dwi|adc"
)


class FileName(NamedTuple):
    """A relative path in its parts, all in lower case but `path`.

    core: the stem without the beginnings and ends that many names share.
    pattern: of its group, such as `masks/*_mask.png`: the same folder, beginning, end and suffix.
    folders: words of the folders, without those that say a role; the split, if the stem says it.
    words: of the stem.
    """

    path: str
    core: str
    pattern: str
    folders: frozenset[str]
    words: frozenset[str]

    @property
    def stem(self) -> str:
        """The name without folders and suffix, in lower case."""
        return posixpath.splitext(posixpath.basename(self.path))[0].lower()

    @property
    def folder(self) -> str:
        """The folder that it lies in; "" for the uppermost one."""
        return self.path.rpartition("/")[0]

    @property
    def split(self) -> str | None:
        """train, val or test, if a folder says so."""
        splits = {split for word in self.folders if (split := split_of(word))}
        if splits == {"train", "val"}:  # train_val
            return "train"
        return splits.pop() if len(splits) == 1 else None


@lru_cache(maxsize=4096)
def words_of(text: str) -> tuple[str, ...]:
    """Words in lower case: `imagesTr` and `img_dir` have two each, `labelIds` is one."""
    words = []
    for word in re.findall(r"[A-Za-z0-9]+", text):
        is_known = word.lower() in ROLE_WORDS
        spaced = word if is_known else re.sub(r"(?<=[a-z])(?=[A-Z])", " ", word)
        words += spaced.lower().split()
    return tuple(words)


def split_of(word: str) -> str | None:
    """The split that a word in lower case says: `train`, and so do `train2017` and `traincrop`."""
    glued = _GLUED.fullmatch(word)
    return SPLIT_WORDS.get(glued[1] if glued else word)


def is_split(folder: str) -> bool:
    """Whether all words of a folder say a split."""
    words = [word for word in words_of(folder) if word not in _OF_LISTS]
    return bool(words) and all(map(split_of, words))


def fits(path: str, wanted: str) -> bool:
    """Whether `wanted` names a file: a folder above it, a part of its path, or a pattern."""
    wanted = wanted.removeprefix("./").strip("/")
    is_below = path.startswith(f"{wanted}/") or f"/{wanted}/" in f"/{path}"
    if "*" in wanted:
        return fnmatchcase(path, wanted) or fnmatchcase(path, f"*/{wanted}")
    return is_below or wanted in path


def form_of(pattern: str) -> str:
    """The pattern without folders of splits, and with `*` for numbers of scenes."""
    *folders, name = pattern.split("/")
    roles = IMAGE_WORDS | LABEL_WORDS | MADE_WORDS
    kept = [
        "*" if re.search(r"\d", x) and not roles & set(words_of(x)) else x
        for x in folders
        if not is_split(x)
    ]
    return "/".join([*kept, name])


def are_photos(images: Sequence[FileName]) -> list[bool]:
    """Whether words that they do not share call each a photo: no picture of depth or heat."""
    words = [{*words_of(image.pattern.replace("*", " "))} for image in images]
    shared = set.intersection(*words)
    return [not _PHOTO_WORDS.isdisjoint(own - shared) for own in words]


def band_words(text: str) -> tuple[str, ...]:
    """The words that say a band or a kind of picture."""
    return tuple(word for word in words_of(text) if _BAND.fullmatch(word))


def band_of(image: FileName) -> tuple[str, ...]:
    """What tells the bands of an image from each other, and is the same in all images.

    Folders that differ in a number alone are scenes, unless they are called as bands are: `B02/`.
    """
    return (form_of(image.pattern), *band_words(image.pattern))
