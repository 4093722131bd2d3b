"""Where each class can be found: one pixel for each class in each tile of each label.

The tiles and centroids are those of NVIDIA's semantic-segmentation (datasets/uniform.py), with two
differences: tiles cover the whole label, the last ones in part, where NVIDIA leaves the rest out,
so that labels smaller than a tile have centroids too; and if the centroid of a class is no pixel of
it, as in a ring, the nearest one that is takes its place.

All labels are read. What was measured is kept in a file of the run by the SHA-256 of each label's
bytes, so that a label that has changed is measured again and never meets old numbers.
"""

import hashlib
import json
from collections.abc import Callable
from concurrent.futures import FIRST_EXCEPTION, Future, ThreadPoolExecutor, wait
from contextlib import closing
from dataclasses import dataclass
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

    def __post_init__(self) -> None:
        classes, firsts = np.unique(self.table[:, 0], return_index=True)
        parts = np.split(self.table[:, 1:], firsts[1:])
        object.__setattr__(self, "_by_class", dict(zip(classes.tolist(), parts, strict=True)))

    @property
    def by_class(self) -> dict[int, np.ndarray]:
        """(m, 3) int32 for each class that labels show: image, row, column."""
        return self._by_class

    def sha256(self) -> str:
        """The hash of the table; it does not depend on the machine."""
        return hashlib.sha256(self.table.astype("<i4").tobytes()).hexdigest()


def label_centroids(label: np.ndarray, tile_px: int) -> list[int]:
    """Class, row and column of each class in each tile of a label, (H, W) uint8, one after another.

    Tiles come row by row, the classes of a tile in order. Ignored pixels are no class.
    """
    found = []
    for top in range(0, label.shape[0], tile_px):
        for left in range(0, label.shape[1], tile_px):
            tile = label[top : top + tile_px, left : left + tile_px]
            counts = cv2.calcHist([tile], [0], None, [256], [0, 256]).ravel()[:IGNORE_INDEX]
            for class_id in np.flatnonzero(counts).tolist():
                row, column = _centroid(tile == class_id)
                found += [class_id, top + row, left + column]
    return found


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
    with closing(_Measuring(dataset, tile_px, known)) as work:
        done = False
        while not done:
            done = dist.run_on_rank0(lambda: work.wait(_POLL_S))
        table = np.empty((0, 4), np.int32)

        def take() -> int:
            nonlocal table
            labels, table = work.result()
            if len(table) and labels.keys() != known.keys() and keep(Centroids(table)):
                _write(path, key, labels)
            return len(table)

        num_rows = dist.run_on_rank0(take)
    if num_rows == 0:
        raise DataError(f"split {dataset.split!r}: data.class_uniform: no label shows any class")
    everywhere = torch.zeros(num_rows, 4, dtype=torch.int32, device=device)
    if dist.is_main():
        everywhere.copy_(torch.from_numpy(table))
    dist.broadcast_from_rank0([everywhere])
    return Centroids(everywhere.cpu().numpy())


class _Measuring:
    """Reads the labels of `dataset` in threads, from the first `wait` on. Call `close` at the end.

    known: what an earlier run has measured.
    """

    def __init__(self, dataset: SegDataset, tile_px: int, known: Measured) -> None:
        self._dataset, self._tile_px, self._known = dataset, tile_px, known
        self._pool = ThreadPoolExecutor(num_cores(), thread_name_prefix="centroids")
        self._futures: list[Future[tuple[str, list[int]]]] = []

    def wait(self, timeout_s: float) -> bool:
        """Whether all labels are measured; waits so long. DataError: one cannot be read."""
        if not self._futures:
            places = range(len(self._dataset.pairs))
            self._futures = [self._pool.submit(self._measure, place) for place in places]
        done, left = wait(self._futures, timeout_s, return_when=FIRST_EXCEPTION)
        for future in done:
            if error := future.exception():
                raise error
        return not left

    def result(self) -> tuple[Measured, np.ndarray]:
        """What was found in each label, and the table of `Centroids`."""
        found = [future.result() for future in self._futures]
        parts = [np.array(numbers, np.int32).reshape(-1, 3) for _, numbers in found]
        images = np.repeat(np.arange(len(parts), dtype=np.int32), [len(part) for part in parts])
        rows = np.concatenate(parts)
        table = np.column_stack([rows[:, 0], images, rows[:, 1:]])
        return dict(found), table[np.argsort(table[:, 0], kind="stable")]

    def close(self) -> None:
        """Ends the threads after their present label."""
        self._pool.shutdown(cancel_futures=True)

    def _measure(self, place: int) -> tuple[str, list[int]]:
        label = self._dataset.hashed_label(place)
        digest = label.digest.hex()
        if digest in self._known:
            return digest, self._known[digest]
        return digest, label_centroids(label.read(), self._tile_px)


def _key(dataset: SegDataset, tile_px: int) -> str:
    """What the centroids depend on besides the bytes of the labels."""
    text = f"{_METHOD} {tile_px} {dataset.label_format} {dataset.classes!r}"
    return hashlib.sha256(text.encode(errors="surrogateescape")).hexdigest()


def _read(path: Path, key: str) -> Measured:
    """What the file holds for `key`; nothing if it is missing, damaged or for another key."""
    try:
        found = files.parse_json(files.read_bytes(path))
        labels = found["labels"]
        if [found["key"], found["sha256"]] == [key, _hash_of(labels)]:
            return labels
    # The last two: other JSON than `_write` writes.
    except (OSError, ValueError, LookupError, TypeError):
        pass
    return {}


def _write(path: Path, key: str, labels: Measured) -> None:
    content = {"key": key, "sha256": _hash_of(labels), "labels": labels}
    try:
        files.write_atomic(path, json.dumps(content))
    except OSError as error:
        raise ExecutionError(f"{path}: cannot be written: {error.strerror}") from error


def _hash_of(labels: Measured) -> str:
    return hashlib.sha256(json.dumps(labels).encode()).hexdigest()
