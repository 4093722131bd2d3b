"""`segtrain predict`: label maps, colour maps and overlays for images of any size, and videos.

As in training, pixels count as they are stored: a rotation in the file's EXIF is ignored, and the
command says so.
"""

import argparse
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from contextlib import closing, suppress
from functools import partial
from importlib.util import find_spec
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from segtrain.checkpoint.ready import ReadyModel, make_ready
from segtrain.commands.frames import check_frames, make_room, predict_videos
from segtrain.commands.summary import Notes, print_about, summarize
from segtrain.commands.volumes import ENDING, check_slices, predict_volume, split_inputs
from segtrain.config.loading import given_keys
from segtrain.data.check.values import image_values, joined_values
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.decode import MAX_PHOTO_PIXELS
from segtrain.data.read.find import VIDEO_SUFFIXES
from segtrain.data.read.georeference import geo_library, is_on_map
from segtrain.data.read.image import ImageForm, ignore_missing, ignored_where
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.photos import PhotoFile, find_images, form_of_file, read_photo
from segtrain.data.read.protect import check_pictures
from segtrain.data.read.raster import raster_size, refuse_short_side
from segtrain.data.read.volumes import VolumeFile
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, DataError, ExecutionError
from segtrain.evaluation.decision_rule import rule_of
from segtrain.evaluation.georaster import (
    num_blocks,
    predict_raster,
    write_label,
    write_probabilities,
)
from segtrain.evaluation.inference import LabelMap
from segtrain.evaluation.object_table import ObjectTables, TableOptions
from segtrain.evaluation.predictor import Predictor
from segtrain.evaluation.settings import InferenceSettings, Size
from segtrain.evaluation.transfer import Transfer
from segtrain.evaluation.windows import num_windows
from segtrain.files import os_errors_as
from segtrain.run import pictures
from segtrain.run.console import ProgressBar
from segtrain.text import first_of, printable

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


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    args: source (run directory or checkpoint), others (of an ensemble), inputs (files and folders),
        output (a directory), device ("auto", "cpu" or "cuda"), set (a list of
        `section.key=value`), overwrite, probabilities (None, "npz" or "tif"), opacity (of
        overlays), clear (names of classes), thresholds (names of classes and numbers),
        unknown_below (a probability), frames (label maps of videos too), and those of
        TableOptions.

    Raises:
        DataError: nothing to predict; or, after all others are done, images that cannot be read.
    """
    # The user names the images, and read_photo has a bound of its own.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    output = Path(args.output)
    volumes, inputs, notes_on_files = split_inputs(args.inputs, output)
    sources, skipped = find_images(inputs, output) if inputs else ([], "")
    names = [source.name for source in (*volumes, *sources)]
    pictures.check_output(output, names, overwrite=args.overwrite)
    tables_asked = TableOptions(args.table, args.objects, args.pixel_size, args.min_area)
    tables_asked.check()

    ready = _ready(args)
    classes = ready.loaded.classes
    if volumes and (classes.overlapping or tables_asked.files):
        raise ConfigError("volumes are labelled with one class a pixel, and without tables")
    check_slices(ready, sources)
    if "data.slice_axis" in given_keys(args.set) and not volumes:
        raise ConfigError("--set data.slice_axis: cuts volumes, and there is none here; remove it")
    masks = pictures.mask_names(classes) if classes.overlapping else []
    kinds = *pictures.KINDS, *(f"{pictures.MASKS}/{mask}" for mask in masks)
    paths = [f"{kind}/{name}.png" for name in names for kind in kinds]
    if args.frames:
        paths += [f"{pictures.LABELS}/{name}/0.png" for name in names]
    check_pictures("--output", output, paths, ready.config.data)
    print_about(ready)
    for line in filter(None, (*notes_on_files, skipped)):
        print(line)

    tint = _tint(args, classes)
    videos = [source for source in sources if source.path.suffix.lower() in VIDEO_SUFFIXES]
    if videos:
        check_frames(printable(videos[0].path), ready.form)
    images = [source for source in sources if source not in videos]
    sizes = {source: raster_size(source.path, MAX_PHOTO_PIXELS) for source in images}
    rasters = {source: size for source, size in sizes.items() if size is not None}
    if volumes and args.probabilities:
        raise ConfigError("--probabilities: not for volumes")
    _check_options(args, rasters, videos, has_others=len(rasters) < len(sources))
    if args.frames:
        of_videos = [video.name for video in videos]
        make_room(output / pictures.LABELS, of_videos, names, overwrite=args.overwrite)
    _check_library(images)
    whole = [source for source in images if source not in rasters]
    grids, without = tables_asked.grids(images)
    for line in without:
        print(line)
    tables = ObjectTables(tables_asked, ready.loaded.classes.names, grids, {})
    asked = {"probabilities": args.probabilities, "on_label": tables.add}
    notes = predict_images(ready, whole, output, tint, **asked)
    of_rasters = predict_rasters(ready, rasters, output)
    of_videos = predict_videos(ready, videos, output, tint, with_frames=args.frames)
    tables.write(images)
    of_volumes = predict_volumes(ready, volumes, output)
    kinds = ("masks", *pictures.KINDS) if classes.overlapping else pictures.KINDS
    summarize(ready, notes, of_rasters, of_videos, of_volumes, output, kinds)
    return EXIT_OK


def _ready(args: argparse.Namespace) -> ReadyModel:
    """The model, which predicts by --threshold and --unknown-below."""
    device = device_for(args.device)
    ready = make_ready(args.source, *args.others, settings=args.set, device=device)
    classes = ready.loaded.classes
    if classes.overlapping and (args.thresholds or args.unknown_below is not None):
        what = "with task multilabel each class has a threshold of its own"
        raise ConfigError(f"--threshold, --unknown-below: {what}; use --set eval.thresholds=[...]")
    rule = rule_of(args.thresholds, classes.names, args.unknown_below)
    return ready._replace(predictor=ready.predictor.by(rule))


def _tint(args: argparse.Namespace, classes: ClassFile) -> pictures.Tint:
    opacity = 0.5 if args.opacity is None else args.opacity
    return pictures.make_tint(classes, opacity, args.clear)


def _check_options(
    args: argparse.Namespace,
    rasters: Collection[PhotoFile],
    videos: Collection[PhotoFile],
    *,
    has_others: bool,
) -> None:
    """ConfigError for options that rasters read in parts, or videos, do not have."""
    if args.frames and not videos:
        raise ConfigError("--frames: there is no video")
    if videos and (args.table or args.objects):
        raise ConfigError(
            f"--table, --objects: not for a video: {first_of(x.path for x in videos)}"
        )
    if rasters and (args.table or args.objects):
        names = first_of(source.path for source in rasters)
        raise ConfigError(
            f"--table, --objects: not for a raster that is read in parts: {names}; of its label "
            "map, segtrain data polygons LABELMAP tells areas and outlines"
        )
    if args.probabilities and (rasters or videos):
        kinds = "a video, or a raster that is read in parts"
        names = first_of(source.path for source in (*rasters, *videos))
        raise ConfigError(f"--probabilities: not for {kinds}: {names}")
    if rasters and not has_others and (args.clear or args.opacity is not None):
        what = "rasters that are read in parts get no overlays"
        raise ConfigError(f"--opacity, --clear: no effect: {what}")


def _check_library(images: Sequence[PhotoFile]) -> None:
    """ConfigError: the label map of an image with a georeference could not have it."""
    for source in images if find_spec("rasterio") is None else ():
        with suppress(DataError):  # it is named when it is read
            if is_on_map(source.path, read_info(source.path)):
                geo_library(source.path)


class _Finished(NamedTuple):
    """A predicted image on the host, to be written.

    image: (H, W, 3) uint8. label: (H, W) or (H, W, K) uint8. probability: (K, H, W); None: not
        asked for. missing: as of DecodedPhoto.
    """

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
    predictor, classes, form = ready.predictor, ready.loaded.classes, ready.form
    settings, transfer = predictor.settings, predictor.transfer
    pictures.write_legend(output, classes)
    bar = ProgressBar(len(sources), 0, "predict", enabled=True, unit="image", last_line=False)
    decode = partial(_decode, transfer, form)
    decoded = prefetch(decode, [source.path for source in sources], _THREADS)
    notes: list[Notes] = []

    def photos() -> Iterator[DecodedPhoto]:
        for i, (source, (found, note)) in enumerate(zip(sources, decoded, strict=True)):
            notes.append(note)
            if found is None:
                bar.update()
            else:
                yield DecodedPhoto(i, source, *found, settings.of(found[0].shape[:2]))

    def finished() -> Iterator[_Finished]:
        wanted = "all" if probabilities else "none"
        groups = groups_of(photos(), predictor.limits.num_images)
        predicted = ((group, _predict(predictor, group, wanted)) for group in groups)
        for group, found in transfer.late_to_host(predicted):
            for photo, (label, is_finite, probability) in zip(group, found, strict=True):
                notes[photo.index] = notes[photo.index]._replace(
                    is_finite=bool(is_finite.numpy()),
                    in_parts=photo.settings.mode != settings.usual.mode,
                )
                yield _finished(photo, label, probability, form)
                bar.update()

    def write(found: _Finished) -> None:
        _write(output, classes, tint, probabilities, found)
        on_label(found.source, found.label, found.missing)

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
    return _Finished(photo.source, image, label, known, photo.missing)


def _write(
    output: Path,
    classes: ClassFile,
    tint: pictures.Tint,
    probabilities: str | None,
    found: _Finished,
) -> None:
    """Writes all files of a prediction, and removes those that an earlier one has left."""
    source, image, label, known, _ = found
    pictures.write_prediction(output, source.name, image, label, classes, tint)
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
        if classes.overlapping or is_on_map(source.path, read_info(source.path)):
            path.parent.mkdir(parents=True, exist_ok=True)
            stored = pictures.stored_label(classes, label)
            write_label(path, stored, classes.write_ignored, source.path)
        else:
            path.unlink(missing_ok=True)


def predict_rasters(
    ready: ReadyModel, rasters: Mapping[PhotoFile, Size], output: Path
) -> list[Notes]:
    """Writes label maps of TIFFs that are too large to be read at once; returns notes on each.

    Each is a tiled TIFF with the georeference of its image. Colours and overlays are left out.
    """
    notes = []
    for source, size in rasters.items():
        path = output / pictures.LABELS / f"{source.name}.tif"
        try:
            notes.append(_predict_raster(ready, source, size, path))
        except DataError as error:
            notes.append(Notes(str(error)))
        except OSError as error:
            raise ExecutionError(f"{printable(path)}: cannot be written: {error}") from error
    return notes


def _predict_raster(ready: ReadyModel, source: PhotoFile, size: Size, path: Path) -> Notes:
    settings, values = ready.predictor.settings, []
    refuse_short_side(source.path, settings.usual.short_side_px)
    path.parent.mkdir(parents=True, exist_ok=True)
    form = form_of_file(source.path, ready.form)
    bar = ProgressBar(num_blocks(size), 0, "raster", enabled=True, unit="block", last_line=False)
    bar.describe(printable(source.name))

    def add(block: np.ndarray) -> None:
        values.append(image_values(block, form, printable(source.path)))
        bar.update()

    with bar:
        is_finite = predict_raster(
            ready.predictor,
            source.path,
            size,
            path,
            form=form,
            stored=partial(pictures.stored_label, ready.loaded.classes),
            no_data=ready.loaded.classes.write_ignored,
            on_block=add,
        )
    return Notes(
        turned=read_info(source.path).orientation != 1,
        in_parts=settings.usual.mode == "whole",
        values=joined_values(values),
        is_finite=is_finite,
    )


def predict_volumes(ready: ReadyModel, volumes: Sequence[VolumeFile], output: Path) -> list[Notes]:
    """Writes a volume of ids for each, where its source lies; returns notes on each."""
    notes = []
    for volume in volumes:
        path = output / pictures.LABELS / f"{volume.name}{ENDING}"
        try:
            values, is_finite, along = predict_volume(ready, volume, path)
        except DataError as error:
            notes.append(Notes(str(error)))
        except OSError as error:
            raise ExecutionError(f"{printable(path)}: cannot be written: {error}") from error
        else:
            print(along)
            notes.append(Notes(values=values, is_finite=is_finite))
    return notes


def groups_of(photos: Iterable[DecodedPhoto], most: int) -> Iterator[list[DecodedPhoto]]:
    """Neighbouring images with the same settings, up to `most`, whose views may share batches."""
    group: list[DecodedPhoto] = []
    for photo in photos:
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
    image, missing = ignore_missing(image, np.zeros(image.shape[:2], np.uint8), form)
    pixels = transfer.pinned(torch.from_numpy(image))
    return (pixels, missing), Notes(turned=info.orientation != 1, values=values)


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
