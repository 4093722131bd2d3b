"""Whether data are those that a checkpoint was trained on.

Classes, names and sizes are compared at the start. The contents of the labels are hashed in threads
beside the work, so that large data sets do not delay it.
"""

import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import closing
from dataclasses import replace
from pathlib import Path
from typing import NamedTuple

from segtrain.checkpoint.format import Checkpoint, parse_data, parse_experiment
from segtrain.checkpoint.loading import LoadedModel
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
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError, DataError, UserError

# Ranks meet at least this often, so that none waits for rank 0 longer than train.timeout_s.
_POLL_S = 1.0

# If the user sets one of these to another value, an evaluation is meant to use other data.
_WHICH_DATA = ("root", "layout", "images_dir", "labels_dir", "label_format")


class Resumed(NamedTuple):
    """The checkpoint from which a run goes on."""

    checkpoint: Checkpoint
    path: Path


class RunData:
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
        self._hashing: LabelHashing | None = None  # on rank 0
        self._result: list[str] | UserError | None = None
        self._settled = False
        self._news: list[str] = []
        if resumed is not None:
            self._compare_files(resumed, root)

    def close(self) -> None:
        """Ends the threads."""
        if self._hashing is not None:
            self._hashing.close()

    def start(self, patience_s: float) -> None:
        """Starts to hash the labels; tries to `settle` if they can be compared (collective)."""
        if dist.is_main():
            sizes = [split.pairs_per_hash for split in self._splits]
            self._hashing = LabelHashing(list(zip(self._sets, sizes, strict=True)))
        if self._knows_labels:
            self.settle(lambda seconds: seconds > patience_s)

    def has_failed(self) -> bool:
        """Whether `settle` is going to raise, as far as this rank knows; only rank 0 ever does."""
        return isinstance(self._poll(0), UserError)

    def settle(self, give_up: Callable[[float], bool]) -> bool:
        """Whether the labels have been compared; waits for their hashes (collective).

        give_up: whether to stop waiting after so many seconds; asked on rank 0 every second.

        Raises:
            ConfigError: the contents of labels have changed.
            DataError: a label cannot be read.
        """
        start = time.monotonic()

        def poll() -> tuple[list[str] | None, bool]:
            result = self._poll(_POLL_S)
            if isinstance(result, UserError):
                raise result
            return result, give_up(time.monotonic() - start)

        gives_up = False
        while not (self._settled or gives_up):
            changes, gives_up = dist.run_on_rank0(poll)
            if changes is not None:
                self._news += [f"changed    {change}" for change in changes]
                self._settled = True
        return self._settled

    def take_news(self) -> list[str]:
        """New lines for the log."""
        news, self._news = self._news, []
        return news

    def fingerprint(self) -> str:
        """What a checkpoint must say about the data, on rank 0.

        Until the labels have been compared, it keeps the old hashes for the next resumption.
        """
        return fingerprint_to_json(DataFingerprint(*self._splits))

    @property
    def _knows_labels(self) -> bool:
        return all(split.labels is not None for split in self._splits)

    def _compare_files(self, resumed: Resumed, root: str) -> None:
        """Compares classes, names and sizes, and keeps the old hashes if these are equal."""
        before = parse_data(*resumed)
        _, classes = parse_experiment(*resumed)

        def compare() -> tuple[list[str], list[str]]:
            now = self._sets[0]
            changes, harmless = class_differences(classes, now.classes, now.label_format)
            if before is not None:
                splits = zip(before.splits, self._splits, self._sets, strict=True)
                changes += [file_difference(old, new, data, root) for old, new, data in splits]
            return self._accepted(changes), harmless

        changes, harmless = dist.run_on_rank0(compare)
        self._news += [f"warning: {x} (changes pictures and written label maps)" for x in harmless]
        self._news += [f"changed    {change}" for change in changes]
        if before is not None and not changes:
            self._splits = before.splits
        if before is None or not (changes or self._knows_labels):
            what = "which data it was trained on" if before is None else "what all labels held"
            what += ": changes since then are not noticed"
            self._news.append(f"warning: {resumed.path} does not say {what}")

    def _poll(self, timeout_s: float) -> list[str] | UserError | None:
        """The result of comparing the labels; None if it is not known within `timeout_s`."""
        if self._result is None and self._hashing is not None:
            try:
                labels = self._hashing.result(timeout_s)
                self._result = None if labels is None else self._compare_labels(labels)
            except UserError as error:
                self._result = error
        return self._result

    def _compare_labels(self, labels: Sequence[tuple[str, ...]]) -> list[str]:
        splits = list(zip(self._splits, labels, self._sets, strict=True))
        changes = self._accepted([label_difference(*split) for split in splits])
        self._splits = tuple(replace(split, labels=new) for split, new, _ in splits)
        return changes

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
    trained: LoadedModel, known: DataFingerprint | None, data: DataConfig, dataset: SegDataset
) -> Iterator[list[str]]:
    """How the evaluated split differs from the one of the same name at training; close it.

    Yields lines about classes, names and sizes, then lines about the contents of labels, which it
    hashes in between. Nothing is refused: evaluating on other data is legitimate. `known` is None
    if the checkpoint does not say.
    """
    before = trained.config.data
    changes, _ = class_differences(trained.classes, dataset.classes, dataset.label_format)
    paths = (os.path.realpath(os.path.expanduser(x)) for x in (data.classes, before.classes))
    lines = _eval_lines(changes, is_meant=len(set(paths)) > 1)
    splits = (None, None) if known is None else known.splits
    names = (before.train_split, before.eval_split)
    split = dict(zip(names, splits, strict=True)).get(dataset.split)
    if split is None:
        yield lines
        return
    is_meant = any(getattr(data, key) != getattr(before, key) for key in _WHICH_DATA)
    change = file_difference(split, hash_files(dataset, data.root), dataset, data.root)
    if change or split.labels is None:
        yield lines + _eval_lines([change], is_meant)
        return
    with closing(LabelHashing([(dataset, split.pairs_per_hash)])) as hashing:
        yield lines
        (labels,) = hashing.result()
        yield _eval_lines([label_difference(split, labels, dataset)], is_meant)


def _eval_lines(changes: list[str], is_meant: bool) -> list[str]:
    severity = "note" if is_meant else "warning"
    return [f"{severity}: not the data of the training: {x}" for x in changes if x]


def _agreed_fingerprint(sets: tuple[SegDataset, SegDataset], root: str) -> DataFingerprint:
    """Names and sizes of the files, which must be equal on all machines (collective)."""

    def look() -> list[str] | None:
        if dist.local_rank() != 0:
            return None
        fingerprint = DataFingerprint(*(hash_files(dataset, root) for dataset in sets))
        pixels = [dataset.content_hash() for dataset in sets]
        return [repr(sets[0].classes), fingerprint_to_json(fingerprint), *pixels]

    first, *others = dist.run_on_all_ranks(look)
    for rank, other in enumerate(others, start=1):
        if other not in (None, first):
            what = "the pixels in data.pack"
            if other[:2] != first[:2]:
                what = "the class file" if other[0] != first[0] else "names or sizes of the files"
            raise DataError(
                f"the machine of rank {rank} sees other data than that of rank 0: {what} differ; "
                "give all machines the same data"
            )
    return fingerprint_from_json(first[1])
