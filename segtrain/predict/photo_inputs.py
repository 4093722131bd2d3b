"""Photos, as `segtrain predict` takes them: in groups that share batches, read ahead, late back."""

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from types import MappingProxyType
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segtrain.checkpoint.ready import ReadyModel
from segtrain.data.check.values import image_values
from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.georeference import is_on_map
from segtrain.data.read.image import ImageForm, ignore_missing, ignored_where
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.photos import PhotoFile, read_photo
from segtrain.errors import DataError, ExecutionError
from segtrain.files import os_errors_as
from segtrain.inference.predictor import Predictor
from segtrain.inference.settings import InferenceSettings
from segtrain.inference.transfer import Transfer
from segtrain.inference.windows import num_windows
from segtrain.predict.georaster import write_label, write_probabilities
from segtrain.predict.kind import Job, check_library
from segtrain.predict.object_table import ObjectTables
from segtrain.predict.summary import Notes, class_pixels
from segtrain.predict.undeclared import where_zero
from segtrain.run import pictures
from segtrain.run.console import ProgressBar
from segtrain.task.prediction import LabelMap
from segtrain.task.tasks import task_of
from segtrain.text import printable

# Two threads each for decoding and PNG compression keep up with a device that takes 20 ms for an
# image of two million pixels.
_THREADS = 2

# Of the images in a group; more would wait in memory for each other.
_MOST_BYTES = 100 << 20


class DecodedPhoto(NamedTuple):
    """An image to predict. index: among all sources. pixels: (H, W, C) as stored, on the host.

    missing: (H, W) uint8, IGNORE_INDEX where the image has no value, else 0.
    """

    index: int
    source: PhotoFile
    pixels: Tensor
    missing: np.ndarray
    settings: InferenceSettings


class Photos:
    """Images that fit into memory."""

    several, such = "images", "images"
    instead = MappingProxyType({"--probabilities nii": "npz and tif are for images"})
    honours = "--table", "--objects", "--probabilities", "--opacity", "--clear"
    honours += "--pixel-size", "--min-area"

    def is_own(self, source: PhotoFile) -> bool:
        """Every file: it is named when it cannot be read."""
        return True

    def check(self, job: Job, sources: Sequence[PhotoFile]) -> None:
        """ConfigError: a library is missing that georeferences need, or a size of pixels."""
        check_library(sources)
        job.tables.grids(sources)

    def predict(self, job: Job, sources: Sequence[PhotoFile]) -> list[Notes]:
        """Writes pictures of each, and the tables of all."""
        grids, without = job.tables.grids(sources)
        for line in without:
            print(line)
        tables = ObjectTables(job.tables, job.classes.names, grids, {})
        how = {"probabilities": job.probabilities, "on_label": tables.add}
        notes = predict_images(job.ready, sources, job.output, job.tint, **how)
        tables.write(sources)
        return notes

    def written(self, job: Job) -> str:
        """The folders of all pictures."""
        folders = (folder.partition("/")[0] for folder in job.folders)
        return f"{{{','.join(dict.fromkeys(folders))}}}"


class _Finished(NamedTuple):
    """A predicted image on the host, to be written.

    image: (H, W, 3) uint8. label: (H, W) or (H, W, K) uint8. probability: (K, H, W); None: not
        asked for. index, missing: as of DecodedPhoto.
    """

    index: int
    source: PhotoFile
    image: np.ndarray
    label: np.ndarray
    probability: np.ndarray | None
    missing: np.ndarray


def _ignore(source: PhotoFile, label: np.ndarray, missing: np.ndarray) -> None:
    """The default of `on_label`."""


def predict_images(
    ready: ReadyModel,
    sources: Sequence[PhotoFile],
    output: Path,
    tint: pictures.Tint,
    *,
    probabilities: str | None = None,
    on_label: Callable[[PhotoFile, np.ndarray, np.ndarray], None] = _ignore,
) -> list[Notes]:
    """Writes the predictions for every image that can be read; returns notes on every image.

    probabilities: of every class too, as `npz` or `tif`. on_label: called, by any thread, with each
        label map and what its image is `missing`.

    Raises:
        ExecutionError: the disk is full or not writable.
        MemoryLimitError: the device's memory does not suffice for an image.
    """
    predictor, form = ready.predictor, ready.form
    settings, transfer = predictor.settings, predictor.transfer
    bar = ProgressBar(len(sources), 0, "predict", enabled=True, unit="image", last_line=False)
    decode = partial(_decode, transfer, form)
    decoded = prefetch(decode, [source.path for source in sources], _THREADS)
    notes: list[Notes] = []

    def photos() -> Iterator[DecodedPhoto]:
        for i, (source, (result, note)) in enumerate(zip(sources, decoded, strict=True)):
            notes.append(note)
            if result is None:
                bar.update()
            else:
                yield DecodedPhoto(i, source, *result, settings.of(result[0].shape[:2]))

    def finished() -> Iterator[_Finished]:
        wanted = "all" if probabilities else "none"
        groups = groups_of(photos(), predictor.limits.num_images)
        predicted = ((group, _predict(predictor, group, wanted)) for group in groups)
        # One group late: while the device computes the next, this one is copied and written.
        for group, result in transfer.late_to_host(predicted):
            for photo, (label, is_finite, probability) in zip(group, result, strict=True):
                notes[photo.index] = notes[photo.index]._replace(
                    is_finite=bool(is_finite.numpy()),
                    in_parts=photo.settings.mode != settings.usual.mode,
                )
                yield _finished(photo, label, probability, form)
                bar.update()

    def write(result: _Finished) -> None:
        _write(ready, output, tint, probabilities, result)
        if task_of(ready.config.task).has_classes:
            counts = class_pixels(result.label, (result.missing == 0).sum(), predictor.num_classes)
            notes[result.index] = notes[result.index]._replace(class_pixels=counts)
        on_label(result.source, result.label, result.missing)

    # Three stages side by side: threads decode, this thread predicts, threads write.
    with bar, closing(decoded), closing(prefetch(write, finished(), _THREADS)) as written:
        for _ in written:
            pass
    return notes


