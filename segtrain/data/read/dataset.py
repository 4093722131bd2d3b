"""A split of a data set as a sequence of images with their labels."""

import hashlib
import os
from collections.abc import Callable, Sequence
from dataclasses import KW_ONLY, dataclass
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np

from segtrain.data.read.classes import ClassFile
from segtrain.data.read.decode import read_bytes
from segtrain.data.read.find import Pair
from segtrain.data.read.image import RGB, ImageForm, ignore_missing, read_image
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.label_formats import LabelFormat, label_format_of
from segtrain.errors import DataError
from segtrain.files import os_errors_as
from segtrain.text import printable


class HashedLabel(NamedTuple):
    """A label and its hash, which can be compared before the label is decoded."""

    digest: bytes  # the SHA-256 of its file; for a window of a raster, of its train ids
    read: Callable[[], np.ndarray]  # gives the label, (H, W) uint8 train ids


@dataclass(eq=False)
class SegDataset(Sequence[tuple[np.ndarray, np.ndarray]]):
    """Images and labels, read from their files at each access.

    Item i is (image, label). The image is (H, W, C) as `form` says, for most sets uint8 RGB. The
    label is (H, W) uint8 train ids, with 255 for ignored pixels, or (H, W, K) where classes
    overlap, or what a plugin reads; pixels of which the image has no value (NaN) are ignored, too.
    The object holds paths only, so it is cheap to send to loader processes.

    Args:
        warnings: lines that training and evaluation show when they start.
        may_exclude: whether `data.train_exclude` concerns this split.
        labelled: whether there are labels; if not, every pixel is ignored.

    Raises:
        DataError: on access; the file is missing, damaged or does not fit, named with its path.
    """

    pairs: Sequence[Pair]
    classes: ClassFile
    _: KW_ONLY
    split: str
    form: ImageForm = RGB
    label_format: str = "ids"
    warnings: Sequence[str] = ()
    may_exclude: bool = False
    labelled: bool = True

    # True in the subclass `PackedDataset`: its files were checked when the pack was made.
    is_packed = False

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        return ignore_missing(*self.view(index), self.form)

    def view(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """Item `index` before `ignore_missing`, for a caller that takes a part of it, as a crop.

        Pixels without a value are still NaN, and their labels are not 255 yet. The arrays may be
        read-only and not contiguous.
        """
        self.form.check()
        pair, labels = self.pairs[index], self.labels
        try:
            image = read_image(pair.images, self.form, pair.window)
        except DataError as error:
            # If its folder is gone, so are all others: leaving out this one would not help.
            if not (self.may_exclude and Path(pair.image).parent.is_dir()):
                raise
            repair = f"replace it, or leave it out: data.train_exclude: [{printable(pair.name)}]"
            raise DataError(f"{error}; {repair}") from error
        if not self.labelled:
            return image, labels.ignored(image.shape[:2], self.classes)
        label = labels.read(pair.label, self.classes, pair.window)
        # The format of a plugin may return anything: its own `ignored` says which type and bands
        # are right.
        like = labels.ignored((1, 1), self.classes)
        if (label.dtype, label.shape[2:]) != (like.dtype, like.shape[2:]):
            bands = "".join(f", {size}" for size in like.shape[2:])
            what = f"{label.dtype} {label.shape}, where {like.dtype} (H, W{bands}) is asked for"
            raise DataError(f"{printable(pair.label)}: {self.label_format} gives {what}")
        if problem := size_problem(pair, image.shape[:2], label.shape[:2]):
            raise DataError(problem)
        return image, label

    def size(self, index: int) -> tuple[int, int]:
        """The (height, width) of image `index`; DataError: its header cannot be read."""
        pair = self.pairs[index]
        if pair.window is not None:
            return pair.window[2:]
        return read_info(pair.image).size

    def source_bytes(self, index: int) -> list[int]:
        """Sizes of the files of image and label; DataError: a file is gone."""
        pair = self.pairs[index]
        with os_errors_as(DataError):
            return [os.stat(path).st_size for path in (*pair.images, pair.label)]

    def hashed_label(self, index: int) -> HashedLabel:
        """The label of item `index`, with its hash; DataError: it is unreadable."""
        pair = self.pairs[index]
        read = partial(self.labels.read, pair.label, self.classes)
        if pair.window is not None:
            # Windows share a file, so its hash would be the same for all of them.
            label = read(pair.window)
            return HashedLabel(hashlib.sha256(label).digest(), lambda: label)
        content = read_bytes(pair.label)
        return HashedLabel(hashlib.sha256(content).digest(), partial(read, content=content))

    @property
    def labels(self) -> LabelFormat:
        """What the label files hold."""
        return label_format_of(self.label_format)

    @property
    def label_bytes(self) -> int:
        """Those of a pixel of a label."""
        return self.labels.ignored((1, 1), self.classes).nbytes

    def content_hash(self) -> str:
        """The hash of all pixels; empty where it is not known, which is so except in a pack."""
        return ""

    @property
    def names(self) -> list[str]:
        """The names of all images."""
        return [pair.name for pair in self.pairs]

    def name(self, index: int) -> str:
        """The name of image `index`: unique in the split, a relative path without suffix."""
        return self.pairs[index].name


def size_problem(pair: Pair, image: tuple[int, ...], label: tuple[int, ...]) -> str:
    """Why an image and a label of these sizes, (height, width), do not fit; empty if they do."""
    if tuple(image) == tuple(label):
        return ""
    return (
        f"{printable(pair.label)}: label {label[0]}x{label[1]}, image {printable(pair.image)} "
        f"{image[0]}x{image[1]}: sizes (height x width) must be equal; "
        "EXIF orientation is ignored"
    )
