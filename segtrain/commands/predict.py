"""`segtrain predict`: label maps, colour maps and overlays for images of any size, and videos.

As in training, pixels count as they are stored: a rotation in the file's EXIF is ignored, and the
command says so.
"""

import argparse
import math
import warnings
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import closing
from functools import partial
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from PIL import Image
from torch import Tensor, nn

from segtrain.checkpoint.loading import load_model
from segtrain.commands.evaluate import set_after_training
from segtrain.commands.video import overlay_video
from segtrain.config.loading import given_keys
from segtrain.data.check.findings import find_darkness
from segtrain.data.check.values import ImageValues, image_values
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.decode import MAX_PHOTO_PIXELS
from segtrain.data.read.find import VIDEO_SUFFIXES, first_lines
from segtrain.data.read.image import ImageForm, form_of, ignore_missing
from segtrain.data.read.photos import Source, find_images, form_of_file, read_photo
from segtrain.data.read.protect import check_pictures
from segtrain.data.read.raster import raster_size, refuse_short_side
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, DataError, ExecutionError
from segtrain.evaluation.dataset import Transfer
from segtrain.evaluation.inference import LabelMap, predict_labels
from segtrain.evaluation.raster import (
    geo_tags,
    num_blocks,
    predict_raster,
    write_label,
    write_probabilities,
)
from segtrain.evaluation.settings import (
    BatchLimits,
    InferenceSettings,
    SettingsBySize,
    Size,
    batch_limits,
    fitting_pixels,
)
from segtrain.evaluation.windows import num_windows
from segtrain.files import os_errors_as
from segtrain.models.memory import check_windows, memory_failures
from segtrain.models.precision import (
    eval_precision_warnings,
    float32_products,
    for_evaluation,
    to_eval_precision,
)
from segtrain.run import pictures
from segtrain.run.console import ProgressBar
from segtrain.text import counted, first_of, printable

# Everything else was decided when the model was trained.
_SETTABLE = ("eval.", "data.short_side_px", "train.precision")

# Two threads each for decoding and PNG compression keep up with a device that takes 20 ms for an
# image of two million pixels.
_THREADS = 2

# Of the images in a group; more would wait in memory for each other.
_MOST_BYTES = 100 << 20


class Notes(NamedTuple):
    """What the command says about an image at the end."""

    problem: str = ""  # why it cannot be read
    turned: bool = False  # EXIF asks for a rotation
    in_parts: bool = False  # too large for the mode `whole` of the settings
    values: ImageValues | None = None
    is_finite: bool = True  # whether its scores are; else its prediction means nothing
    cut_short: str = ""  # a video whose last frames are missing


