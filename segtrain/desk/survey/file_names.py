"""What the path of a file says of its role: its core, and what surrounds the core.

`masks/0001_mask.png` has the core `0001`, and beginnings and ends that names of its kind have in
common. Words tell roles, splits and bands.
"""

import posixpath
import re
from collections import Counter, defaultdict
from collections.abc import Sequence, Set
from fnmatch import fnmatchcase
from functools import lru_cache
from pathlib import PurePosixPath
from typing import NamedTuple

from segtrain.data.read.sequences import SPLIT_WORDS

_IMAGE_WORDS = (
    "image images img imgs im rgb photo photos picture pictures pic pics jpegimages "
    "leftimg8bit input inputs raw frame frames orig origin original originals sat scan scans src "
    "source x"
)
IMAGE_WORDS = frozenset(_IMAGE_WORDS.split())
_LABEL_WORDS = (
    "label labels lbl lbls mask masks msk annotation annotations annot annots ann anns anno "
    "annos gt gts gtfine gtcoarse groundtruth ground truth seg segs segm segmentation "
    "segmentations segmentationclass segmentationobject semantic semantics target targets "
    "labelled labelids labeltrainids trimap trimaps matte mattes class classes index gray "
    "grey y l"
)
_PHOTO_WORDS = IMAGE_WORDS | {"vi", "vis", "visible", "color", "colour"}
LABEL_WORDS = frozenset(_LABEL_WORDS.split())
# Pictures made for people, or predictions: neither images nor labels to train on.
_MADE_WORDS = (
    "overlay overlays vis viz visual visualization visualizations preview previews blend "
    "blended debug pred preds prediction predictions contact thumbs thumbnails"
)
MADE_WORDS = frozenset(_MADE_WORDS.split())
ROLE_WORDS = IMAGE_WORDS | LABEL_WORDS | {"dir", "folder", "png", "jpg", "tif", "data", "file"}
# `train2017`, `traincrop`, `trainaug`
_GLUED = re.compile(r"(train|training|val|valid|validation|test|testing)(\d+|crops?|set|aug)")
# Words beside that of a split: `a. Training Set`.
_OF_LISTS = {"set", "data", "dataset", "split", "a", "b", "c", "1", "2", "3"}
# A beginning or end counts as one if so many names of a folder have it; role words always do.
_COMMON_START, _COMMON_END = 0.9, 0.1
_MOST_AFFIXES = 4
# Words that say which band or kind of picture a file is, of satellites, radar and medicine.
_BAND = re.compile(
    r"(b|band|ch|channel)\d*a?|coastal|blue|green|red|re\d?|rededge\d?|nir\d?|swir\d?|tir\d?|"
    r"thermal|pan|[vh][vh]|t[12](ce|gd|[cnfw])?|flair|dwi|adc"
)

_FolderKind = tuple[str, str]
"""The folder of a file, and its suffix."""
_Affix = tuple[_FolderKind, str]
"""A beginning or an end of names of a kind."""


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
    wanted = wanted.strip("/")
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


def parse_names(paths: Sequence[str]) -> list[FileName]:
    """The parts of each name; beginnings and ends are those that several names share.

    >>> names = parse_names(["img/a_1.jpg", "img/a_2.jpg", "gt/train/a_1_mask.png"])
    >>> [name.core for name in names]
    ['a_1', 'a_2', 'a_1']
    >>> names[2].pattern, names[2].split
    ('gt/train/*_mask.png', 'train')
    """
    places = [PurePosixPath(path) for path in paths]
    kinds = [(str(place.parent), place.suffix.lower()) for place in places]
    stems = {place.stem for place in places}
    parts = [_with_second_mask(place.stem, stems) for place in places]  # beginning, core, end
    # One beginning and one end a turn: of 001_gtFine_labelIds first _labelIds, then _gtFine.
    for _ in range(_MOST_AFFIXES):
        parts = _without_affixes(kinds, parts)
    patterns = [
        f"{folder}/{start}*{end}{suffix}".removeprefix("./")
        for (folder, suffix), (start, _, end) in zip(kinds, parts, strict=True)
    ]
    cores = [core.lower() for _, core, _ in parts]
    # Where two names of a group would have one core, all keep their whole stems.
    count = Counter(zip(patterns, cores, strict=True))
    clashing = {pattern for (pattern, _), number in count.items() if number > 1}
    splits = _splits_of_stems(places)
    names = []
    for place, pattern, core in zip(places, patterns, cores, strict=True):
        # Image and label differ in words of roles, but must agree in those of splits.
        words = {*words_of(str(place.parent)), *splits.get(place, ())}
        names.append(
            FileName(
                path=str(place),
                core=place.stem.lower() if pattern in clashing else core,
                pattern=pattern,
                folders=frozenset(words - (ROLE_WORDS - SPLIT_WORDS.keys())),
                words=frozenset(words_of(place.stem)),
            )
        )
    return names


