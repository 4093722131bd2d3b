"""What label files hold, kind by kind: ids, colours, positions in the class file, or bands.

Training, checks, packs and outlines ask a format, and never which of them it is.
"""

from abc import ABC, abstractmethod
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np

from segtrain import plugins
from segtrain.data.read import raw_label
from segtrain.data.read.classes import ClassFile, Color, load_class_file
from segtrain.data.read.find import Window
from segtrain.data.read.image_formats import Info, read_palette
from segtrain.data.read.labels import (
    bands_to_presence,
    colors_to_train_ids,
    count_colors,
    count_ids,
    ids_to_train_ids,
    map_colors,
)
from segtrain.data.read.rims import blended_pixels, contacts_across
from segtrain.types import IGNORE_INDEX, Choices

Value = int | Color
"""A raw id, or an RGB colour where labels hold colours."""


@dataclass
class LabelCounts:
    """What one label holds, for checks; (K,) arrays are of the classes.

    size: (height, width). pixels: of each class; of what is none, those with a number in each band.
    num_valid: of all; None: as many as `pixels` and `absent` tell. absent: pixels that are known
    not to be of the class, where classes overlap. values: pixels of each raw id, where there are
    some. unknown: of each value that the class file does not name. blended, thin, contacts: see
    `SplitScan`.
    palette: the colours of the ids that occur; empty where they say nothing.
    """

    size: tuple[int, int]
    pixels: np.ndarray
    num_valid: int | None = None
    absent: np.ndarray | int = 0
    values: Mapping[int, int] = field(default_factory=dict)
    unknown: dict[Value, int] = field(default_factory=dict)
    blended: np.ndarray | int = 0
    thin: np.ndarray | int = 0
    contacts: np.ndarray | int = 0
    palette: Mapping[int, Color] = field(default_factory=dict)


class LabelFormat(ABC):
    """How label files of a kind become labels.

    task: that of which such labels are. has_classes: whether a pixel may be of a class.
    keeps: whether a pixel has the same numbers in a mirrored, scaled or turned image, unlike that
        of a vector.
    told_by: what they are read by, "ids" or "colors" of the class file; else neither.
    needs_colors: whether the class file has to give the colour of each class.
    overlapping: whether a pixel may have several classes.
    packs: whether a pack takes them, which has one byte a pixel.
    least_shown: the fewest classes that labels have to show, or there is nothing to learn.
    """

    task = "semantic"
    has_classes = keeps = True
    told_by = "ids"
    needs_colors = False
    overlapping = False
    packs = False
    least_shown = 2

    def class_file(self, name_or_path: str) -> ClassFile:
        """The class file of such labels, as `load_class_file` finds it."""
        given = {"needs_colors": self.needs_colors, "overlapping": self.overlapping}
        return load_class_file(name_or_path, **given)

    @abstractmethod
    def problem(self, info: Info, num_classes: int) -> str:
        """Why a label with this header cannot be read; empty if it can."""

    @abstractmethod
    def read(
        self,
        path: str | Path,
        classes: ClassFile,
        window: Window | None = None,
        *,
        content: bytes | None = None,
    ) -> np.ndarray:
        """The label, (H, W) or (H, W, K), uint8 or float32, of the type that `ignored` gives.

        Train ids, or what the task trains on.

        window: the part to read of a raster; None: the whole label.
        content: the bytes of the file; None: they are to be read.

        Raises:
            DataError: also for values that the class file does not name; it lists each with its
                number of pixels.
        """

    @abstractmethod
    def count(self, path: Path, classes: ClassFile, window: Window | None = None) -> LabelCounts:
        """What a label holds, also what `read` refuses; DataError: it cannot be read at all."""

    def ignored(self, size: tuple[int, int], classes: ClassFile) -> np.ndarray:
        """A label of (height, width) in which no pixel counts."""
        return np.full(size, IGNORE_INDEX, np.uint8)

    def meant(self, classes: ClassFile) -> ClassFile:
        """The class file with the ids that these labels hold; for reading only."""
        return classes

    def ignoring(self, value: float | None, classes: ClassFile) -> tuple["LabelFormat", ClassFile]:
        """What reads these labels with `value` ignored, even if a class has it; None: as it is."""
        if value is None:
            return self, classes
        # A class without an id stays: the positions of those behind it are their train ids.
        kept = (replace(c, ids=tuple({*c.ids} - {value})) for c in classes.classes)
        ignored = *classes.ignore_ids, int(value)
        return self, replace(classes, classes=tuple(kept), ignore_ids=ignored)


