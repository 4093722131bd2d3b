"""Whether a run sees the data it was started with, and what its checkpoints say about them.

Classes, names and sizes are compared before the first step. The contents of the labels are hashed
beside training, so that large data sets do not delay it, and compared before anything is saved.
"""

import os
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any, NamedTuple

from segtrain.checkpoint.contents import Checkpoint, LoadedModel, parse_data, parse_experiment
from segtrain.config import DataConfig
from segtrain.data.dataset import SegDataset
from segtrain.data.fingerprint import (
    DataFingerprint,
    LabelHashing,
    SplitFingerprint,
    class_differences,
    file_difference,
    fingerprint_to_json,
    hash_files,
    label_difference,
)
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError, DataError, UserError

# A collective at least this often, so that no rank waits for rank 0 longer than train.timeout_s.
_LOOK_EVERY_S = 1.0


class Resumed(NamedTuple):
    """The checkpoint that a run goes on from."""

    record: Checkpoint
    path: Path


class RunData:
    """The data of a run beside what its checkpoint says about them.

    Rank 0 compares; on other machines one rank looks at names and sizes. It has threads, so it is
    to be closed. Making one is collective.

    Args:
        sets: for training and for evaluation.
        root: data.root.
        resumed: None: training begins.
        accept_changes: what differs is told, not refused.

    Raises:
        ConfigError: classes, names or sizes differ from what the checkpoint says.
        DataError: they differ between the machines, or a file is gone.
        CheckpointError: what the checkpoint says is damaged.
    """

    def __init__(
        self,
        sets: tuple[SegDataset, SegDataset],
        root: str,
        resumed: Resumed | None,
        *,
        accept_changes: bool,
    ) -> None:
        self._sets, self._root = sets, root
        # Not the record: it would keep its weights in memory.
        self._path = None if resumed is None else resumed.path
        self._accepted = accept_changes
        self._splits = _on_all_machines(self._sets, self._root)
        self._hashing: LabelHashing | None = None
        self._outcome: list[str] | UserError | None = None  # of the labels, as rank 0 found it
        self._settled = False
        self._news: list[str] = []
        if resumed is None:
            return
        changes, self._news = dist.run_on_rank0(lambda: self._compare_files(resumed))
        self._news += [f"changed    {change}" for change in changes]
        before = parse_data(*resumed)
        if before is not None and not changes:  # then the labels can be compared, too
            self._splits = [before.train, before.eval]
            if not self._knows_labels:
                self._news.append(
                    f"warning: {resumed.path} was saved before all labels were hashed: whether "
                    "they hold the same as then cannot be told"
                )

    def close(self) -> None:
        """Ends the threads."""
        if self._hashing is not None:
            self._hashing.close()

    def start(self, patience_s: float) -> None:
        """Begins to hash the labels; waits a little if there is something to compare (collective).

        Raises:
            ConfigError, DataError: as `settle`.
        """
        if dist.is_main():
            splits = zip(self._sets, self._splits, strict=True)
            self._hashing = LabelHashing([(one, split.pairs_per_hash) for one, split in splits])
        if self._knows_labels:
            self.settle(lambda seconds: seconds > patience_s)

    def has_failed(self) -> bool:
        """Whether this rank knows that `settle` is going to raise; only rank 0 ever does."""
        if self._settled or self._hashing is None:
            return False
        return isinstance(self._look(0), UserError)

    def settle(self, give_up: Callable[[float], bool]) -> bool:
        """Waits for the hashes of the labels and compares them, once (collective).

        Args:
            give_up: asked on rank 0 every second, given the seconds that have passed: whether not
                to wait any longer.

        Returns:
            whether they have been compared.

        Raises:
            ConfigError: labels hold something else than they did.
            DataError: a label cannot be read.
        """
        began = time.monotonic()

        def look() -> tuple[list[str] | None, bool]:
            found = self._look(_LOOK_EVERY_S)
            if isinstance(found, UserError):
                raise found
            return found, give_up(time.monotonic() - began)

        while not self._settled:
            found, over = dist.run_on_rank0(look)
            if found is not None:
                self._news += [f"changed    {change}" for change in found]
                self._settled = True
            elif over:
                break
        return self._settled

    def take_news(self) -> list[str]:
        """Lines for the log that have not been given out yet."""
        news, self._news = self._news, []
        return news

    def record(self) -> str:
        """What a checkpoint is to say about the data, on rank 0.

        Until the labels have been compared it says what they were before, so that the next
        resumption compares them again.
        """
        return fingerprint_to_json(DataFingerprint(*self._splits))

    @property
    def _knows_labels(self) -> bool:
        return all(split.labels is not None for split in self._splits)

    def _compare_files(self, resumed: Resumed) -> tuple[list[str], list[str]]:
        """What differs in classes, names and sizes, and lines about what cannot be compared."""
        (train_set, _), before = self._sets, parse_data(*resumed)
        _, classes = parse_experiment(*resumed)
        found, shown = class_differences(classes, train_set.classes, train_set.label_format)
        news = [f"warning: {line} (changes pictures and written label maps)" for line in shown]
        if before is None:
            news.append(
                f"warning: {resumed.path} does not say which data it was trained on: whether they "
                "are the same cannot be told; from now on checkpoints say it"
            )
        else:
            splits = zip((before.train, before.eval), self._splits, self._sets, strict=True)
            lines = [file_difference(old, now, one, self._root) for old, now, one in splits]
            found += [line for line in lines if line]
        return self._allowed(found), news

    def _look(self, timeout_s: float) -> list[str] | UserError | None:
        """What differs in the labels, or why training must end; None: not known yet."""
        if self._outcome is None and self._hashing is not None and self._hashing.wait(timeout_s):
            try:
                self._outcome = self._compare_labels(self._hashing.result())
            except UserError as error:
                self._outcome = error
        return self._outcome

    def _compare_labels(self, labels: Sequence[tuple[str, ...]]) -> list[str]:
        splits = list(zip(self._splits, labels, self._sets, strict=True))
        lines = [label_difference(split, new, one) for split, new, one in splits]
        found = self._allowed([line for line in lines if line])
        self._splits = [replace(split, labels=new) for split, new, _ in splits]
        return found

    def _allowed(self, differences: list[str]) -> list[str]:
        if differences and not self._accepted:
            listed = "\n  ".join(differences)
            raise ConfigError(
                f"{self._path}: the run was trained on other data\n  {listed}\n"
                "  give it the data it was started with (data.root, data.classes), start a new run "
                "by --output, or, if the changes are meant, add --accept-changes"
            )
        return differences


