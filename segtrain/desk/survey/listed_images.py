"""Which images the rows of a list name: with or without folders and suffix, or by a sequence."""

import re
from collections import defaultdict
from collections.abc import Iterator, Mapping, Sequence
from pathlib import PurePosixPath

from segtrain.desk.survey.contents import spread
from segtrain.desk.survey.file_names import ROLE_WORDS, is_split, split_of, words_of
from segtrain.desk.survey.image_kinds import Image
from segtrain.desk.survey.list_text import ListFile, ListRow, columns_of

# Rows that tell which column names images.
_SAMPLE = 100
# Between the parts of a name: `img_0001`, `0001-mask`.
_SIGNS = re.compile(r"[_\-. ]+")
# In place of an index: several images have the name.
_SEVERAL = -1


class ImageNames:
    """Images, by index, by the names that lists have for them, in lower case."""

    def __init__(self, images: Sequence[Image]) -> None:
        self._images = images
        self._by_path: dict[str, int] = {}
        self._by_end: dict[str, int] = {}
        self._by_core: dict[str, int] = {}
        self._by_number: dict[str, int] = {}
        # Of sequences: made when a list names some.
        self._members: Mapping[str, Sequence[int]] | None = None
        for i, image in enumerate(images):
            for file in map(str.lower, image.files):
                bare = _without_suffix(file)
                for path in (file, bare):
                    _add(self._by_path, path, i)
                    for end in ends_of(path):
                        _add(self._by_end, end, i)
                *_, core = ends_of(_core(bare))
                for end in ends_of(_core(bare)):
                    _add(self._by_core, end, i)
                if core.isdecimal():
                    _add(self._by_number, str(int(core)), i)

    def one(self, listed: str) -> int | None:
        """The image of this name, perhaps with folders of another machine; None: none, or several.

        `img.v2` as it stands comes first: it has no suffix, and is not img.png.
        """
        name = listed.lower()
        bare = _without_suffix(name)
        for form, known in (
            (name, self._by_end),
            (bare, self._by_end),
            (_core(bare), self._by_core),
            # 7 is 007_image.png, as lists in YAML have it.
            (name.lstrip("0") if name.isdecimal() else "", self._by_number),
        ):
            for end in ends_of(form):
                i = self._by_path.get(end, known.get(end))
                if i is not None:
                    return None if i == _SEVERAL or self._is_elsewhere(i, name) else i
        return None

    def of_sequence(self, listed: str) -> Sequence[int]:
        """The images of this folder or with this beginning, such as `bear` of bear/00001.jpg."""
        if self._members is None:
            self._members = _members(self._images)
        name = listed.lower()
        ends = (end for form in (name, _without_suffix(name)) for end in ends_of(form))
        return next((self._members[end] for end in ends if end in self._members), ())

    def _is_elsewhere(self, i: int, listed: str) -> bool:
        """Whether folders say another split: val/7.png is not train/7.png."""
        said = _splits_of_folders(listed)
        there = _splits_of_folders(self._images[i].path) if said else said
        return bool(said and there and said.isdisjoint(there))


def _splits_of_folders(path: str) -> set[str | None]:
    """The splits that folders are called after: val of images/val/7.png."""
    folders = [x for x in path.split("/")[:-1] if words_of(x) and is_split(x)]
    return {split_of(word) for folder in folders for word in words_of(folder)}


def ends_of(path: str) -> Iterator[str]:
    """The path, and what is left of it without folders, to the bare name.

    >>> list(ends_of("voc/images/1.jpg"))
    ['voc/images/1.jpg', 'images/1.jpg', '1.jpg']
    """
    parts = [part for part in path.split("/") if part not in ("", ".")]
    return ("/".join(parts[i:]) for i in range(len(parts)))


def named_images(file: ListFile, names: ImageNames) -> list[Sequence[int]]:
    """The images that each row names; empty: none, or several of one name.

    Where few rows name an image, they may name sequences: `bear` for bear/00001.jpg and its like.
    """
    # Whether rows name images or sequences, and in which column, a sample tells.
    sample = spread(file.rows, _SAMPLE)
    for sequences in (False, True):
        column, number = _best_column(file, sample, names, sequences=sequences)
        if 2 * number >= len(sample):
            break
    if not number:  # a log, or points of a cloud
        return [()] * len(file.rows)
    return [_of_row(row, column, names, sequences=sequences) for row in file.rows]


def _best_column(
    file: ListFile, sample: Sequence[ListRow], names: ImageNames, *, sequences: bool
) -> tuple[int, int]:
    """The column in which the most rows of the sample name images, and how many do."""
    counts = {
        column: sum(bool(_of_row(row, column, names, sequences=sequences)) for row in sample)
        for column in columns_of(file)
    }
    return max(counts.items(), key=lambda item: item[1], default=(0, 0))


def _of_row(row: ListRow, column: int, names: ImageNames, *, sequences: bool) -> Sequence[int]:
    """The image or the sequence that a row names in this column."""
    # The whole line first: names may have blanks.
    texts = [x for x in (row.text, *row.cells[column : column + 1]) if x]
    for text in texts:
        if (i := names.one(text)) is not None:
            return (i,)
    found = map(names.of_sequence, texts) if sequences else ()
    return next(filter(None, found), ())


def _add(known: dict[str, int], name: str, i: int) -> None:
    """A name of two images is of none."""
    if known.setdefault(name, i) != i:
        known[name] = _SEVERAL


def _core(path: str) -> str:
    """The path without words of image and label at the ends of its name.

    >>> _core("images/img_0001"), _core("0001-mask")
    ('images/0001', '0001')
    """
    folder, slash, stem = path.rpartition("/")
    parts = _SIGNS.split(stem)
    while len(parts) > 1 and parts[-1] in ROLE_WORDS:
        parts.pop()
    while len(parts) > 1 and parts[0] in ROLE_WORDS:
        parts.pop(0)
    return folder + slash + "_".join(parts)


def _without_suffix(path: str) -> str:
    return re.sub(r"(?<=[^/])(\.nii)?\.[^./ ]+$", "", path)


def _members(images: Sequence[Image]) -> dict[str, list[int]]:
    """The images of each folder, and those whose names begin alike, up to a sign."""
    members: dict[str, list[int]] = defaultdict(list)
    keys_of: dict[PurePosixPath, set[str]] = {}
    for i, image in enumerate(images):
        place = PurePosixPath(image.path.lower())
        if place.parent not in keys_of:
            folders = [place.parent, *place.parent.parents][:-1]
            keys_of[place.parent] = {x for folder in folders for x in ends_of(str(folder))}
        stem = place.stem
        begins = {stem[: sign.start()] for sign in _SIGNS.finditer(stem)}
        begins = {x for x in begins if not all(map(split_of, words_of(x)))}
        for key in keys_of[place.parent] | begins:
            # `images` and `img` say nothing; `train/images` does.
            if "/" in key or not all(x in ROLE_WORDS for x in words_of(key)):
                members[key].append(i)
    return members
