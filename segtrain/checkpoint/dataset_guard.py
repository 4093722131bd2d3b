"""Whether data are those that a checkpoint was trained on.

Classes, names and sizes are compared at the start. The contents of the labels are hashed in threads
beside the work, so that large data sets do not delay it.
"""

import hashlib
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from segtrain.checkpoint.format import Checkpoint, parse_data, parse_experiment
from segtrain.config import DataConfig
from segtrain.data.read.classes import class_differences
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.fingerprint import (
    DataFingerprint,
    LabelHashing,
    file_difference,
    fingerprint_from_json,
    fingerprint_to_json,
    hash_files,
    label_difference,
)
from segtrain.data.read.image import other_bands
from segtrain.data.read.label_formats import told_by
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError, DataError, UserError

if TYPE_CHECKING:  # training loads no other model
    from segtrain.checkpoint.trained import LoadedModel

# Ranks meet at least this often, so that none waits for rank 0 longer than train.timeout_s.
_POLL_S = 1.0

# If the user sets one of these to another value, an evaluation is meant to use other data.
_WHICH_DATA = ("root", "layout", "images_dir", "labels_dir", "label_format")


class Resumed(NamedTuple):
    """The checkpoint from which a run goes on."""

    checkpoint: Checkpoint
    path: Path


class DatasetGuard:
    """Compares the data of a run, below `root`, with what its checkpoint says about them.

    Making this object is collective. It has threads, so call `close` at the end. `resumed` is None
    if training starts anew. `accept_changes` logs differences instead of refusing them.

    Raises:
        ConfigError: classes, names or sizes differ from the checkpoint.
        DataError: they differ between the machines, or a file is gone.
        CheckpointError: the checkpoint is damaged.
    """

    def __init__(
        self,
        sets: tuple[SegDataset, SegDataset],
        root: str,
        resumed: Resumed | None,
        *,
        accept_changes: bool,
    ) -> None:
        self._sets, self._accept_changes = sets, accept_changes
        self._path = None if resumed is None else resumed.path
        self._splits = _agreed_fingerprint(sets, root).splits
        self._hashing: LabelHashing | None = None  # on the first rank of each machine
        self._label_changes: list[str] | None = None  # on rank 0, once they are known
        self._compared = False
        self._log_lines: list[str] = []
        if resumed is not None:
            self._compare_files(resumed)

    def close(self) -> None:
        """Ends the threads."""
        if self._hashing is not None:
            self._hashing.close()

    def start(self, patience_s: float) -> None:
        """Starts to hash the labels; waits `patience_s` if they can be compared (collective)."""
        # One rank of each machine: the others see the same files.
        if dist.local_rank() == 0:
            sizes = [split.pairs_per_hash for split in self._splits]
            self._hashing = LabelHashing(list(zip(self._sets, sizes, strict=True)))
        if self._knows_labels:
            self.wait_for_hashes(lambda seconds: seconds > patience_s)

    def has_failed(self) -> bool:
        """Whether `wait_for_hashes` is going to raise; only rank 0 knows."""
        try:
            self._poll(0)
        except UserError:
            return True
        return False

    def wait_for_hashes(self, give_up: Callable[[float], bool]) -> bool:
        """Whether the labels have been compared; waits for their hashes (collective).

        give_up: whether to stop waiting after so many seconds; asked on rank 0 every second.

        Raises:
            ConfigError: the contents of labels have changed.
            DataError: a label cannot be read, or the machines see different ones.
        """
        start = time.monotonic()

        def poll() -> tuple[list[str] | None, bool]:
            return self._poll(_POLL_S), give_up(time.monotonic() - start)

        gives_up = False
        # Every round has two collectives. All ranks get the same answers, so they leave the loop
        # together.
        while not (self._compared or gives_up):
            changes, gives_up = dist.run_on_rank0(poll)
            digests = dist.run_on_all_ranks(self._digest_here)
            # Rank 0 may be done before another machine is.
            if changes is not None and "" not in digests:
                _check_labels_alike(digests)
                self._log_lines += [f"changed    {change}" for change in changes]
                self._compared = True
        return self._compared

    def pop_log_lines(self) -> list[str]:
        """New lines for the log."""
        lines, self._log_lines = self._log_lines, []
        return lines

    def fields(self) -> dict[str, str]:
        """What a checkpoint keeps about the data, on rank 0.

        Until the labels have been compared, it keeps the old hashes for the next resumption.
        """
        return {"data": fingerprint_to_json(DataFingerprint(*self._splits))}

    @property
    def _knows_labels(self) -> bool:
        return all(split.labels is not None for split in self._splits)

    def _compare_files(self, resumed: Resumed) -> None:
        """Compares classes, names and sizes, and keeps the old hashes if these are equal."""
        before = parse_data(*resumed)
        _, classes = parse_experiment(*resumed)

        def compare() -> tuple[list[str], list[str]]:
            now = self._sets[0]
            changes, harmless = class_differences(classes, now.classes, told_by(now.label_format))
            if before is not None:
                splits = zip(before.splits, self._splits, self._sets, strict=True)
                changes += [file_difference(*split) for split in splits]
            return self._accepted(changes), harmless

        changes, harmless = dist.run_on_rank0(compare)
        self._log_lines += [
            f"warning: {x} (changes pictures and written label maps)" for x in harmless
        ]
        self._log_lines += [f"changed    {change}" for change in changes]
        if before is not None and not changes:
            self._splits = before.splits
        if before is None or not (changes or self._knows_labels):
            what = "which data it was trained on" if before is None else "what all labels held"
            what += ": changes since then are not noticed"
            self._log_lines.append(f"warning: {resumed.path} does not say {what}")

    def _digest_here(self) -> str | None:
        """Of the labels as this machine sees them; empty: not yet known; None: another rank says.

        DataError: a label cannot be read.
        """
        if self._hashing is None:
            return None
        # Rank 0 has just waited in `_poll`.
        labels = self._hashing.result(0 if dist.is_main() else _POLL_S)
        return "" if labels is None else hashlib.sha256(repr(labels).encode()).hexdigest()

    def _poll(self, timeout_s: float) -> list[str] | None:
        """The changes of labels; None if they are not known within `timeout_s`."""
        if dist.is_main() and self._label_changes is None and self._hashing is not None:
            labels = self._hashing.result(timeout_s)
            if labels is not None:
                splits = list(zip(self._splits, labels, self._sets, strict=True))
                changes = self._accepted([label_difference(*split) for split in splits])
                # From now on a checkpoint keeps the new hashes.
                self._splits = tuple(replace(split, labels=new) for split, new, _ in splits)
                self._label_changes = changes
        return self._label_changes

    def _accepted(self, changes: list[str]) -> list[str]:
        """Those of `changes` that are not empty; ConfigError if they are not accepted."""
        changes = [change for change in changes if change]
        if changes and not self._accept_changes:
            listed = "\n  ".join(changes)
            raise ConfigError(
                f"{self._path}: the run was trained on other data\n  {listed}\n"
                "  give it the data it was started with (data.root, data.classes), start a new run "
                "by --output, or, if the changes are meant, add --accept-changes"
            )
        return changes


