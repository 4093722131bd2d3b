"""What a data set consists of, for checkpoints: a run must not go on with other data unnoticed.

Of a pack it is that of the files which were packed, so a run goes on from files to a pack and back.
Hashed are the number, order, names (relative to data.root) and sizes in bytes of the files, and the
contents of the labels. Hashing images would read the whole data set at every start: an image that
was replaced by one with the same name and size goes unnoticed.
"""

import hashlib
import os
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from itertools import zip_longest
from pathlib import Path
from threading import Event

from pydantic import ConfigDict, NonNegativeInt, PositiveInt, TypeAdapter

from segtrain.data.read.concurrent import IO_THREADS, prefetch
from segtrain.data.read.dataset import SegDataset
from segtrain.text import printable

# A few kilobytes in a checkpoint, and still precise enough to find the file that differs.
_MAX_HASHES = 64
# They mostly wait for the disk: on a network drive about 1 ms per file.
_LABEL_THREADS = 8


@dataclass(frozen=True)
class SplitFingerprint:
    """One split. Its pairs are cut into blocks of neighbours; every block has one hash of a kind.

    pairs_per_hash: the smallest power of two that gives at most 64 hashes.
    files: hashes of the names and sizes of images and labels.
    labels: hashes of the contents of the labels; None if these have not been read.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    num_pairs: NonNegativeInt
    pairs_per_hash: PositiveInt
    files: tuple[str, ...]
    labels: tuple[str, ...] | None


@dataclass(frozen=True)
class DataFingerprint:
    """Both splits of an experiment."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    train: SplitFingerprint
    eval: SplitFingerprint

    @property
    def splits(self) -> tuple[SplitFingerprint, SplitFingerprint]:
        """For training and for evaluation."""
        return self.train, self.eval


_ADAPTER = TypeAdapter(DataFingerprint)


def fingerprint_to_json(fingerprint: DataFingerprint) -> str:
    """Text for a checkpoint."""
    # Indented, because `torch_file` refuses long text without blanks.
    return _ADAPTER.dump_json(fingerprint, indent=1).decode()


def fingerprint_from_json(text: str) -> DataFingerprint:
    """Raises pydantic.ValidationError if `text` is no fingerprint."""
    return _ADAPTER.validate_json(text)


def hash_files(dataset: SegDataset, root: str) -> SplitFingerprint:
    """The fingerprint of `dataset` in data.root, without the contents of its labels.

    Raises:
        DataError: a file is gone, or its size cannot be read.
    """
    size = 1
    while size * _MAX_HASHES < len(dataset):
        size *= 2
    # The join adds a slash at the end.
    prefix = os.fsencode(os.path.join(str(Path(os.path.expanduser(root))), ""))

    def names_and_sizes(index: int) -> bytes:
        pair = dataset.pairs[index]
        files = zip(dataset.source_bytes(index), (*pair.images, pair.label), strict=True)
        named = ((num_bytes, os.fsencode(path).removeprefix(prefix)) for num_bytes, path in files)
        return b"".join(b"%d %s\0" % entry for entry in named)

    hash_block = partial(_hash_block, names_and_sizes)
    files = tuple(prefetch(hash_block, _blocks(len(dataset), size), IO_THREADS))
    return SplitFingerprint(len(dataset), size, files, None)


def _blocks(length: int, size: int) -> list[range]:
    return [range(length)[start : start + size] for start in range(0, length, size)]


def _hash_block(content: Callable[[int], bytes], block: range) -> str:
    digest = hashlib.sha256()
    for index in block:
        digest.update(content(index))
    return digest.hexdigest()[:16]


class LabelHashing:
    """Hashes the contents of labels in threads beside other work. Call `close` at the end.

    splits: data sets, each with its pairs per hash.
    """

    def __init__(self, splits: Sequence[tuple[SegDataset, int]]) -> None:
        self._stopped = Event()
        self._pool = ThreadPoolExecutor(_LABEL_THREADS, thread_name_prefix="hash-labels")
        self._splits = [
            [
                self._pool.submit(_hash_block, partial(self._digest, dataset), block)
                for block in _blocks(len(dataset), size)
            ]
            for dataset, size in splits
        ]

    def result(self, timeout_s: float | None = None) -> list[tuple[str, ...]] | None:
        """The hashes of each split; None if they take longer than `timeout_s`.

        Raises:
            DataError: a label cannot be read.
        """
        futures = [future for split in self._splits for future in split]
        # Returns at the first error too: it is raised before the other labels are hashed.
        _, left = wait(futures, timeout_s, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done() and (error := future.exception()):
                raise error
        return None if left else [tuple(f.result() for f in split) for split in self._splits]

    def close(self) -> None:
        """Ends the threads after their present file. Otherwise the process could not exit."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)

    def _digest(self, dataset: SegDataset, index: int) -> bytes:
        # A block that runs while `close` is called ends after its file; nobody asks for its hash.
        return b"" if self._stopped.is_set() else dataset.hashed_label(index).digest


def file_difference(before: SplitFingerprint, now: SplitFingerprint, dataset: SegDataset) -> str:
    """How the names, sizes or order of the files differ from `before`; empty if they do not.

    now: the fingerprint of `dataset`.
    """
    if before.num_pairs != now.num_pairs:
        return f"split {dataset.split}: {before.num_pairs} images there, {now.num_pairs} now"
    differing = _differing(before.files, now.files)
    if not differing:
        return ""
    where = _files_of_block([pair.image for pair in dataset.pairs], differing[0], now)
    what = "names, sizes or order of the files differ"
    return f"split {dataset.split}: {what}; the first difference is {where}"


def label_difference(before: SplitFingerprint, labels: Sequence[str], dataset: SegDataset) -> str:
    """How the contents of the labels differ from `before`; empty if they do not or are unknown.

    before: of the same files, by names and sizes.
    labels: the hashes now.
    """
    differing = [] if before.labels is None else _differing(before.labels, labels)
    if not differing:
        return ""
    paths = [pair.label for pair in dataset.pairs]
    where = _files_of_block(paths, differing[0], before)
    many = f"{len(differing)} " if before.pairs_per_hash == 1 else ""
    return f"split {dataset.split}: {many}labels hold something else; the first is {where}"


def _differing(before: Sequence[str], now: Sequence[str]) -> list[int]:
    """The indices of the blocks that differ."""
    return [i for i, (old, new) in enumerate(zip_longest(before, now)) if old != new]


def _files_of_block(paths: Sequence[Path], block: int, split: SplitFingerprint) -> str:
    files = [paths[i] for i in _blocks(len(paths), split.pairs_per_hash)[block]]
    if len(files) == 1:
        return printable(files[0])
    return f"among the {len(files)} from {printable(files[0])} to {printable(files[-1])}"
