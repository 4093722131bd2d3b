"""Whether a model is evaluated on the data that its checkpoint knows."""

import os

from segtrain.checkpoint.loading import LoadedModel
from segtrain.config import DataConfig
from segtrain.data.dataset import SegDataset
from segtrain.data.differences import class_differences, file_difference, label_difference
from segtrain.data.fingerprint import DataFingerprint, LabelHashing, hash_files

# If the user sets one of these to another value, other data are meant.
_WHICH_DATA = ("root", "layout", "images_dir", "labels_dir", "label_format")


class EvalData:
    """Compares the evaluated split with the split of the same name at training.

    Nothing is refused: evaluating on other data is legitimate, but the user must know. It has
    threads, so call `close` at the end. `known` is None if the checkpoint does not say.
    """

    def __init__(
        self,
        trained: LoadedModel,
        known: DataFingerprint | None,
        data: DataConfig,
        dataset: SegDataset,
    ) -> None:
        before = trained.config.data
        names = (before.train_split, before.eval_split)
        splits = {} if known is None else dict(zip(names, known.splits, strict=True))
        self._split = splits.get(dataset.split)
        self._trained, self._data, self._dataset = trained, data, dataset
        self._is_meant = any(getattr(data, key) != getattr(before, key) for key in _WHICH_DATA)
        self._hashing: LabelHashing | None = None

    def close(self) -> None:
        """Ends the threads."""
        if self._hashing is not None:
            self._hashing.close()

    def file_lines(self) -> list[str]:
        """What differs in classes, names and sizes. If no file does, starts to hash the labels."""
        trained, dataset = self._trained, self._dataset
        changes, _ = class_differences(trained.classes, dataset.classes, dataset.label_format)
        class_files = (self._data.classes, trained.config.data.classes)
        paths = {os.path.realpath(os.path.expanduser(name)) for name in class_files}
        lines = _lines(changes, is_meant=len(paths) > 1)
        if self._split is None:
            return lines
        now = hash_files(dataset, self._data.root)
        change = file_difference(self._split, now, dataset, self._data.root)
        if not change and self._split.labels is not None:
            self._hashing = LabelHashing([(dataset, self._split.pairs_per_hash)])
        return lines + _lines([change], self._is_meant)

    def label_lines(self) -> list[str]:
        """What differs in the contents of labels; waits for their hashes."""
        if self._hashing is None:
            return []
        (labels,) = self._hashing.result()
        return _lines([label_difference(self._split, labels, self._dataset)], self._is_meant)


def _lines(changes: list[str], is_meant: bool) -> list[str]:
    severity = "note" if is_meant else "warning"
    return [f"{severity}: not the data of the training: {x}" for x in changes if x]
