"""Names in their parts: the core, and the beginnings and ends that names of a kind have in common.

`masks/0001_mask.png` has the core `0001` and the end `_mask`.
"""

import re
from collections import Counter, defaultdict
from collections.abc import Mapping, Sequence, Set
from pathlib import PurePosixPath
from typing import NamedTuple

from segtrain.data.read.sequences import SPLIT_WORDS
from segtrain.desk.survey.file_names import LABEL_WORDS, ROLE_WORDS, FileName, split_of, words_of

# A beginning or end counts if so large a share of a folder has it; words of roles always do. Ends
# may be those of classes, of which there are many.
_COMMON_START = 0.9
_COMMON_END = 0.1
# Beginnings and ends of a name that are cut off; 001_gtFine_labelIds needs two.
_MOST_AFFIXES = 4

_FolderKind = tuple[str, str]
"""The folder of a file, and its suffix."""
_Affix = tuple[_FolderKind, str]
"""A beginning or an end of names of a kind."""


class _Parts(NamedTuple):
    """A stem: start + core + end."""

    start: str
    core: str
    end: str


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
    parts = [_with_second_mask(place.stem, stems) for place in places]
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


def _with_second_mask(stem: str, stems: Set[str]) -> _Parts:
    """The stem as a core, but `_mask_1` of `7_mask_1` is an end, if there is a `7`."""
    matched = re.fullmatch(r"(.+?)([_\-. ]+([A-Za-z]+)[_\-. ]*\d+)", stem)
    is_second = matched and matched[1] in stems and matched[3].lower() in LABEL_WORDS
    return _Parts("", matched[1], matched[2]) if is_second else _Parts("", stem, "")


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


def _without_affixes(kinds: Sequence[_FolderKind], parts: Sequence[_Parts]) -> list[_Parts]:
    """The parts with one more beginning and end off each core, if it is shared or says a role.

    kinds: the folder and the suffix of each name.
    """
    cores = [core for _, core, _ in parts]
    starts, ends = list(map(_start_of, cores)), list(map(_end_of, cores))
    common_starts = _common_starts(kinds, starts)
    common_ends = _common_ends(kinds, cores, ends) - _ends_of_images(kinds, parts, ends)
    shortened = []
    for kind, part, start, end in zip(kinds, parts, starts, ends, strict=True):
        if not _is_role(start) and (kind, start) not in common_starts:
            start = ""
        if not _is_role(end) and (kind, end) not in common_ends:
            end = ""
        if start and len(start) + len(end) > len(part.core):  # they overlap
            end = ""
        core = part.core[len(start) : len(part.core) - len(end)]
        shortened.append(_Parts(part.start + start, core, end + part.end))
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
    in_others = {(_folder_above(kind), start) for kind, start in common}
    return common | {
        (kind, start)
        for kind, start in zip(kinds, starts, strict=True)
        if sizes[kind] <= 2 and (_folder_above(kind), start) in in_others
    }


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
    # Of folders with a name or two each, as of frames, all below one folder say it.
    below, all_below = Counter(), Counter()
    for kind, core, end in zip(kinds, cores, ends, strict=True):
        below[_uppermost(kind)] += 1
        all_below[_uppermost(kind), end] += end != core
    common |= {
        (kind, end)
        for kind, end in counts
        if sizes[kind] <= 2 and all_below[_uppermost(kind), end] >= _most_common(below, kind)
    }
    # Of a city with one image, as in the folders of the others.
    in_others = {(_folder_above(kind), end) for kind, end in common}
    common |= {(kind, end) for kind, end in counts if (_folder_above(kind), end) in in_others}
    return common | _rare_ends_beside(common, kinds, cores, ends)


def _rare_ends_beside(
    common: Set[_Affix], kinds: Sequence[_FolderKind], cores: Sequence[str], ends: Sequence[str]
) -> set[_Affix]:
    """Ends of classes that few images show: no name has them without one of a common end beside.

    1_road   _road is common
    1_tree   _tree is rare; it counts, since 1_road lies beside each 1_tree
    7_left   _left is rare; it does not count, since there is no 7_road
    """
    names = [
        (kind, core.removesuffix(end), end)
        for kind, core, end in zip(kinds, cores, ends, strict=True)
    ]
    with_common_end = {(kind, stem) for kind, stem, end in names if end and (kind, end) in common}
    found_alone = {(kind, end) for kind, stem, end in names if (kind, stem) not in with_common_end}
    counts = Counter((kind, end) for kind, _, end in names)
    return {affix for affix, n in counts.items() if n >= 2 and affix not in found_alone}


def _most_common(sizes: Mapping[_FolderKind, int], kind: _FolderKind) -> float:
    """How many names below the uppermost folder of a kind make an end common."""
    return max(3, _COMMON_END * sizes[_uppermost(kind)])


def _uppermost(kind: _FolderKind) -> _FolderKind:
    """The uppermost folder of a kind, and its suffix."""
    folder, suffix = kind
    return folder.split("/")[0], suffix


def _folder_above(kind: _FolderKind) -> _FolderKind:
    """The kind that folders beside each other have in common: the folder above, and the suffix."""
    folder, suffix = kind
    return str(PurePosixPath(folder).parent), suffix


def _ends_of_images(
    kinds: Sequence[_FolderKind], parts: Sequence[_Parts], ends: Sequence[str]
) -> set[_Affix]:
    """The ends that tell images apart, and are not to be cut off: most names of a kind say so.

    images/1.jpg   images/1_flip.jpg   masks/1_flip_mask.png   masks/1_car.png

    `_flip` is of an image: masks/ has a name that goes on from `1_flip`. `_car` is of a label: no
    other folder has a name that begins with `1_car`. It would be of a label even if one had: there
    is a `1` in images/, and none in masks/.
    """
    stems: set[str] = set()
    left_so_far: dict[_FolderKind, set[str]] = defaultdict(set)
    beginnings: dict[str, set[_FolderKind]] = defaultdict(set)
    for kind, (start, core, cut_end) in zip(kinds, parts, strict=True):
        stem = f"{start}{core}{cut_end}".lower()
        stems.add(stem)
        left_so_far[kind].add(f"{start}{core}".lower())
        # All beginnings that end at a sign: p2, p2_z07 and p2_z07_liver.
        for sign in re.finditer(r"(?=[_\-. ])|$", stem):
            beginnings[stem[: sign.start()]].add(kind)
    votes: dict[_Affix, list[bool]] = defaultdict(list)
    for kind, (start, core, _), end in zip(kinds, parts, ends, strict=True):
        if not end or _is_role(end) or any(map(split_of, words_of(end))):
            continue
        with_end = f"{start}{core}".lower()
        without_end = f"{start}{core.removesuffix(end)}".lower()
        other_folder_goes_on = bool(beginnings[with_end] - {kind})
        is_label_of_other = without_end in stems and without_end not in left_so_far[kind]
        votes[kind, end].append(other_folder_goes_on and not is_label_of_other)
    return {affix for affix, ballot in votes.items() if sum(ballot) > len(ballot) / 2}


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