def _with_second_mask(stem: str, stems: Set[str]) -> tuple[str, str, str]:
    """Beginning, core and end: `_mask_1` of `7_mask_1` is an end, if there is a `7`."""
    matched = re.fullmatch(r"(.+?)([_\-. ]+([A-Za-z]+)[_\-. ]*\d+)", stem)
    is_second = matched and matched[1] in stems and matched[3].lower() in LABEL_WORDS
    return ("", matched[1], matched[2]) if is_second else ("", stem, "")


def _splits_of_stems(places: Sequence[PurePosixPath]) -> dict[PurePosixPath, tuple[str]]:
    """The split of each name, of folders in which all names begin with one, and with several."""
    by_folder: dict[PurePosixPath, dict[PurePosixPath, str | None]] = defaultdict(dict)
    for place in places:
        first, *_ = (*words_of(place.stem), "")
        by_folder[place.parent][place] = split_of(first)
    # train_1.bmp and val_1.bmp in one folder; if all begin with test_, it says nothing.
    said = [splits for splits in by_folder.values() if len({*splits.values()}) > 1]
    return {
        place: (split,)
        for splits in said
        if None not in splits.values()
        for place, split in splits.items()
    }


def _without_affixes(
    kinds: Sequence[_FolderKind], parts: Sequence[tuple[str, str, str]]
) -> list[tuple[str, str, str]]:
    """The parts with one more beginning and end off each core, if it is shared or says a role.

    kinds: the folder and the suffix of each name.
    """
    cores = [core for _, core, _ in parts]
    starts, ends = list(map(_start_of, cores)), list(map(_end_of, cores))
    common_starts = _common_starts(kinds, starts)
    common_ends = _common_ends(kinds, cores, ends) - _ends_of_images(kinds, parts, ends)
    shortened = []
    for kind, (before, core, after), start, end in zip(kinds, parts, starts, ends, strict=True):
        if not _is_role(start) and (kind, start) not in common_starts:
            start = ""
        if not _is_role(end) and (kind, end) not in common_ends:
            end = ""
        if start and len(start) + len(end) > len(core):  # they overlap
            end = ""
        shortened.append((before + start, core[len(start) : len(core) - len(end)], end + after))
    return shortened


def _common_starts(kinds: Sequence[_FolderKind], starts: Sequence[str]) -> set[_Affix]:
    """The beginnings that nearly all names of a kind have, but for those of scenes."""
    sizes = Counter(kinds)
    folders = Counter(PurePosixPath(folder).name for folder in {folder for folder, _ in kinds})
    common = set()
    for (kind, start), number in Counter(zip(kinds, starts, strict=True)).items():
        is_common = sizes[kind] > 2 and number >= _COMMON_START * sizes[kind]
        # Of a scene, such as zurich/zurich_001, which its image has too.
        name = PurePosixPath(kind[0]).name
        is_scene = folders[name] > 1 and words_of(start) == words_of(name)
        if is_common and not is_scene:
            common.add((kind, start))
    # Of a class that few images show, as in the folders of the others.
    beside = {(_siblings(kind), start) for kind, start in common}
    small = {key for key in zip(kinds, starts, strict=True) if sizes[key[0]] <= 2}
    return common | {(kind, start) for kind, start in small if (_siblings(kind), start) in beside}