def _finished(
    photo: DecodedPhoto, label: Tensor, probability: Tensor | None, form: ImageForm
) -> _Finished:
    """The prediction on the host; where the image has no value, it is left out."""
    image = pictures.as_rgb(photo.pixels.numpy(), form.value_range)
    known = None
    if probability is not None:
        known = np.where(photo.missing, np.float32(np.nan), probability.float().numpy())
    label = ignored_where(photo.missing, label.numpy())
    return _Finished(photo.index, photo.source, image, label, known, photo.missing)


def _write(
    ready: ReadyModel,
    output: Path,
    tint: pictures.Tint,
    probabilities: str | None,
    result: _Finished,
) -> None:
    """Writes all files of a prediction, and removes those that an earlier one has left."""
    _, source, image, label, known, _ = result
    classes, task = ready.loaded.classes, task_of(ready.config.task)
    drawn = task.pictures(classes, label)
    _, palette = task.key(classes)
    shown = task.shown(label)
    pictures.write_prediction(output, source.name, image, shown, palette, tint, drawn)
    for ending in pictures.PROBABILITY_ENDINGS:
        path = output / pictures.PROBABILITIES / f"{source.name}.{ending}"
        with os_errors_as(ExecutionError, path, "cannot be written"):
            if ending == probabilities:
                path.parent.mkdir(parents=True, exist_ok=True)
                write_probabilities(path, known, classes.names, source.path)
            else:
                path.unlink(missing_ok=True)
    path = output / pictures.LABELS / f"{source.name}.tif"
    with os_errors_as(ExecutionError, path, "cannot be written"):
        if pictures.LABELS not in drawn or is_on_map(source.path, read_info(source.path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            stored = task.stored(classes, label)
            write_label(path, stored, task.no_data(classes), source.path)
        else:
            path.unlink(missing_ok=True)


def groups_of(photos: Iterable[DecodedPhoto], most: int) -> Iterator[list[DecodedPhoto]]:
    """Neighbouring images with the same settings, up to `most`, whose views may share batches."""
    group: list[DecodedPhoto] = []
    for photo in photos:
        # Views of other settings or types cannot lie in one batch.
        new = photo.settings, photo.pixels.dtype
        if group and new != (group[0].settings, group[0].pixels.dtype):
            yield group
            group = []
        group.append(photo)
        if len(group) == most or sum(x.pixels.numel() for x in group) >= _MOST_BYTES:
            yield group
            group = []
    if group:
        yield group


def _decode(
    transfer: Transfer, form: ImageForm, path: Path
) -> tuple[tuple[Tensor, np.ndarray] | None, Notes]:
    """`pixels` and `missing` of a DecodedPhoto; None: the image cannot be read."""
    try:
        image, form, info = read_photo(path, form)
    except DataError as error:
        return None, Notes(str(error))
    values = image_values(image, form, printable(path))
    zeros = float(where_zero(image).mean()) if is_on_map(path, info) else 0.0
    image, missing = ignore_missing(image, np.zeros(image.shape[:2], np.uint8), form)
    pixels = transfer.pinned(torch.from_numpy(image))
    return (pixels, missing), Notes(turned=info.orientation != 1, values=values, zeros=zeros)


def _predict(predictor: Predictor, group: list[DecodedPhoto], wanted: str) -> list[LabelMap]:
    """The predictions for a group of images; on CUDA they are only asked for."""
    settings, images = group[0].settings, [photo.pixels for photo in group]
    slides = settings.mode == "slide"
    total = sum(num_windows(image.shape[:2], settings) for image in images) if slides else 0
    bar = ProgressBar(total, 0, "windows", enabled=total > 1, unit="window", last_line=False)
    bar.describe(printable(group[0].source.name))
    place, asked = printable(group[0].source.path), {"on_windows": bar.update}
    with bar:
        return predictor.label_maps(images, place=place, probabilities=wanted, **asked)


KIND = Photos()