def eval_differences(
    trained: "LoadedModel", data: DataConfig, dataset: SegDataset
) -> Iterator[list[str]]:
    """How the evaluated split differs from the one of the same name at training; close it.

    Yields lines about classes, names and sizes, then lines about the contents of labels, which it
    hashes in between. Nothing is refused: evaluating on other data is legitimate.
    """
    before = trained.config.data
    changes, _ = class_differences(trained.classes, dataset.classes, told_by(dataset.label_format))
    bands = trained.channels.bands if trained.channels else ()
    changes += filter(None, [other_bands(dataset.form.bands, bands)])
    paths = {os.path.realpath(os.path.expanduser(x)) for x in (data.classes, before.classes)}
    lines = _eval_lines(changes, is_meant=len(paths) > 1)
    splits = (None, None) if trained.data is None else trained.data.splits
    names = (before.train_split, before.eval_split)
    split = dict(zip(names, splits, strict=True)).get(dataset.split)
    is_meant = any(getattr(data, key) != getattr(before, key) for key in _WHICH_DATA)
    change = ""
    if split is not None:
        change = file_difference(split, hash_files(dataset, data.root), dataset)
        lines += _eval_lines([change], is_meant)
    if split is None or change or split.labels is None:
        yield lines
        return
    with closing(LabelHashing([(dataset, split.pairs_per_hash)])) as hashing:
        # Threads hash while the caller uses these lines.
        yield lines
        (labels,) = hashing.result()
        yield _eval_lines([label_difference(split, labels, dataset)], is_meant)


def _eval_lines(changes: list[str], is_meant: bool) -> list[str]:
    severity = "note" if is_meant else "warning"
    return [f"{severity}: not the data of the training: {x}" for x in changes if x]


def _check_labels_alike(digests: Sequence[str | None]) -> None:
    """Raises DataError if a machine, by the rank that tells, sees other labels than rank 0's."""
    for rank, digest in enumerate(digests):
        if digest not in (None, digests[0]):
            raise DataError(
                f"the machine of rank {rank} sees other labels than that of rank 0, in files with "
                "the same names and sizes; give all machines the same data"
            )


def _agreed_fingerprint(sets: tuple[SegDataset, SegDataset], root: str) -> DataFingerprint:
    """Names and sizes of the files, which must be equal on all machines (collective)."""

    def look() -> dict[str, Any] | None:
        if dist.local_rank() != 0:
            return None
        fingerprint = DataFingerprint(*(hash_files(dataset, root) for dataset in sets))
        return {
            "the class file": repr(sets[0].classes),
            "names or sizes of the files": fingerprint_to_json(fingerprint),
            "the pixels in data.pack": [dataset.content_hash() for dataset in sets],
        }

    first, *others = dist.run_on_all_ranks(look)
    for rank, other in enumerate(others, start=1):
        differing = [what for what in first if other is not None and other[what] != first[what]]
        if differing:
            raise DataError(
                f"the machine of rank {rank} sees other data than that of rank 0: {differing[0]} "
                "differ; give all machines the same data"
            )
    return fingerprint_from_json(first["names or sizes of the files"])