class Photo(NamedTuple):
    """An image to predict. index: among all sources. pixels: (H, W, C) as stored, on the host.

    missing: (H, W) uint8, IGNORE_INDEX where the image has no value, else 0.
    """

    index: int
    source: Source
    pixels: Tensor
    missing: np.ndarray
    settings: InferenceSettings


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    args: source (run directory or checkpoint), others (of an ensemble), inputs (files and folders),
        output (a directory), device ("auto", "cpu" or "cuda"), set (a list of
        `section.key=value`), overwrite, probabilities (None, "npz" or "tif"), opacity (of
        overlays), clear (names of classes).

    Raises:
        DataError: nothing to predict; or, after all others are done, images that cannot be read.
    """
    # The user names the images, and read_photo has a bound of its own.
    warnings.simplefilter("ignore", Image.DecompressionBombWarning)
    output = Path(args.output)
    sources, skipped = find_images(args.inputs, output)
    names = [source.name for source in sources]
    pictures.check_output(output, names, overwrite=args.overwrite)

    device = device_for(args.device)
    loaded = load_model(args.source, *args.others, device=device)
    config = set_after_training(loaded.config, args.set, _SETTABLE, source=str(args.source))
    check_pictures("--output", output, pictures.file_names(names), config.data)
    check_windows(config, loaded.classes.num_classes, device)
    model = to_eval_precision(loaded.model, config, device)
    mode_is_given = "eval.mode" in given_keys(args.set)
    most = fitting_pixels(model, device, loaded.classes.num_classes, ranks=1)
    settings = SettingsBySize.from_config(config, mode_is_given=mode_is_given, fitting_pixels=most)
    print(f"{loaded.about}; {settings.describe()}; {device}")
    for line in eval_precision_warnings(config, device):
        print(f"warning: {line}")
    if skipped:
        print(skipped)

    form = form_of(config.data)
    tint = pictures.make_tint(loaded.classes, args.opacity, args.clear)
    videos = [source for source in sources if source.path.suffix.lower() in VIDEO_SUFFIXES]
    if videos and (form.channels, form.value_range, form.dtype) != (3, None, np.uint8):
        raise DataError(
            f"{printable(videos[0].path)}: frames are RGB of 8 bits, and the model was trained on "
            f"{form.channels} channels of {form.dtype}"
        )
    how = {"form": form, "settings": settings, "classes": loaded.classes, "device": device}
    with float32_products(for_evaluation(config)):
        images = [source for source in sources if source not in videos]
        sizes = {source: raster_size(source.path, MAX_PHOTO_PIXELS) for source in images}
        rasters = {source: size for source, size in sizes.items() if size is not None}
        if rasters and args.probabilities:
            raise ConfigError(
                f"--probabilities: not for a raster that is read in parts: "
                f"{first_of(source.path for source in rasters)}"
            )
        notes = predict_images(
            model,
            [source for source in images if source not in rasters],
            output,
            tint=tint,
            probabilities=args.probabilities,
            **how,
        )
        notes += predict_rasters(model, rasters, output, **how)
        of_videos = predict_videos(model, videos, output, tint=tint, **how)
    _summarize(notes, of_videos, output)
    return EXIT_OK


def predict_images(
    model: nn.Module,
    sources: Sequence[Source],
    output: Path,
    *,
    form: ImageForm,
    settings: SettingsBySize,
    classes: ClassFile,
    device: torch.device,
    tint: pictures.Tint,
    probabilities: str | None = None,
) -> list[Notes]:
    """Writes the predictions for every image that can be read; returns notes on every image.

    form: of the images in training; see `read_photo`. probabilities: of every class too, as `npz`
        or `tif`.

    Raises:
        ExecutionError: the disk is full or not writable.
        MemoryLimitError: the device's memory does not suffice for an image.
    """
    pictures.write_legend(output, classes)
    bar = ProgressBar(len(sources), 0, "predict", enabled=True, unit="image", last_line=False)
    transfer = Transfer(device)
    limits = batch_limits(settings.usual, device, classes.num_classes)
    decode = partial(_decode, transfer, form)
    decoded = prefetch(decode, [source.path for source in sources], _THREADS)
    notes: list[Notes] = []

    def photos() -> Iterator[Photo]:
        for i, (source, (found, note)) in enumerate(zip(sources, decoded, strict=True)):
            notes.append(note)
            if found is None:
                bar.update()
            else:
                yield Photo(i, source, *found, settings.of(found[0].shape[:2]))

    wanted = "all" if probabilities else "none"

    def finished() -> Iterator[tuple[Source, np.ndarray, np.ndarray, np.ndarray | None]]:
        groups = groups_of(photos(), limits.num_images)
        predicted = ((group, _predict(model, group, transfer, limits, wanted)) for group in groups)
        for group, found in transfer.late_to_host(predicted):
            for photo, (label, is_finite, known) in zip(group, found, strict=True):
                notes[photo.index] = notes[photo.index]._replace(
                    is_finite=bool(is_finite.numpy()),
                    in_parts=photo.settings.mode != settings.usual.mode,
                )
                image = pictures.as_rgb(photo.pixels.numpy(), form.value_range)
                known = None if known is None else known.float().numpy()
                yield photo.source, image, np.maximum(label.numpy(), photo.missing), known
                bar.update()

    def write(prediction: tuple[Source, np.ndarray, np.ndarray, np.ndarray | None]) -> None:
        source, image, label, known = prediction
        pictures.write_prediction(output, source.name, image, label, classes, tint)
        tags = geo_tags(source.path)
        if known is not None:
            path = output / pictures.PROBABILITIES / f"{source.name}.{probabilities}"
            with os_errors_as(ExecutionError, path, "cannot be written"):
                path.parent.mkdir(parents=True, exist_ok=True)
                write_probabilities(path, known, classes.names, tags)
        if tags:
            path = output / pictures.LABELS / f"{source.name}.tif"
            with os_errors_as(ExecutionError, path, "cannot be written"):
                write_label(path, label, pictures.raw_ids(classes), tags)

    with bar, closing(decoded), closing(prefetch(write, finished(), _THREADS)) as written:
        for _ in written:
            pass
    return notes


def predict_rasters(
    model: nn.Module,
    rasters: Mapping[Source, Size],
    output: Path,
    *,
    form: ImageForm,
    settings: SettingsBySize,
    classes: ClassFile,
    device: torch.device,
) -> list[Notes]:
    """Writes label maps of TIFFs that are too large to be read at once; returns notes on each.

    Each is a tiled TIFF with the georeference of its image. Colours and overlays are left out.
    """
    limits = batch_limits(settings.usual, device, classes.num_classes)
    notes = []
    for source, size in rasters.items():
        bar = ProgressBar(
            num_blocks(size), 0, "raster", enabled=True, unit="block", last_line=False
        )
        bar.describe(printable(source.name))
        path = output / pictures.LABELS / f"{source.name}.tif"
        try:
            refuse_short_side(source.path, settings.usual.short_side_px)
            path.parent.mkdir(parents=True, exist_ok=True)
            with bar:
                is_finite = predict_raster(
                    model,
                    source.path,
                    size,
                    path,
                    form=form_of_file(source.path, form),
                    settings=settings,
                    limits=limits,
                    ids=pictures.raw_ids(classes),
                    device=device,
                    on_block=bar.update,
                )
        except DataError as error:
            notes.append(Notes(str(error)))
        except OSError as error:
            raise ExecutionError(f"{printable(path)}: cannot be written: {error}") from error
        else:
            in_parts = settings.usual.mode == "whole"
            notes.append(Notes(is_finite=is_finite, in_parts=in_parts))
    return notes


def predict_videos(
    model: nn.Module,
    videos: Sequence[Source],
    output: Path,
    *,
    form: ImageForm,
    settings: SettingsBySize,
    classes: ClassFile,
    device: torch.device,
    tint: pictures.Tint,
) -> list[Notes]:
    """Writes a video of the overlays of each; returns notes on each."""
    limits = batch_limits(settings.usual, device, classes.num_classes)
    is_finite = True

    def draw(frame: np.ndarray) -> np.ndarray:
        nonlocal is_finite
        pixels = torch.from_numpy(frame).to(device).permute(2, 0, 1).unsqueeze(0)
        size = frame.shape[0], frame.shape[1]
        with memory_failures(lambda: _no_memory(source, size, device)):
            (found,) = predict_labels(model, [pixels], settings.of(size), [size], limits)
        is_finite = is_finite and bool(found.is_finite)
        return tint.over(frame, found.label.cpu().numpy())

    notes = []
    for source in videos:
        is_finite = True
        path = output / pictures.VIDEOS / f"{source.name}.mp4"
        with os_errors_as(ExecutionError, path, "cannot be written"):
            path.parent.mkdir(parents=True, exist_ok=True)
        try:
            warning = overlay_video(source.path, path, draw)
        except DataError as error:
            notes.append(Notes(str(error)))
        else:
            notes.append(Notes(cut_short=warning, is_finite=is_finite))
    return notes


def groups_of(photos: Iterable[Photo], most: int) -> Iterator[list[Photo]]:
    """Neighbouring images with the same settings, up to `most`, whose views may share batches."""
    group: list[Photo] = []
    for photo in photos:
        if group and _batch_key(photo) != _batch_key(group[0]):
            yield group
            group = []
        group.append(photo)
        if len(group) == most or sum(x.pixels.numel() for x in group) >= _MOST_BYTES:
            yield group
            group = []
    if group:
        yield group


def _batch_key(photo: Photo) -> tuple[InferenceSettings, torch.dtype]:
    return photo.settings, photo.pixels.dtype


def _decode(
    transfer: Transfer, form: ImageForm, path: Path
) -> tuple[tuple[Tensor, np.ndarray] | None, Notes]:
    """`pixels` and `missing` of a Photo; None: the image cannot be read."""
    try:
        image, form, info = read_photo(path, form)
    except DataError as error:
        return None, Notes(str(error))
    values = image_values(image, form, printable(path))
    image, missing = ignore_missing(image, np.zeros(image.shape[:2], np.uint8), form)
    pixels = transfer.pinned(torch.from_numpy(image))
    return (pixels, missing), Notes(turned=info.orientation != 1, values=values)


def _predict(
    model: nn.Module, group: list[Photo], transfer: Transfer, limits: BatchLimits, wanted: str
) -> list[LabelMap]:
    """The predictions for a group of images; on CUDA they are only asked for."""
    settings, sizes = group[0].settings, [photo.pixels.shape[:2] for photo in group]
    slides = settings.mode == "slide"
    total = sum(num_windows(size, settings) for size in sizes) if slides else 0
    bar = ProgressBar(total, 0, "windows", enabled=total > 1, unit="window", last_line=False)
    bar.describe(printable(group[0].source.name))
    largest, source = max(sizes, key=math.prod), group[0].source
    with memory_failures(lambda: _no_memory(source, largest, transfer.device)), bar:
        moved = [transfer.to_device(photo.pixels) for photo in group]
        images = [image.permute(2, 0, 1).unsqueeze(0) for image in moved]
        asked = {"probabilities": wanted, "on_windows": bar.update}
        return predict_labels(model, images, settings, sizes, limits, **asked)


def _no_memory(source: Source, size: Size, device: torch.device) -> str:
    return (
        f"{printable(source.path)}: {size[0]}x{size[1]} px do not fit into the memory of {device}; "
        "use --set eval.batch_size=1, eval.mode=slide, or a smaller eval.crop_size"
    )


def _summarize(images: Sequence[Notes], videos: Sequence[Notes], output: Path) -> None:
    """Prints what was done; raises DataError for files that cannot be read."""
    notes = [*images, *videos]
    values = [note.values for note in notes if note.values is not None]
    kinds = f"{{{','.join(pictures.KINDS)}}}"
    for found, what, where in ((images, "images", kinds), (videos, "videos", pictures.VIDEOS)):
        if found:
            num_done = sum(not note.problem for note in found)
            print(f"{num_done} of {len(found)} {what}: {printable(output)}/{where}")
    if num_in_parts := sum(note.in_parts for note in notes):
        print(f"{num_in_parts} of them too large to be predicted as a whole: in parts")
    if turned := sum(note.turned for note in notes):
        asks = counted(turned, "of them asks", "of them ask")
        print(f"{asks} for a rotation by EXIF; it was ignored, as in training")
    for note in notes:
        if note.cut_short:
            print(f"warning: {note.cut_short}")
    if dark := find_darkness(values):
        print(f"warning: {dark.lines()[0]}")
    if infinite := sum(not note.is_finite for note in notes):
        print(
            f"warning: the scores of {counted(infinite, 'file', 'files')} are not finite, and "
            "predictions from them mean nothing; if they were computed in float16, use bfloat16"
        )
    if problems := [note.problem for note in notes if note.problem]:
        raise DataError(
            first_lines(f"{len(problems)} of {len(notes)} files cannot be read", problems)
        )
