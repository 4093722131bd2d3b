"""Train ids from what label files hold: raw ids or colours, by the tables of a class file."""

from collections.abc import Iterable
from functools import lru_cache
from pathlib import Path

import cv2
import numpy as np

from segtrain.data.read.classes import ClassFile, Color
from segtrain.errors import DataError
from segtrain.text import first_of, printable
from segtrain.types import IGNORE_INDEX

_MAX_SHOWN = 10
# The largest of 16 bits, and the id of pixels that a TIFF marks by a number that is none.
_NO_DATA_ID = 65535
# More colours than 8-bit labels have values.
_MANY_COLORS = 256


def ids_to_train_ids(raw: np.ndarray, path: str | Path, class_file: ClassFile) -> np.ndarray:
    """Train ids (H, W) uint8 of the raw ids (H, W) uint8 or uint16.

    Road and sky have the raw ids 7 and 23; 0 is ignored.

    >>> from segtrain.data.read.classes import SegClass
    >>> classes = SegClass("road", (0, 0, 0), (7,)), SegClass("sky", (0, 0, 255), (23,))
    >>> file = ClassFile("street", classes, ignore_ids=(0,), ignore_color=(0, 0, 0))
    >>> ids_to_train_ids(np.uint8([[7, 23, 0]]), "1.png", file).tolist()
    [[0, 1, 255]]

    Raises:
        DataError: ids that the class file does not name.
    """
    table, known = _id_tables(tuple(class_file.train_id_of.items()))
    if not _looked_up(raw, known).all():
        raise DataError(f"{printable(path)}: {unknown_ids(count_ids(raw), class_file)}")
    return _looked_up(raw, table)


def bands_to_presence(bands: np.ndarray, path: str | Path, class_file: ClassFile) -> np.ndarray:
    """Where each class is, (H, W, K) uint8 of 0, 1 and IGNORE_INDEX, of the bands of a label.

    bands: (H, W, K) of whole numbers.

    Raises:
        DataError: numbers in a band that mean nothing there.
    """
    label = np.empty(bands.shape, np.uint8)
    for k, entry in enumerate(class_file.classes):
        raw = np.ascontiguousarray(bands[..., k])
        # No id is larger; cut to 16 bits, 65537 would be 1.
        if raw.dtype.itemsize > 2 and (large := raw[raw > np.iinfo(np.uint16).max]).size:
            values, numbers = (x.tolist() for x in np.unique(large, return_counts=True))
            listed = _listed(dict(zip(values, numbers, strict=True)))
            what = f"values in the band of {printable(entry.name)}: {listed}"
            raise DataError(f"{printable(path)}: {what}; ids end at {np.iinfo(np.uint16).max}")
        raw = raw if raw.dtype in (np.uint8, np.uint16) else raw.astype(np.uint16)
        table, known = _id_tables(tuple(presence_of(class_file, k).items()))
        if not _looked_up(raw, known).all():
            found = {i: n for i, n in count_ids(raw).items() if not known[i]}
            raise DataError(f"{printable(path)}: {unknown_in_band(found, entry.name, class_file)}")
        label[..., k] = _looked_up(raw, table)
    return label


def presence_of(class_file: ClassFile, train_id: int) -> dict[int, int]:
    """Value in the band of a class -> 1, 0 or IGNORE_INDEX; other values are mistakes."""
    present = dict.fromkeys(class_file.classes[train_id].ids, 1)
    return {0: 0} | present | dict.fromkeys(class_file.ignore_ids, IGNORE_INDEX)


def unknown_in_band(counts: dict[int, int], name: str, class_file: ClassFile) -> str:
    """A message about values in the band of a class that mean nothing there.

    counts: pixels of each.
    """
    value = next(iter(counts))
    return (
        f"values in the band of {printable(name)}: {_listed(counts)}; class file {class_file.name} "
        f"must say what they mean: the class (`ids: [{value}]` of it, where 0 is its absence), or "
        f"pixels to ignore (`ignore_ids: {[*class_file.ignore_ids, value]}`)"
    )


def _looked_up(raw: np.ndarray, table: np.ndarray) -> np.ndarray:
    # cv2.LUT is faster than numpy's take, which casts every index to 64 bits.
    return cv2.LUT(raw, table[:256]) if raw.dtype == np.uint8 else table[raw]


def count_ids(raw: np.ndarray) -> dict[int, int]:
    """Pixels of each raw id that occurs."""
    counts = np.bincount(raw.reshape(-1))
    return {int(i): int(counts[i]) for i in np.flatnonzero(counts)}


def unknown_ids(counts: dict[int, int], class_file: ClassFile) -> str:
    """A message about the ids that the class file does not know, with a likely repair.

    counts: pixels of each raw id in one label or in many.
    """
    unknown = {i: n for i, n in sorted(counts.items()) if i not in class_file.train_id_of}
    shown = f"label ids outside class file {class_file.name}: {_listed(unknown)}"
    return f"{shown}; {_repair_for_ids(set(counts), set(unknown), class_file)}"


def colors_to_train_ids(colors: np.ndarray, path: str | Path, class_file: ClassFile) -> np.ndarray:
    """Train ids (H, W) uint8 of the exact colours (H, W, 3) uint8.

    Raises:
        DataError: colours that the class file does not name.
    """
    label = map_colors(colors, class_file)
    if label.min() < 0:
        unknown = count_colors(colors[label < 0])
        raise DataError(f"{printable(path)}: {unknown_colors(unknown, class_file)}")
    return label.astype(np.uint8)


