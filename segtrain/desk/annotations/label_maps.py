"""Writes annotations as the files of a data set: label maps, a class file and a list of pairs."""

import csv
import io
import os
import shutil
from collections import Counter
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np

from segtrain.config.loading import yaml_value
from segtrain.data.read.classes import default_palette
from segtrain.data.read.concurrent import for_each_pair, num_processes
from segtrain.data.read.find import first_lines
from segtrain.desk.annotations.draw import Overlap, draw
from segtrain.desk.annotations.geojson import write_label
from segtrain.desk.annotations.reading import AnnotationSet
from segtrain.desk.annotations.regions import Annotated
from segtrain.distributed.machine import process_pool
from segtrain.errors import ConfigError, DataError, ExecutionError
from segtrain.files import os_errors_as, write_atomic
from segtrain.run.pictures import write_bands, write_indexed_png
from segtrain.text import first_of, printable
from segtrain.types import IGNORE_INDEX

LABELS, CLASSES, PAIRS = "labels", "classes.yaml", "pairs.txt"
# Labels lie here until all are drawn: half an import would train as a small data set.
_DRAFT = ".unfinished"

_PALETTE = default_palette(256)


def claim(output: Path, images: Path, *, overwrite: bool) -> None:
    """Makes the folder `output`, or empties the one of an earlier import.

    Raises:
        ConfigError: it lies in the folder of the images, holds something else, or holds an earlier
            import and `overwrite` is missing.
    """
    place = f"--output {printable(output)}"
    if output.resolve().is_relative_to(images.resolve()):
        where = f"lies in the folder of the images, {printable(images)}"
        raise ConfigError(f"{place}: {where}, where labels would be taken for images")
    with os_errors_as(ConfigError, place, "cannot be written"):
        output.mkdir(parents=True, exist_ok=True)
        found = set(os.listdir(output))
        if others := found - {LABELS, CLASSES, PAIRS, _DRAFT}:
            raise ConfigError(f"{place}: holds {first_of(sorted(others), 3)}; name a new folder")
        if found and _DRAFT not in found and not overwrite:
            raise ConfigError(f"{place}: holds labels already; --overwrite replaces them")
        for path in (output / name for name in found):
            # Of a link only the link goes, and not what it points to.
            path.unlink() if path.is_symlink() or path.is_file() else shutil.rmtree(path)


def write_labels(
    found: AnnotationSet, output: Path, *, overlap: Overlap, jobs: int | None = None
) -> tuple[np.ndarray, np.ndarray]:
    """Draws the label of each image of `found` into the empty folder `output`.

    Labels are PNG files with a palette, or TIFFs where regions lie on the map. Their ids are
    positions in `found.classes`, and 255 is ignored. The class file leaves out a background that no
    pixel shows. With `overlap` keep they are TIFFs with a band for each class but the background.
    jobs: processes; None: one for each core. Returns how many pixels and how many images show each
    id, (256,) int64 both.

    Raises:
        DataError: two images would have one label.
        ExecutionError: a process was killed, or `output` cannot be written.
    """
    keeps = overlap == "keep"
    if keeps and len(found.classes) < 2:
        raise DataError("annotations without a class: there is nothing to draw")
    if keeps and found.on_map:
        raise DataError(f"{found.format}: regions on a map are drawn into one band, not kept apart")
    labels = label_files(found, keeps=keeps)
    if twice := [label for label, count in Counter(labels).items() if count > 1]:
        raise DataError(first_lines("images with one name but for the suffix", twice))
    pixels, shown = np.zeros((2, 256), np.int64)
    draft = output / _DRAFT
    write = partial(_write, folder=draft, classes=found.classes, overlap=overlap)
    both = list(zip(found.images, labels, strict=True))
    with process_pool(num_processes(len(labels), jobs)) as pool:
        for counts in for_each_pair(write, both, pool, "drawing"):
            pixels += counts
            shown += counts > 0
    classes = "".join(
        f"  - {{name: {yaml_value(name)}, ids: [{1 if keeps else i}], "
        f"color: {list(_PALETTE[i])}}}\n"
        for i, name in enumerate(found.classes)
        if i or (pixels[0] and not keeps)
    )
    classes += f"ignore_ids: [{IGNORE_INDEX}]\n" if keeps else ""
    pairs = io.StringIO()
    table = csv.writer(pairs, delimiter="\t", lineterminator="\n")
    for image, label in zip(found.images, labels, strict=True):
        # A line that begins with # would be left out.
        name = f"./{image.name}" if image.name.startswith("#") else image.name
        table.writerow([name, label])
    head = f"# drawn by segtrain data import from {found.format} annotations\nclasses:\n"
    with os_errors_as(ExecutionError, what="cannot be written"):
        # The draft goes last: as long as it is there, the import counts as unfinished.
        write_atomic(output / CLASSES, head + classes)
        write_atomic(output / PAIRS, pairs.getvalue())
        (draft / LABELS).rename(output / LABELS)
        draft.rmdir()
    return pixels, shown


def label_files(found: AnnotationSet, *, keeps: bool = False) -> list[str]:
    """The label of each image of `found`, relative to the folder that `write_labels` fills.

    keeps: labels have a band for each class.
    """
    suffix = ".tif" if keeps or found.on_map else ".png"
    return [f"{LABELS}/{image.name.rpartition('.')[0]}{suffix}" for image in found.images]


def _write(
    pair: tuple[Annotated, str], folder: Path, classes: Sequence[str], overlap: Overlap
) -> np.ndarray:
    """Writes the label of one image; returns the pixels of each id, (256,)."""
    image, path = pair[0], folder / pair[1]
    if path.suffix == ".tif" and overlap != "keep":
        return write_label(image, path, classes, overlap)
    label = draw(image, classes, overlap)
    if overlap == "keep":
        write_bands(path, label)
        return presence_counts(label)
    write_indexed_png(path, label, _PALETTE)
    return np.bincount(label.ravel(), minlength=256)


def presence_counts(label: np.ndarray) -> np.ndarray:
    """Pixels of each class of a label (H, W, K), from 1 on, (256,); at 0 those of none.

    At IGNORE_INDEX those of which no class is known.
    """
    counts = np.zeros(256, np.int64)
    counts[1 : label.shape[2] + 1] = (label == 1).sum((0, 1))
    counts[0] = (label == 0).all(2).sum()
    counts[IGNORE_INDEX] = (label == IGNORE_INDEX).all(2).sum()
    return counts