def _on_all_machines(sets: tuple[SegDataset, SegDataset], root: str) -> list[SplitFingerprint]:
    """Names and sizes of the files of each split, which all machines must agree on (collective).

    Raises:
        DataError: they do not, or a file is gone.
    """

    def look() -> dict[str, Any] | None:
        if dist.local_rank() != 0:
            return None
        splits = [asdict(hash_files(one, root)) for one in sets]
        return {"classes": repr(sets[0].classes), "splits": splits}

    found = [(rank, seen) for rank, seen in enumerate(dist.run_on_all_ranks(look)) if seen]
    (_, first), *others = found
    for rank, seen in others:
        differing = [] if seen["classes"] == first["classes"] else ["the class file"]
        differing += [
            f"split {one.split} ({there['num_pairs']} images there, {here['num_pairs']} on rank 0)"
            for one, there, here in zip(sets, seen["splits"], first["splits"], strict=True)
            if there != here
        ]
        if differing:
            raise DataError(
                f"the machine of rank {rank} sees other data than that of rank 0: names, sizes or "
                f"contents differ of {', '.join(differing)}; give all machines the same data"
            )
    return [
        SplitFingerprint(**{**split, "files": tuple(split["files"])}) for split in first["splits"]
    ]


# Who evaluates with another value of one of these asks for other data.
_WHICH_DATA = ("root", "layout", "images_dir", "labels_dir", "label_format")


class EvalData:
    """The split that is evaluated beside that of its name when the model was trained.

    Nothing is refused: it is legitimate to evaluate on other data, but nobody should do so without
    knowing. It has threads, so it is to be closed.

    Args:
        known: what the checkpoint says about the data; None: nothing.
        data: how `dataset` was opened.
    """

    def __init__(
        self,
        trained: LoadedModel,
        known: DataFingerprint | None,
        data: DataConfig,
        dataset: SegDataset,
    ) -> None:
        self._trained, self._data, self._dataset = trained, data, dataset
        self._before = None if known is None else self._split_of_training(known)
        self._hashing: LabelHashing | None = None
        asked = any(getattr(data, key) != getattr(trained.config.data, key) for key in _WHICH_DATA)
        self._word = "note" if asked else "warning"

    def close(self) -> None:
        """Ends the threads."""
        if self._hashing is not None:
            self._hashing.close()

    def file_lines(self) -> list[str]:
        """What differs in classes, names and sizes, to be shown before the evaluation.

        If nothing does, the labels begin to be hashed.

        Raises:
            DataError: a file is gone.
        """
        classes, _ = class_differences(
            self._trained.classes, self._dataset.classes, self._dataset.label_format
        )
        is_same = _is_same_file(self._data.classes, self._trained.config.data.classes)
        lines = self._lines(classes, "warning" if is_same else "note")
        found = []
        if self._before is not None:
            now = hash_files(self._dataset, self._data.root)
            line = file_difference(self._before, now, self._dataset, self._data.root)
            if line:
                found.append(line)
            elif self._before.labels is not None:
                self._hashing = LabelHashing([(self._dataset, self._before.pairs_per_hash)])
        return lines + self._lines(found, self._word)

    def label_lines(self) -> list[str]:
        """What differs in the contents of labels, to be shown after the evaluation.

        Raises:
            DataError: a label cannot be read.
        """
        if self._hashing is None:
            return []
        self._hashing.wait()
        (labels,) = self._hashing.result()
        line = label_difference(self._before, labels, self._dataset)
        return self._lines([line] if line else [], self._word)

    def _split_of_training(self, known: DataFingerprint) -> SplitFingerprint | None:
        data = self._trained.config.data
        splits = {data.train_split: known.train, data.eval_split: known.eval}
        return splits.get(self._dataset.split)

    def _lines(self, found: list[str], word: str) -> list[str]:
        return [f"{word}: not the data of the training: {line}" for line in found]


def _is_same_file(one: str, other: str) -> bool:
    """Whether two values of data.classes name the same file, or the same known data set."""
    paths = [os.path.realpath(os.path.expanduser(name)) for name in (one, other)]
    return one == other or paths[0] == paths[1]
