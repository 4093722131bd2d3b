"""A split of a data set as a sequence of images with their labels."""

from collections.abc import Collection, Sequence
from dataclasses import KW_ONLY, dataclass

import numpy as np

from segtrain.config import DataConfig
from segtrain.data.class_file import load_class_file
from segtrain.data.classes import ClassFile
from segtrain.data.decode import read_image, read_label
from segtrain.data.layouts import list_split
from segtrain.data.listing import Pair
from segtrain.errors import DataError
from segtrain.text import printable
from segtrain.types import IGNORE_INDEX


@dataclass(eq=False)
class SegDataset(Sequence[tuple[np.ndarray, np.ndarray]]):
    """Images and labels, read from their files at each access.

    Item i is (image, label): (H, W, 3) uint8 RGB and (H, W) uint8 train ids with 255 for ignored
    pixels. The object holds paths only, so it is cheap to send to loader processes.
    `warnings`: lines that training and evaluation show when they start. `may_exclude`: whether
    `data.train_exclude` concerns this split.

    Raises:
        DataError: on access; the file is missing, damaged or does not fit, named with its path.
    """

    pairs: list[Pair]
    classes: ClassFile
    _: KW_ONLY
    split: str
    label_format: str = "ids"
    warnings: Sequence[str] = ()
    may_exclude: bool = False

    def __len__(self) -> int:
        return len(self.pairs)

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        pair = self.pairs[index]
        try:
            image = read_image(pair.image)
        except DataError as error:
            raise DataError(f"{error}{self._way_out(pair)}") from error
        label = read_label(pair.label, self.classes, self.label_format)
        if problem := size_problem(pair, image.shape[:2], label.shape):
            raise DataError(problem)
        return image, label

    def image(self, index: int) -> np.ndarray:
        """The image of item `index` alone; its label is not opened."""
        return read_image(self.pairs[index].image)

    def _way_out(self, pair: Pair) -> str:
        if not self.may_exclude:
            return ""
        return f"; replace it, or leave it out: data.train_exclude: [{printable(pair.name)}]"

    def name(self, index: int) -> str:
        """The name of image `index`: unique in the split, a relative path without suffix."""
        return self.pairs[index].name


@dataclass(eq=False)
class UnlabelledDataset(SegDataset):
    """Images without labels: every pixel of item i's label is ignored."""

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image = read_image(self.pairs[index].image)
        return image, np.full(image.shape[:2], IGNORE_INDEX, np.uint8)


def open_dataset(
    data: DataConfig, split: str, *, hidden: Collection[str] = (), labelled: bool = True
) -> SegDataset:
    """The images and labels of `split`, listed and complete, not yet opened.

    labelled: False for a split without labels.

    hidden: "data.classes" for a class file, "data.eval_split" for a list file, if messages must
        show none of its lines: a checkpoint names it, not the user.

    Raises:
        ConfigError: no such class file, or it is wrong.
        DataError: no such split, no images, or files missing, all of them counted.
    """
    classes = load_class_file(
        data.classes, label_format=data.label_format, quoted="data.classes" not in hidden
    )
    quoted = "data.eval_split" not in hidden
    listing = list_split(data, split, quoted=quoted, labelled=labelled)
    return (SegDataset if labelled else UnlabelledDataset)(
        listing.pairs,
        classes,
        split=split,
        label_format=data.label_format,
        warnings=listing.warnings_of_start(),
        may_exclude=split == data.train_split,
    )


def size_problem(pair: Pair, image: tuple[int, ...], label: tuple[int, ...]) -> str:
    """Why an image and a label of these sizes, (height, width), do not fit; empty if they do."""
    if tuple(image) == tuple(label):
        return ""
    return (
        f"{printable(pair.label)}: label {label[0]}x{label[1]}, image {printable(pair.image)} "
        f"{image[0]}x{image[1]}: sizes (height x width) must be equal; "
        "EXIF orientation is ignored"
    )