class Ids(LabelFormat):
    """One channel of raw ids, as the class file gives them."""

    packs = True

    def problem(self, info: Info, num_classes: int) -> str:
        """See `LabelFormat`."""
        return raw_label.problem_of_ids(info)

    def read(
        self,
        path: str | Path,
        classes: ClassFile,
        window: Window | None = None,
        *,
        content: bytes | None = None,
    ) -> np.ndarray:
        """(H, W) uint8 train ids."""
        raw = raw_label.read_raw_label(path, window, content=content)
        return ids_to_train_ids(raw, path, self.meant(classes))

    def count(self, path: Path, classes: ClassFile, window: Window | None = None) -> LabelCounts:
        """Each value, and where it may come from resizing."""
        label = raw_label.read_raw_label(path, window)
        values = count_ids(label)
        arrays = np.zeros((4, classes.num_classes), np.int64)
        pixels, blended, thin, contacts = arrays
        # Resizing with interpolation leaves wrong ids between two others: in wide rims, or in thin
        # lines.
        on_rims, in_lines = (count_ids(label[blended_pixels(label, side)]) for side in (5, 3))
        across = contacts_across(label)
        train_id_of, unknown = self.meant(classes).train_id_of, {}
        for raw_id, count in values.items():
            train_id = train_id_of.get(raw_id)
            if train_id is None:
                unknown[raw_id] = count
            elif train_id < classes.num_classes:
                pixels[train_id] += count
                blended[train_id] += on_rims.get(raw_id, 0)
                thin[train_id] += in_lines.get(raw_id, 0)
                contacts[train_id] += across[raw_id]
        colors, palette = read_palette(path), {}
        # In a grey ramp each colour only repeats its index.
        if any(color != (i, i, i) for i, color in enumerate(colors)):
            palette = {i: colors[i] for i in sorted(values) if i < len(colors)}
        return LabelCounts(
            label.shape,
            pixels,
            values=values,
            unknown=unknown,
            blended=blended,
            thin=thin,
            contacts=contacts,
            palette=palette,
        )


class TrainIds(Ids):
    """Positions in the class file, and 255 to ignore; predictions have the ids of the file."""

    told_by = ""

    def meant(self, classes: ClassFile) -> ClassFile:
        """Each position is the id."""
        by_position = tuple(replace(c, ids=(i,)) for i, c in enumerate(classes.classes))
        return replace(classes, classes=by_position, ignore_ids=(IGNORE_INDEX,))

    def ignoring(self, value: float | None, classes: ClassFile) -> tuple[LabelFormat, ClassFile]:
        """Positions are ids then."""
        return Ids().ignoring(value, self.meant(classes))


class Colors(LabelFormat):
    """The exact colours of the classes."""

    told_by = "colors"
    needs_colors = packs = True

    def problem(self, info: Info, num_classes: int) -> str:
        """See `LabelFormat`."""
        return raw_label.problem_of_colors(info)

    def read(
        self,
        path: str | Path,
        classes: ClassFile,
        window: Window | None = None,
        *,
        content: bytes | None = None,
    ) -> np.ndarray:
        """(H, W) uint8 train ids."""
        return colors_to_train_ids(
            raw_label.read_colors(path, window, content=content), path, classes
        )

    def count(self, path: Path, classes: ClassFile, window: Window | None = None) -> LabelCounts:
        """The classes, and the colours that none has."""
        colors = raw_label.read_colors(path, window)
        label = map_colors(colors, classes)
        # -1 is a colour that the class file does not name, which `unknown` counts.
        at_blend = label[blended_pixels(colors) & (label >= 0)]
        pixels, blended = (
            np.bincount(ids, minlength=256)[: classes.num_classes]
            for ids in (label[label >= 0], at_blend)
        )
        unknown = count_colors(colors[label < 0])
        return LabelCounts(label.shape, pixels, unknown=unknown, blended=blended)

    def ignoring(self, value: float | None, classes: ClassFile) -> tuple[LabelFormat, ClassFile]:
        """A colour marks no pixel by a number."""
        return self, classes


class Bands(LabelFormat):
    """A band for each class, in the order of the class file: 1, or its ids, where it is."""

    task, overlapping, least_shown = "multilabel", True, 1

    def problem(self, info: Info, num_classes: int) -> str:
        """See `LabelFormat`."""
        return raw_label.problem_of_bands(info, num_classes)

    def read(
        self,
        path: str | Path,
        classes: ClassFile,
        window: Window | None = None,
        *,
        content: bytes | None = None,
    ) -> np.ndarray:
        """(H, W, K) uint8, see `ClassFile.overlapping`."""
        bands = raw_label.read_bands(path, classes.num_classes, window, content=content)
        return bands_to_presence(bands, path, classes)

    def count(self, path: Path, classes: ClassFile, window: Window | None = None) -> LabelCounts:
        """Where each class is, and where it is not."""
        label = self.read(path, classes, window)
        present, absent = ((label == value).sum((0, 1)) for value in (1, 0))
        return LabelCounts(label.shape[:2], present, absent=absent)

    def ignored(self, size: tuple[int, int], classes: ClassFile) -> np.ndarray:
        """(h, w, K)."""
        return np.full((*size, classes.num_classes), IGNORE_INDEX, np.uint8)


LABEL_FORMATS: Choices[type[LabelFormat]] = Choices(
    {"ids": Ids, "colors": Colors, "train_ids": TrainIds, "bands": Bands}
)
"""`data.label_format`: what each name stands for."""


def label_format_of(name: str) -> LabelFormat:
    """The format of this name, one of segtrain's own or of a plugin."""
    return plugins.choose("label_format", name, LABEL_FORMATS)()


def told_by(name: str) -> str:
    """`LabelFormat.told_by` of a format, also of one whose plugin is not imported."""
    # The stand-in of a plugin that is not imported is a function without `told_by`.
    plugin = plugins.registered("label_format", name)
    return getattr(LABEL_FORMATS.get(name) or (plugin and plugin.made), "told_by", "")
