"""What a data set consists of, for checkpoints: a run must not go on with other data unnoticed.

Of a pack it is that of the files which were packed, so a run goes on from files to a pack and back.
Hashed are the number, order, names (relative to data.root) and sizes in bytes of the files, and the
contents of the labels. Hashing images would read the whole data set at every start: an image that
was replaced by one with the same name and size goes unnoticed.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from threading import Event
from typing import NamedTuple

from pydantic import ConfigDict, TypeAdapter

from segtrain.data.dataset import SegDataset

# A few kilobytes in a checkpoint, and still precise enough to find the file that differs.
_MAX_HASHES = 64
# Both kinds of hashing mostly wait for the disk: on a network drive about 1 ms per file.
_STAT_THREADS = 16
_LABEL_THREADS = 8


@dataclass(frozen=True)
class SplitFingerprint:
    """One split. Its pairs are cut into blocks of neighbours; every block has one hash of a kind.

    files: hashes of the names and sizes of images and labels.
    labels: hashes of the contents of the labels; None if these have not been read.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    num_pairs: int
    pairs_per_hash: int
    files: tuple[str, ...]
    labels: tuple[str, ...] | None

    def __post_init__(self) -> None:
        # A checkpoint may be damaged.
        num_hashes = -(-self.num_pairs // max(1, self.pairs_per_hash))
        kinds = [hashes for hashes in (self.files, self.labels) if hashes is not None]
        if self.pairs_per_hash < 1 or any(len(hashes) != num_hashes for hashes in kinds):
            raise ValueError(f"expected {num_hashes} hashes")


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


def hash_files(
    dataset: SegDataset, root: str, *, pairs_per_hash: int | None = None
) -> SplitFingerprint:
    """The fingerprint of `dataset` in data.root, without the contents of its labels.

    pairs_per_hash: None: the smallest power of two that gives at most 64 hashes.

    Raises:
        DataError: a file is gone, or its size cannot be read.
    """
    size = pairs_per_hash or 1
    while pairs_per_hash is None and size * _MAX_HASHES < len(dataset):
        size *= 2
    # The join adds a slash at the end.
    prefix = os.fsencode(os.path.join(str(Path(os.path.expanduser(root))), ""))
    hash_block = partial(_hash_block_files, prefix=prefix)
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        files = tuple(pool.map(hash_block, _blocks(dataset, size)))
    return SplitFingerprint(len(dataset), size, files, None)


class LabelHashing:
    """Hashes the contents of labels in threads beside other work. Call `close` at the end.

    splits: data sets, each with its pairs per hash.
    """

    def __init__(self, splits: Sequence[tuple[SegDataset, int]]) -> None:
        self._stopped = Event()
        self._pool = ThreadPoolExecutor(_LABEL_THREADS, thread_name_prefix="hash-labels")
        submit = partial(self._pool.submit, _hash_block_labels, stopped=self._stopped)
        self._splits = [
            [submit(block) for block in _blocks(dataset, size)] for dataset, size in splits
        ]

    def result(self, timeout_s: float | None = None) -> list[tuple[str, ...]] | None:
        """The hashes of each split; None if they take longer than `timeout_s`.

        Raises:
            DataError: a label cannot be read.
        """
        futures = [future for split in self._splits for future in split]
        _, left = wait(futures, timeout_s, return_when=FIRST_EXCEPTION)
        for future in futures:
            if future.done() and (error := future.exception()):
                raise error
        return None if left else [tuple(f.result() for f in split) for split in self._splits]

    def close(self) -> None:
        """Ends the threads after their present file. Otherwise the process could not exit."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


class _Block(NamedTuple):
    """Neighbours in a data set."""

    dataset: SegDataset
    indices: range


def _blocks(dataset: SegDataset, size: int) -> list[_Block]:
    whole = range(len(dataset))
    return [_Block(dataset, whole[i : i + size]) for i in range(0, len(dataset), size)]


def _hash_block_files(block: _Block, prefix: bytes) -> str:
    digest = hashlib.sha256()
    for index in block.indices:
        pair = block.dataset.pairs[index]
        sizes = block.dataset.source_bytes(index)
        for path, num_bytes in zip((pair.image, pair.label), sizes, strict=True):
            digest.update(b"%d %s\0" % (num_bytes, os.fsencode(path).removeprefix(prefix)))
    return digest.hexdigest()[:16]


def _hash_block_labels(block: _Block, stopped: Event) -> str:
    digest = hashlib.sha256()
    for index in block.indices:
        if stopped.is_set():
            break
        digest.update(block.dataset.hashed_label(index).digest)
    return digest.hexdigest()[:16]
