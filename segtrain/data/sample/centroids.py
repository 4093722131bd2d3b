"""Where each class can be found: one pixel for each class in each tile of each label.

After NVIDIA's semantic-segmentation (datasets/uniform.py); data/README.md says what differs. What
was measured is kept in a file of the run by the SHA-256 of each label, so that a label that has
changed is measured again.
"""

import hashlib
import json
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from functools import cached_property, partial
from pathlib import Path

import cv2
import numpy as np
import torch

from segtrain import files
from segtrain.data.read.dataset import SegDataset
from segtrain.distributed import collectives as dist
from segtrain.distributed.machine import num_cores
from segtrain.errors import DataError, ExecutionError
from segtrain.types import IGNORE_INDEX

# A part of the key of the file: another way to measure needs another number.
_METHOD = 1
# The side of a tile: NVIDIA's default, as its recipes for Cityscapes have it.
TILE_PX = 1024
# Ranks meet at least this often, so that none waits for rank 0 longer than train.timeout_s.
_POLL_S = 1.0

Measured = dict[str, list[int]]
"""`label_centroids` of labels, by the SHA-256 of their bytes."""


@dataclass(frozen=True, eq=False)
class Centroids:
    """The centroids of a split.

    table: (n, 4) int32: class, image, row, column, sorted by class and then by image.
    """

    table: np.ndarray

    @cached_property
    def by_class(self) -> dict[int, np.ndarray]:
        """(m, 3) int32 for each class that labels show: image, row, column."""
        classes, firsts = np.unique(self.table[:, 0], return_index=True)
        parts = np.split(self.table[:, 1:], firsts[1:])
        return dict(zip(classes.tolist(), parts, strict=True))

    def sha256(self) -> str:
        """The hash of the table; it does not depend on the machine."""
        return hashlib.sha256(self.table.astype("<i4").tobytes()).hexdigest()


def label_centroids(label: np.ndarray, tile_px: int) -> list[int]:
    """Class, row and column of each class in each tile of a label, (H, W) uint8, one after another.

    Tiles come row by row, the classes of a tile in order. Ignored pixels are no class.
    """
    numbers = []
    for top in range(0, label.shape[0], tile_px):
        for left in range(0, label.shape[1], tile_px):
            tile = label[top : top + tile_px, left : left + tile_px]
            counts = cv2.calcHist([tile], [0], None, [256], [0, 256]).ravel()[:IGNORE_INDEX]
            for class_id in np.flatnonzero(counts).tolist():
                row, column = _centroid(tile == class_id)
                numbers += [class_id, top + row, left + column]
    return numbers


def _centroid(mask: np.ndarray) -> tuple[int, int]:
    """The pixel of `mask` (H, W) nearest to its centroid, which is rounded down: row, column."""
    ones = mask.view(np.uint8)
    # NumPy takes ten times as long for the sums of rows and columns.
    rows = cv2.reduce(ones, 1, cv2.REDUCE_SUM, dtype=cv2.CV_32S).ravel().astype(np.int64)
    columns = cv2.reduce(ones, 0, cv2.REDUCE_SUM, dtype=cv2.CV_32S).ravel().astype(np.int64)
    total = int(rows.sum())
    # Sums of whole numbers: the same on every machine.
    row = int(rows @ np.arange(len(rows))) // total
    column = int(columns @ np.arange(len(columns))) // total
    return (row, column) if mask[row, column] else _nearest(mask, row, column)


def _nearest(mask: np.ndarray, row: int, column: int) -> tuple[int, int]:
    """The pixel of `mask` nearest to this one, the upper left one of several."""
    radius = 16
    while True:
        top, left = max(0, row - radius), max(0, column - radius)
        ys, xs = np.nonzero(mask[top : row + radius + 1, left : column + radius + 1])
        squares = (ys + (top - row)) ** 2 + (xs + (left - column)) ** 2
        # What is outside of this window lies farther away than its radius.
        if len(squares) and (squares.min() <= radius**2 or radius >= max(mask.shape)):
            nearest = int(squares.argmin())
            return top + int(ys[nearest]), left + int(xs[nearest])
        radius *= 4


