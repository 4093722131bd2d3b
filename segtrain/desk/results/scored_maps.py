"""Label maps that any program has written, as predictions of a split, and what is right in them."""

import os
import shlex
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from contextlib import closing, suppress
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

import numpy as np
import torch

from segtrain.data.read.classes import ClassFile
from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.find import LABEL_SUFFIXES, files_by_name, first_lines, one_name
from segtrain.data.read.label_formats import Ids, LabelFormat, label_format_of
from segtrain.errors import ConfigError, DataError
from segtrain.run.console import ProgressBar
from segtrain.run.pictures import LABELS
from segtrain.task.contract import Outcome, Task
from segtrain.task.prediction import LabelMap, Prediction
from segtrain.text import counted, first_of, printable
from segtrain.types import IGNORE_INDEX


@dataclass(frozen=True)
class LabelMaps:
    """The files in `folder`, one for each image of `dataset`, in its order.

    left_out: how many files are of no image.
    """

    folder: Path
    dataset: SegDataset
    form: LabelFormat
    files: Sequence[Path]
    left_out: int = 0

    @property
    def classes(self) -> ClassFile:
        """Those of the data set."""
        return self.dataset.classes

    @classmethod
    def find(
        cls,
        folder: Path,
        dataset: SegDataset,
        label_format: str | None,
        *,
        ending: str = "",
        ignore_others: bool = False,
    ) -> "LabelMaps":
        """The files below `folder` that are called as an image, or as the end of its path.

        label_format: what they hold; None: what `segtrain predict` writes, where `folder` may be
            what it has written into. ending: what names have behind that of the image.
        ignore_others: files of no image are left out, and no problem.

        Raises:
            DataError: images without a label map or with several, and files of no image or of
                several; all are counted, and the first named. Or images are windows of rasters.
        """
        folder = folder / LABELS if (folder / LABELS).is_dir() else folder
        if not folder.is_dir():
            raise DataError(f"{printable(folder)}: expected a folder of label maps")
        if cut := [pair.image for pair in dataset.pairs if pair.window]:
            raise DataError(f"{first_of(dict.fromkeys(cut), 3)}: windows of rasters are not scored")
        owners = _owners(dataset)
        found: dict[int, list[Path]] = defaultdict(list)
        problems, others = [], 0
        by_name = files_by_name(folder, LABEL_SUFFIXES, ending)
        if not by_name and (jpegs := files_by_name(folder, (".jpg", ".jpeg"))):
            what = "JPEG blurs the values of label maps; write them as PNG"
            raise DataError(f"{printable(next(iter(jpegs.values()))[0])}: {what}")
        if not ending and (end := _shared_ending([*by_name], owners)):
            what = f"the names of its files have {printable(end)} behind those of images"
            option = f"--ending{'=' if end[0] == '-' else ' '}{shlex.quote(printable(end))}"
            raise DataError(f"{printable(folder)}: {what}: give {option}")
        for name, files in by_name.items():
            images = sorted(dataset.name(i) for i in owners.get(name, ()))
            others += len(files) if not images else 0
            if ignore_others and not images:
                continue
            what = f"may be of {first_of(images, 2)}" if images else "is of no image"
            if problem := one_name(files):
                problems.append(problem)
            elif len(images) != 1:
                problems.append(f"{printable(files[0])}: {what} of split {dataset.split}")
            for i in owners.get(name, ()):
                found[i].append(files[0])
        for i, name in enumerate(dataset.names):
            if len(found[i]) != 1:
                what = first_of(found[i], 2) if found[i] else f"none in {printable(folder)}"
                problems.append(f"image {printable(name)}: expected one label map, found {what}")
            elif found[i][0].resolve() == Path(dataset.pairs[i].label).resolve():
                problems.append(f"{printable(found[i][0])}: is the label itself, no prediction")
        if problems:
            ways = "--ignore-others leaves them out, --split LIST scores others"
            ways = f"\n  files of no image: {ways}" if others and not ignore_others else ""
            raise DataError(first_lines(printable(folder), problems) + ways)
        form = label_format or ("ids", "bands")[dataset.classes.overlapping]
        files = [found[i][0] for i in range(len(dataset))]
        return cls(folder, dataset, label_format_of(form), files, others)

    def read(self, index: int, label: np.ndarray) -> np.ndarray:
        """The prediction of image `index` in the form of its `label`; 0 where that is ignored.

        Raises:
            DataError: another shape, an id that the class file does not name, or pixels that are
                labelled and have no class.
        """
        path, pair = self.files[index], self.dataset.pairs[index]
        try:
            found = self.form.read(path, self.classes)
        except DataError as error:
            positions = self._perhaps_positions(path, label)
            # The config's option is that of the labels.
            text = str(error).replace("set data.label_format: ", "say --label-format ")
            raise DataError(f"{text}{positions and f'; {positions}'}") from None
        if found.shape != label.shape:
            here, there = ("x".join(map(str, x.shape)) for x in (found, label))
            what = f"label map {here}, label {printable(pair.label)} {there}"
            raise DataError(f"{printable(path)}: {what}: shapes (height x width) must be equal")
        if number := int(((found == IGNORE_INDEX) & (label != IGNORE_INDEX)).sum()):
            what = f"{counted(number, 'pixel', 'pixels')} without a class: every labelled pixel"
            what += " needs one; where the program has a value for unclassified, write there the"
            what += " class that it shall count as"
            positions = self._perhaps_positions(path, label)
            raise DataError(f"{printable(path)}: {what}{positions and f'; {positions}'}")
        return np.where(label == IGNORE_INDEX, np.uint8(0), found)

    def _perhaps_positions(self, path: Path, label: np.ndarray) -> str:
        """What to try where values are no ids, but could be train ids; else empty."""
        with suppress(DataError):
            found = label_format_of("train_ids").read(path, self.classes)
            fits = found.shape == label.shape and (found[label != IGNORE_INDEX] != IGNORE_INDEX)
            if type(self.form) is Ids and np.all(fits):
                return "if its values are positions in the class file: --label-format train_ids"
        return ""

    def count(self, task: Task, callbacks: Sequence[Callable[[Prediction], None]]) -> Outcome:
        """What is right and wrong, as of `evaluate_dataset`, but without probabilities."""

        def read(index: int) -> Prediction:
            image, label = self.dataset[index]
            return Prediction(index, image, label, self.read(index, label))

        number = len(self.dataset)
        counts = task.counts(number, self.classes.num_classes, torch.device("cpu"), None)
        bar = ProgressBar(number, 0, "score", enabled=True, unit="image")
        with bar, closing(prefetch(read, range(number), 2)) as predictions:
            for one in predictions:
                pred, label = map(torch.from_numpy, (one.pred, one.label))
                counts.add(one.index, LabelMap(pred, torch.tensor(True)), label)
                for callback in callbacks:
                    callback(one)
                bar.update()
        return counts.sum_over_ranks(0)

    def refuse_two_readings(self, predicted: Sequence[int]) -> None:
        """ConfigError: all ids may be positions in the class file, too, and mean others then.

        predicted: the pixels of each class.
        """
        ids = [(k, c.ids) for k, c in enumerate(self.classes.classes) if predicted[k]]
        are_positions = all(min(own) < self.classes.num_classes for _, own in ids)
        if isinstance(self.form, Ids) and are_positions and any(k not in own for k, own in ids):
            what = "all values are ids of the class file, and positions in it of other classes"
            raise ConfigError(f"{self.folder}: {what}: say --label-format ids, or train_ids")