def map_colors(colors: np.ndarray, class_file: ClassFile) -> np.ndarray:
    """Train ids (H, W) int16 of the colours (H, W, 3) uint8; -1 where no class has the colour."""
    ignored = class_file.ignore_color if class_file.ignores_color else None
    meanings = tuple(c.label_colors for c in class_file.classes)
    return _color_table(meanings, ignored)[_pack(colors)]


def count_colors(colors: np.ndarray) -> dict[Color, int]:
    """Pixels of each colour in (..., 3) uint8, most frequent first."""
    values, counts = np.unique(_pack(colors), return_counts=True)
    order = np.argsort(-counts, kind="stable")
    return {
        (value >> 16, value >> 8 & 255, value & 255): count
        for value, count in zip(values[order].tolist(), counts[order].tolist(), strict=True)
    }


def unknown_colors(counts: dict[Color, int], class_file: ClassFile) -> str:
    """A message about colours that no class has, with a likely repair."""
    repair = "so many colours come from resizing or JPEG"
    if len(counts) <= _MANY_COLORS:
        ignored = list(class_file.ignore_color if class_file.ignores_color else next(iter(counts)))
        repair = (
            "give each class its `color` there; if pixels are to be ignored, write "
            f"`ignore_color: {ignored}` there"
        )
    shown = _listed({str(list(color)): n for color, n in counts.items()})
    return f"colours that class file {class_file.name} does not name: {shown}; {repair}"


def _listed(counts: dict[int, int] | dict[str, int]) -> str:
    return first_of((f"{value} ({n} pixels)" for value, n in counts.items()), _MAX_SHOWN)


# All labels of a split ask for the same tables.
@lru_cache(maxsize=8)
def _id_tables(train_id_of: tuple[tuple[int, int], ...]) -> tuple[np.ndarray, np.ndarray]:
    """Train id and "is known" of every 16-bit raw id, two (65536,) uint8."""
    train_ids, known = np.zeros((2, 1 << 16), np.uint8)
    for raw, train_id in train_id_of:
        train_ids[raw], known[raw] = train_id, 1
    return train_ids, known


# A table takes 32 MB, so few are kept.
@lru_cache(maxsize=2)
def _color_table(meanings: tuple[tuple[Color, ...], ...], ignored: Color | None) -> np.ndarray:
    """Train id of every 24-bit colour, -1 where there is none, (2**24,) int16.

    meanings: the colours of each class.
    """
    table = np.full(1 << 24, -1, np.int16)
    for train_id, colors in enumerate(meanings):
        table[_pack(np.array(colors))] = train_id
    if ignored is not None:
        table[_pack(np.array(ignored))] = IGNORE_INDEX
    return table


def _pack(colors: np.ndarray) -> np.ndarray:
    """0xRRGGBB of the colours (..., 3), (...,) int32."""
    packed = colors[..., 0].astype(np.int32) << 16
    packed |= colors[..., 1].astype(np.int32) << 8
    packed |= colors[..., 2]
    return packed


# More unknown ids than this come from a photograph or from resizing with interpolation.
_MANY_VALUES = 64


def _repair_for_ids(found: set[int], unknown: set[int], class_file: ClassFile) -> str:
    """What to do about the ids `unknown` among those that labels hold: the first that fits."""
    num_classes = class_file.num_classes
    if 255 in unknown and found <= {0, 255}:
        return "this is a 0/255 mask: give the foreground class `ids: [255]` in the class file"
    if unknown == {255} and looks_like_train_ids(found, class_file):
        return (
            f"these look like train ids (0..{num_classes - 1} and 255), but the class file wants "
            "raw ids: set data.label_format: train_ids, or use the files with raw ids"
        )
    if len(unknown) > _MANY_VALUES:
        return "so many values come from a photograph, JPEG, or resizing with interpolation"
    if _counts_from_zero(class_file) and unknown - {255} == {num_classes} and 0 not in found:
        return (
            "the files seem to count from 1, the class file from 0: give the classes `ids: [1]` "
            f"to `ids: [{num_classes}]` there"
        )
    # A list in the file replaces the default, [255], so the line must repeat it.
    ignored = [*class_file.ignore_ids, *sorted(unknown)]
    if unknown == {_NO_DATA_ID}:
        return (
            f"{_NO_DATA_ID} means no data as a rule, and stands for a GDAL_NODATA such as -1: to "
            f"ignore it, list it there: `ignore_ids: {ignored}`"
        )
    return f"give them a class there, or, to ignore them, write `ignore_ids: {ignored}` there"


def looks_like_train_ids(found: Iterable[int], class_file: ClassFile) -> bool:
    """Whether all ids are 0..K-1 or 255, although the class file has other, larger ids."""
    ids = {i for i in found if i != 255}
    if not ids or _counts_from_zero(class_file):
        return False
    # A class with id 255 is the foreground of a 0/255 mask, not a raw id.
    last = max((i for c in class_file.classes for i in c.ids if i != 255), default=0)
    return max(ids) < class_file.num_classes <= last


def _counts_from_zero(class_file: ClassFile) -> bool:
    return all(c.ids == (i,) for i, c in enumerate(class_file.classes))
