"""What a data set is made of, for checkpoints: a run must not go on with other data unnoticed.

Compared are the number, order, names and sizes in bytes of the files, and the contents of the
labels. Names are relative to data.root, so the same data may lie elsewhere. Images are not hashed,
since that would read the whole data set at every start: an image that was replaced by one of the
same name and the same number of bytes goes unnoticed. A label that was written again with the same
pixels but other bytes counts as changed.
"""

import hashlib
import os
from collections.abc import Sequence
from concurrent.futures import FIRST_EXCEPTION, ThreadPoolExecutor, wait
from dataclasses import dataclass
from pathlib import Path
from threading import Event

from pydantic import ConfigDict, TypeAdapter

from segtrain.data.classes import ClassFile, Color
from segtrain.data.dataset import SegDataset
from segtrain.data.decode import read_bytes
from segtrain.data.listing import Pair
from segtrain.errors import DataError
from segtrain.text import printable

# At most so many hashes of a kind: few kilobytes in a checkpoint, and still near the file that
# differs.
_MAX_HASHES = 64
# Both wait for the disk most of the time, on a network drive a thousandth of a second a file.
_STAT_THREADS = 16
_LABEL_THREADS = 8


@dataclass(frozen=True)
class SplitFingerprint:
    """One split, its pairs in blocks of neighbours with one hash each.

    files: of the names and sizes of images and labels.
    labels: of the contents of the labels; None where these have not been hashed.
    """

    __pydantic_config__ = ConfigDict(extra="forbid")

    num_pairs: int
    pairs_per_hash: int
    files: tuple[str, ...]
    labels: tuple[str, ...] | None

    def __post_init__(self) -> None:
        # What comes from a checkpoint may be damaged.
        num_hashes = -(-self.num_pairs // max(1, self.pairs_per_hash))
        if self.pairs_per_hash < 1 or {
            len(hashes) for hashes in (self.files, self.labels) if hashes is not None
        } != {num_hashes}:
            raise ValueError(f"expected {num_hashes} hashes")


@dataclass(frozen=True)
class DataFingerprint:
    """Both splits of an experiment."""

    __pydantic_config__ = ConfigDict(extra="forbid")

    train: SplitFingerprint
    eval: SplitFingerprint


_ADAPTER = TypeAdapter(DataFingerprint)


def fingerprint_to_json(fingerprint: DataFingerprint) -> str:
    """Text for a checkpoint."""
    # Indented, because `torch_file` takes no long text without a blank.
    return _ADAPTER.dump_json(fingerprint, indent=1).decode()


def fingerprint_from_json(text: str) -> DataFingerprint:
    """The fingerprint in a checkpoint.

    Raises:
        pydantic.ValidationError: it is none.
    """
    return _ADAPTER.validate_json(text)


def hash_files(
    dataset: SegDataset, root: str, *, pairs_per_hash: int | None = None
) -> SplitFingerprint:
    """The fingerprint of `dataset` without the contents of its labels.

    Args:
        root: data.root.
        pairs_per_hash: None: the smallest power of two with at most 64 hashes.

    Raises:
        DataError: a file is gone or may not be looked at.
    """
    size = pairs_per_hash or 1
    while pairs_per_hash is None and size * _MAX_HASHES < len(dataset):
        size *= 2
    # With a slash at its end.
    prefix = os.fsencode(os.path.join(str(Path(os.path.expanduser(root))), ""))
    with ThreadPoolExecutor(_STAT_THREADS) as pool:
        blocks = _blocks(dataset.pairs, size)
        files = tuple(pool.map(lambda block: _hash_block_files(block, prefix), blocks))
    return SplitFingerprint(len(dataset), size, files, None)


class LabelHashing:
    """Hashes the contents of labels in threads beside other work; to be closed.

    Args:
        splits: data sets, each with its number of pairs a hash.
    """

    def __init__(self, splits: Sequence[tuple[SegDataset, int]]) -> None:
        self._stopped = Event()
        self._pool = ThreadPoolExecutor(_LABEL_THREADS, thread_name_prefix="hash-labels")
        self._futures = [
            [
                self._pool.submit(_hash_block_labels, block, self._stopped)
                for block in _blocks(dataset.pairs, size)
            ]
            for dataset, size in splits
        ]

    def wait(self, timeout_s: float | None = None) -> bool:
        """Whether `result` can tell; waits for it, at most `timeout_s`."""
        everything = [future for futures in self._futures for future in futures]
        done, left = wait(everything, timeout_s, return_when=FIRST_EXCEPTION)
        return not left or any(future.exception() is not None for future in done)

    def result(self) -> list[tuple[str, ...]]:
        """The hashes of each split, once `wait` returned true.

        Raises:
            DataError: a label cannot be read.
        """
        for futures in self._futures:
            for future in futures:
                if future.done() and (error := future.exception()) is not None:
                    raise error
        return [tuple(future.result() for future in futures) for futures in self._futures]

    def close(self) -> None:
        """Ends the threads after the file each is reading; the process could not exit before."""
        self._stopped.set()
        self._pool.shutdown(wait=False, cancel_futures=True)


def file_difference(
    before: SplitFingerprint, now: SplitFingerprint, dataset: SegDataset, root: str
) -> str:
    """How the files of a split, by names and sizes, differ from `before`; empty if they do not.

    Args:
        dataset, root: what `now` was made of.

    Raises:
        DataError: as `hash_files`.
    """
    if before.num_pairs == now.num_pairs and before.files == now.files:
        return ""
    if before.pairs_per_hash != now.pairs_per_hash:
        now = hash_files(dataset, root, pairs_per_hash=before.pairs_per_hash)
    first = next(iter(_differing(before.files, now.files)), 0)
    place = _place([pair.image for pair in dataset.pairs], first, now.pairs_per_hash)
    if before.num_pairs != now.num_pairs:
        return (
            f"split {dataset.split}: {before.num_pairs} images there, {now.num_pairs} now; the "
            f"first difference is {place}"
        )
    return (
        f"split {dataset.split}: names, sizes or order of the files differ; the first difference "
        f"is {place}"
    )


def label_difference(before: SplitFingerprint, labels: Sequence[str], dataset: SegDataset) -> str:
    """How the contents of labels differ from `before`, where the files are the same.

    Empty if they do not, or if `before` does not say what they held.

    Args:
        labels: their hashes now.
    """
    differing = [] if before.labels is None else _differing(before.labels, labels)
    if not differing:
        return ""
    paths = [pair.label for pair in dataset.pairs]
    place = _place(paths, differing[0], before.pairs_per_hash)
    if before.pairs_per_hash == 1:
        many = f"{len(differing)} labels hold" if len(differing) > 1 else "a label holds"
        return f"split {dataset.split}: {many} something else; the first is {place}"
    return f"split {dataset.split}: labels hold something else; the first is {place}"


def class_differences(
    before: ClassFile, now: ClassFile, label_format: str
) -> tuple[list[str], list[str]]:
    """What differs between two class files: what changes the labels, and what only shows.

    Colours show in pictures, and ids in label maps that are written, where labels are not read
    by them.
    """
    if before.names != now.names:
        pairs = zip((*before.names, "none"), (*now.names, "none"), strict=False)
        i, (old, new) = next((i, pair) for i, pair in enumerate(pairs) if pair[0] != pair[1])
        return [
            f"class file: {before.num_classes} classes there, {now.num_classes} now; class {i} is "
            f"{old} there, {new} now"
        ], []
    ids = [
        f"class file: ids of {old.name}: {list(old.ids)} there, {list(new.ids)} now"
        for old, new in zip(before.classes, now.classes, strict=True)
        if set(old.ids) != set(new.ids)
    ]
    if set(before.ignore_ids) != set(now.ignore_ids):
        ignored = f"{list(before.ignore_ids)} there, {list(now.ignore_ids)} now"
        ids.append(f"class file: ignore_ids: {ignored}")
    colors = [
        f"class file: color of {name}: {list(old)} there, {list(new)} now"
        for name, old, new in zip(
            (*now.names, "what is ignored"), _colors(before), _colors(now), strict=True
        )
        if old != new
    ]
    return (colors, ids) if label_format == "colors" else (ids, colors)


def _colors(classes: ClassFile) -> list[Color]:
    return [*classes.palette, classes.ignore_color]


def _blocks(pairs: Sequence[Pair], size: int) -> list[Sequence[Pair]]:
    return [pairs[i : i + size] for i in range(0, len(pairs), size)]


def _hash_block_files(pairs: Sequence[Pair], prefix: bytes) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        for path in (pair.image, pair.label):
            digest.update(b"%d %s\0" % (_num_bytes(path), os.fsencode(path).removeprefix(prefix)))
    return digest.hexdigest()[:16]


def _num_bytes(path: Path) -> int:
    try:
        return os.stat(path).st_size
    except OSError as error:
        raise DataError(f"{printable(path)}: {(error.strerror or str(error)).lower()}") from error


def _hash_block_labels(pairs: Sequence[Pair], stopped: Event) -> str:
    digest = hashlib.sha256()
    for pair in pairs:
        if stopped.is_set():
            break
        digest.update(hashlib.sha256(read_bytes(pair.label)).digest())
    return digest.hexdigest()[:16]


def _differing(before: Sequence[str], now: Sequence[str]) -> list[int]:
    """The numbers of the blocks that differ or that one side lacks."""
    common = min(len(before), len(now))
    differing = [i for i in range(common) if before[i] != now[i]]
    return [*differing, *range(common, max(len(before), len(now)))]


def _place(paths: Sequence[Path], block: int, pairs_per_hash: int) -> str:
    """Where block number `block` lies, as exactly as the hashes tell."""
    files = paths[block * pairs_per_hash : (block + 1) * pairs_per_hash]
    if not files:
        return f"after {printable(paths[-1])}, which is the last one now"
    if len(files) == 1:
        return printable(files[0])
    return f"among the {len(files)} from {printable(files[0])} to {printable(files[-1])}"