def measure_centroids(
    dataset: SegDataset,
    tile_px: int,
    path: Path,
    *,
    device: torch.device,
    keep: Callable[[Centroids], bool],
) -> Centroids:
    """The centroids of all labels of `dataset`, the same on every rank (collective).

    Rank 0 reads the labels by as many threads as there are cores, and measures those that the file
    at `path` does not know.

    device: on which the ranks exchange tensors.
    keep: whether to write that file for these centroids.

    Raises:
        DataError: a label cannot be read, or no label shows a class.
        ExecutionError: the file cannot be written.
    """
    key = _key(dataset, tile_px)
    known = _read(path, key) if dist.is_main() else {}
    # Other ranks have nothing to measure, and go straight to the loop in which all meet.
    indices = range(len(dataset)) if dist.is_main() else ()
    pool = ThreadPoolExecutor(num_cores(), thread_name_prefix="centroids")
    measure = partial(_measure, dataset, tile_px, known)
    labels = [pool.submit(measure, index) for index in indices]
    try:
        while not dist.run_on_rank0(lambda: _are_done(labels)):
            pass
    finally:
        pool.shutdown(cancel_futures=True)
    by_label = [label.result() for label in labels]
    table = _table([numbers for _, numbers in by_label])

    def write() -> int:
        measured = dict(by_label)
        # Nothing is written where every label was known already.
        if len(table) and measured.keys() != known.keys() and keep(Centroids(table)):
            content = {"key": key, "sha256": _hash_of(measured), "labels": measured}
            with files.os_errors_as(ExecutionError, path, "cannot be written"):
                files.write_atomic(path, json.dumps(content))
        return len(table)

    # Every rank learns the number of rows: a broadcast needs tensors of one shape.
    num_rows = dist.run_on_rank0(write)
    if num_rows == 0:
        raise DataError(f"split {dataset.split!r}: data.class_uniform: no label shows any class")
    everywhere = torch.zeros(num_rows, 4, dtype=torch.int32, device=device)
    if dist.is_main():
        everywhere.copy_(torch.from_numpy(table))
    dist.broadcast_from_rank0([everywhere])
    return Centroids(everywhere.cpu().numpy())


def _measure(
    dataset: SegDataset, tile_px: int, known: Measured, index: int
) -> tuple[str, list[int]]:
    label = dataset.hashed_label(index)
    digest, window = label.digest.hex(), dataset.pairs[index].window
    # The pixels of windows are hashed: those of 800x200 px of one class are those of 200x800.
    digest += f" {window.height}x{window.width}" if window else ""
    # A label without classes is known by an empty list.
    numbers = known[digest] if digest in known else label_centroids(label.read(), tile_px)
    return digest, numbers


def _are_done(labels: Sequence[Future]) -> bool:
    """Whether all labels are measured, after at most _POLL_S; DataError: one cannot be read."""
    done, left = wait(labels, _POLL_S, return_when=FIRST_EXCEPTION)
    for label in done:
        label.result()
    return not left


def _table(by_label: Sequence[list[int]]) -> np.ndarray:
    """The table of `Centroids` from what `label_centroids` found in each label."""
    parts = [np.array(numbers, np.int32).reshape(-1, 3) for numbers in by_label]
    images = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
    rows = np.concatenate([np.empty((0, 3), np.int32), *parts])
    table = np.column_stack([rows[:, 0], images, rows[:, 1:]])
    return table[np.argsort(table[:, 0], kind="stable")]


def _key(dataset: SegDataset, tile_px: int) -> str:
    """What the centroids depend on besides the bytes of the labels."""
    text = f"{_METHOD} {tile_px} {dataset.label_format} {dataset.classes!r}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _read(path: Path, key: str) -> Measured:
    """What the file holds for `key`; nothing if it is missing, damaged or for another key."""
    with suppress(OSError, ValueError, LookupError, TypeError):  # also JSON that is not ours
        content = files.parse_json(files.read_bytes(path))
        if [content["key"], content["sha256"]] == [key, _hash_of(content["labels"])]:
            return content["labels"]
    return {}


def _hash_of(labels: Measured) -> str:
    return hashlib.sha256(json.dumps(labels).encode()).hexdigest()