def _common_ends(
    kinds: Sequence[_FolderKind], cores: Sequence[str], ends: Sequence[str]
) -> set[_Affix]:
    """The ends that several names of a kind have, and rarer ones that go with them."""
    sizes = Counter(kinds)
    counts = Counter(zip(kinds, ends, strict=True))
    common = {
        (kind, end)
        for (kind, end), number in counts.items()
        if sizes[kind] > 2 and number >= max(2, _COMMON_END * sizes[kind])
    }
    # Of a city with one image, as in the folders of the others.
    siblings = {(_siblings(kind), end) for kind, end in common}
    common |= {(kind, end) for kind, end in counts if (_siblings(kind), end) in siblings}
    # `1_tree` is rare, but beside `1_road` of a common end: a class that few images show.
    stems = [core.removesuffix(end) for core, end in zip(cores, ends, strict=True)]
    names = list(zip(kinds, stems, ends, strict=True))
    beside = {(kind, stem) for kind, stem, end in names if end and (kind, end) in common}
    apart = {(kind, end) for kind, stem, end in names if (kind, stem) not in beside}
    rare = {key for key, number in counts.items() if number >= 2 and key not in apart}
    return common | rare


def _siblings(kind: _FolderKind) -> _FolderKind:
    """The folder above that of a kind, and its suffix."""
    folder, suffix = kind
    return str(PurePosixPath(folder).parent), suffix


def _ends_of_images(
    kinds: Sequence[_FolderKind], parts: Sequence[tuple[str, str, str]], ends: Sequence[str]
) -> set[_Affix]:
    """The ends, by kind, that belong to images: `_flip` of `1_flip`, `_z07` of `p2_z07`.

    Names of another folder go on from there (`p2_z07_liver`) or end there too. It is not so where
    `1_car` is of the image `1`: then the name without the end is in another folder alone.
    """
    wholes: dict[_FolderKind, set[str]] = defaultdict(set)
    stems: set[str] = set()
    beginnings: dict[str, set[_FolderKind]] = defaultdict(set)
    for kind, (before, core, after) in zip(kinds, parts, strict=True):
        stem = (before + core + after).lower()
        stems.add(stem)
        wholes[kind].add((before + core).lower())
        # All beginnings that end at a sign: p2, p2_z07 and p2_z07_liver.
        for end in re.finditer(r"(?=[_\-. ])|$", stem):
            beginnings[stem[: end.start()]].add(kind)
    votes: dict[_Affix, list[bool]] = defaultdict(list)
    for kind, (before, core, _), end in zip(kinds, parts, ends, strict=True):
        if not end or _is_role(end) or any(map(split_of, words_of(end))):
            continue
        whole, bare = (before + core).lower(), (before + core.removesuffix(end)).lower()
        # Another folder has 1_flip or 1_flip_mask: the end is of the image. But where only
        # another folder has a 1, 1_car is of a class.
        goes_on = bool(beginnings[whole] - {kind})
        is_of_another = bare in stems and bare not in wholes[kind]
        votes[kind, end].append(goes_on and not is_of_another)
    return {key for key, ballot in votes.items() if sum(ballot) > len(ballot) / 2}


def _start_of(stem: str) -> str:
    """`img_` of `img_001`, `img` of `img001`; "" if it begins with a number."""
    matched = re.match(r"[A-Za-z][A-Za-z0-9]*[_\-. ]+(?=.)|[A-Za-z]+(?=\d)|[A-Za-z]+$", stem)
    return matched[0] if matched else ""


def _end_of(stem: str) -> str:
    """`_mask` of `001_mask`, `mask` of `001mask`; "" if it ends with a number alone."""
    matched = re.search(
        r"(?<=.)[_\-. ]+(?=[^_\-. ]*[A-Za-z])[A-Za-z0-9]+$|(?<=\d)[A-Za-z]{2,}$|^[A-Za-z]+$", stem
    )
    return matched[0] if matched else ""


def _is_role(affix: str) -> bool:
    words = words_of(affix)
    return bool(words) and all(word in ROLE_WORDS for word in words)


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