def seem_to_count_from_one(matrix: np.ndarray, names: Sequence[str]) -> list[str]:
    """A warning if the class before the predicted one is right more often than that itself.

    matrix: (K, K) pixels of each label and prediction.
    """
    right, before = int(np.trace(matrix)), int(np.trace(matrix, offset=1))
    if before <= right or matrix[:, 0].any():
        return []
    share, of_before = (f"{100 * n / matrix.sum():.1f} %" for n in (right, before))
    return [
        f"warning: the label maps seem to count from 1: {names[0]} is never predicted, and with "
        f"all values one lower {of_before} of the pixels would be right, not {share}"
    ]


def _shared_ending(names: Sequence[str], owners: Mapping[str, set[int]]) -> str:
    """What all names have behind those of images; empty: nothing, or some are those of images."""
    if not names or any(name in owners for name in names):
        return ""
    ends = [names[0][-size:] for size in range(1, len(names[0]))]
    ends = [end for end in ends if all(name.endswith(end) for name in names)]
    number = {end: sum(name.removesuffix(end) in owners for name in names) for end in ends}
    best = max(ends, key=number.__getitem__, default="")
    return best if number.get(best) else ""


def _owners(dataset: SegDataset) -> dict[str, set[int]]:
    """The images of each name that a label map may have."""
    owners: dict[str, set[int]] = defaultdict(set)
    for i, pair in enumerate(dataset.pairs):
        for name in (os.path.splitext(pair.image)[0], pair.name):
            parts = PurePosixPath(name).parts
            for start in range(len(parts)):
                owners["/".join(parts[start:])].add(i)
    return owners
