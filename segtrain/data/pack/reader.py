"""A split of a pack as a data set: rows of a memory map."""

import hashlib
import math
import mmap
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from segtrain.data.pack.index import REPAIR, PackedImage, Shard, check_shard, checksum
from segtrain.data.read.dataset import HashedLabel, SegDataset
from segtrain.data.read.image import ImageForm, ignore_missing
from segtrain.errors import DataError
from segtrain.files import open_regular, os_errors_as
from segtrain.text import printable
from segtrain.types import IGNORE_INDEX


@dataclass(eq=False)
class Shards:
    """The shards of a pack, mapped when they are first read. Sent to a process, it maps anew."""

    directory: Path
    shards: Sequence[Shard]
    _maps: dict[int, mmap.mmap] = field(default_factory=dict, init=False, repr=False)

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_maps": {}}

    def rows(self, image: PackedImage) -> np.ndarray:
        """(H, bytes of a row) uint8, read-only: a view of the file.

        Raises:
            DataError: the shard is missing, cannot be read or has another size.
        """
        whole = self._maps.get(image.shard)
        if whole is None:
            # Rows behind the end of a file would kill this process (SIGBUS).
            check_shard(self.directory, self.shards[image.shard])
            with os_errors_as(DataError), open_regular(self.path(image)) as file:
                whole = mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)
            self._maps[image.shard] = whole
        flat = np.frombuffer(whole, np.uint8, math.prod(image.shape), image.offset)
        return flat.reshape(image.shape)

    def check(self, image: PackedImage) -> None:
        """Raises DataError if the rows do not have their CRC."""
        if checksum(self.rows(image)) != image.crc:
            what = f"damaged: image {printable(image.name)} is not what was packed"
            raise DataError(f"{printable(self.path(image))}: {what}; {REPAIR}")

    def path(self, image: PackedImage) -> Path:
        """The shard that holds `image`."""
        return self.directory / self.shards[image.shard].name


@dataclass(eq=False)
class PackedDataset(SegDataset):
    """A split of a pack; `pairs` are the files that it was made from.

    source_is_there: whether the files are there, too.

    Raises:
        DataError: on access; a shard is missing, cut off or, at the first access to an image,
            damaged.
    """

    _: KW_ONLY
    shards: Shards
    images: Sequence[PackedImage]
    source_is_there: bool = False

    is_packed = True

    def __post_init__(self) -> None:
        # A byte for each image whose CRC was compared. Forked workers share it, others do not.
        self._seen = mmap.mmap(-1, max(1, len(self.images)))

    def __getstate__(self) -> dict[str, Any]:
        return {key: value for key, value in self.__dict__.items() if key != "_seen"}

    def __setstate__(self, state: dict[str, Any]) -> None:
        self.__dict__.update(state)
        self.__post_init__()

    def __getitem__(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        image, label = self.view(index)
        return ignore_missing(image.copy(), label.copy(), self.form)

    def view(self, index: int) -> tuple[np.ndarray, np.ndarray]:
        """As item `index`, but read-only and not contiguous: only rows that are used are read."""
        self.form.check()
        packed = self.images[index]
        rows = self.shards.rows(packed)
        # At the first access only: the CRC reads the whole image, and a crop needs some of its
        # rows.
        if not self._seen[index]:
            self.shards.check(packed)
            self._seen[index] = 1
        image, label = split_rows(rows, packed.width, self.form)
        return image, label if self.labelled else np.full(label.shape, IGNORE_INDEX, np.uint8)

    def size(self, index: int) -> tuple[int, int]:
        """The (height, width) of image `index`."""
        return self.images[index].height, self.images[index].width

    def source_bytes(self, index: int) -> list[int]:
        """Sizes of the files of image and label when they were packed."""
        return [file.num_bytes for file in self.images[index].files]

    def hashed_label(self, index: int) -> HashedLabel:
        """The label of item `index`, not yet read, with the hash of the file it was made from."""
        digest = bytes.fromhex(self.images[index].label.sha256)
        return HashedLabel(digest, lambda: self.view(index)[1].copy())

    def content_hash(self) -> str:
        """The hash of the CRCs: packs that were made by other decoders differ."""
        return hashlib.sha256(repr([image.crc for image in self.images]).encode()).hexdigest()


def row_bytes(width: int, form: ImageForm) -> int:
    """Of a packed row: the pixels of the image, then the train ids, up to a whole sample."""
    size = form.dtype.itemsize
    # In samples. Minus twice rounds the bytes of the label up to whole ones.
    return (width * form.channels - (-width // size)) * size


def packed_rows(image: np.ndarray, label: np.ndarray, form: ImageForm) -> np.ndarray:
    """The rows of an image (H, W, C) with its label (H, W) uint8, (H, `row_bytes`) uint8."""
    height, width = label.shape
    rows = np.zeros((height, row_bytes(width, form)), np.uint8)
    # Views of the empty rows are filled: writing and reading share one layout.
    packed_image, packed_label = split_rows(rows, width, form)
    packed_image[:], packed_label[:] = image, label
    return rows


def split_rows(rows: np.ndarray, width: int, form: ImageForm) -> tuple[np.ndarray, np.ndarray]:
    """Image (H, W, C) and label (H, W) in packed rows, as views."""
    dtype = form.dtype.newbyteorder("<")
    end = width * form.channels * dtype.itemsize
    image = rows[:, :end].view(dtype).reshape(len(rows), width, form.channels)
    return image, rows[:, end : end + width]
