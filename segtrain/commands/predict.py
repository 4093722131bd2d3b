"""`segtrain predict`: label maps, colour maps and overlays for images of any size.

As in training, pixels count as they are stored: a rotation in the file's EXIF is ignored, and the
command says so.
"""

import argparse
import math
import warnings
from collections.abc import Iterable, Iterator, Sequence
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
from segtrain.data.check.dark_images import Brightness, brightness, find_darkness
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.find import first_lines
from segtrain.data.read.photos import Source, find_images, read_photo
from segtrain.data.read.protect import check_pictures
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, DataError
from segtrain.evaluation.dataset import Transfer
from segtrain.evaluation.inference import LabelMap, predict_labels
from segtrain.evaluation.settings import (
    BatchLimits,
    InferenceSettings,
    SettingsBySize,
    batch_limits,
    fitting_pixels,
)
from segtrain.evaluation.windows import num_windows
from segtrain.models.memory import check_windows, memory_failures
from segtrain.models.precision import (
    eval_precision_warnings,
    float32_products,
    for_evaluation,
    to_eval_precision,
)
from segtrain.run import pictures
from segtrain.run.console import ProgressBar
from segtrain.text import counted, printable

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
    light: Brightness | None = None
    is_finite: bool = True  # whether its scores are; else its prediction means nothing


class Photo(NamedTuple):
    """An image to predict. index: among all sources. pixels: (H, W, 3) uint8, on the host."""

    index: int
    source: Source
    pixels: Tensor
    settings: InferenceSettings


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    args: source (run directory or checkpoint), inputs (files and folders), output (a directory),
        device ("auto", "cpu" or "cuda"), set (a list of `section.key=value`), overwrite.

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
    loaded = load_model(args.source, device=device)
    config = set_after_training(loaded.config, args.set, _SETTABLE, source=str(args.source))
    check_pictures("--output", output, pictures.file_names(names), config.data)
    check_windows(config, loaded.classes.num_classes, device)
    model = to_eval_precision(loaded.model, config, device)
    mode_is_given = any(text.partition("=")[0].strip() == "eval.mode" for text in args.set)
    most = fitting_pixels(device, loaded.classes.num_classes, ranks=1)
    settings = SettingsBySize.from_config(config, mode_is_given=mode_is_given, fitting_pixels=most)
    print(f"step {loaded.step}; {settings.describe()}; {device}")
    for line in eval_precision_warnings(config, device):
        print(f"warning: {line}")
    if skipped:
        print(skipped)

    with float32_products(for_evaluation(config)):
        notes = predict_images(
            model, sources, output, settings=settings, classes=loaded.classes, device=device
        )
    _summarize(notes, output)
    return EXIT_OK


def predict_images(
    model: nn.Module,
    sources: Sequence[Source],
    output: Path,
    *,
    settings: SettingsBySize,
    classes: ClassFile,
    device: torch.device,
) -> list[Notes]:
    """Writes the predictions for every image that can be read; returns notes on every image.

    Raises:
        ExecutionError: the disk is full or not writable.
        MemoryLimitError: the device's memory does not suffice for an image.
    """
    pictures.write_legend(output, classes)
    bar = ProgressBar(len(sources), 0, "predict", enabled=True, unit="image", last_line=False)
    transfer = Transfer(device)
    limits = batch_limits(settings.usual, device, classes.num_classes)
    decoded = prefetch(partial(_decode, transfer), [source.path for source in sources], _THREADS)
    notes: list[Notes] = []

    def photos() -> Iterator[Photo]:
        for i, (source, (pixels, note)) in enumerate(zip(sources, decoded, strict=True)):
            notes.append(note)
            if pixels is None:
                bar.update()
            else:
                yield Photo(i, source, pixels, settings.of(pixels.shape[:2]))

    def finished() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        groups = groups_of(photos(), limits.num_images)
        predicted = ((group, _predict(model, group, transfer, limits)) for group in groups)
        for group, found in transfer.late_to_host(predicted):
            for photo, (label, is_finite) in zip(group, found, strict=True):
                notes[photo.index] = notes[photo.index]._replace(is_finite=bool(is_finite.numpy()))
                yield photo.source.name, photo.pixels.numpy(), label.numpy()
                bar.update()

    def write(prediction: tuple[str, np.ndarray, np.ndarray]) -> None:
        pictures.write_prediction(output, *prediction, classes)

    with bar, closing(decoded), closing(prefetch(write, finished(), _THREADS)) as written:
        for _ in written:
            pass
    return notes


def groups_of(photos: Iterable[Photo], most: int) -> Iterator[list[Photo]]:
    """Neighbouring images with the same settings, up to `most`, whose views may share batches."""
    group: list[Photo] = []
    for photo in photos:
        if group and photo.settings != group[0].settings:
            yield group
            group = []
        group.append(photo)
        if len(group) == most or sum(x.pixels.numel() for x in group) >= _MOST_BYTES:
            yield group
            group = []
    if group:
        yield group


def _decode(transfer: Transfer, path: Path) -> tuple[Tensor | None, Notes]:
    try:
        image, depth, orientation = read_photo(path)
    except DataError as error:
        return None, Notes(str(error))
    light = brightness(image, depth, printable(path))
    return transfer.pinned(torch.from_numpy(image)), Notes(turned=orientation != 1, light=light)


def _predict(
    model: nn.Module, group: list[Photo], transfer: Transfer, limits: BatchLimits
) -> list[LabelMap]:
    """The predictions for a group of images; on CUDA they are only asked for."""
    settings, sizes = group[0].settings, [photo.pixels.shape[:2] for photo in group]
    slides = settings.mode == "slide"
    total = sum(num_windows(size, settings) for size in sizes) if slides else 0
    bar = ProgressBar(total, 0, "windows", enabled=total > 1, unit="window", last_line=False)
    bar.describe(printable(group[0].source.name))
    height, width = max(sizes, key=math.prod)
    message = (
        f"{printable(group[0].source.path)}: {height}x{width} px do not fit into the memory of "
        f"{transfer.device}; use --set eval.batch_size=1, eval.mode=slide, or a smaller "
        "eval.crop_size"
    )
    with memory_failures(lambda: message), bar:
        moved = [transfer.to_device(photo.pixels) for photo in group]
        images = [image.permute(2, 0, 1).unsqueeze(0) for image in moved]
        return predict_labels(model, images, settings, sizes, limits, on_windows=bar.update)


def _summarize(notes: Sequence[Notes], output: Path) -> None:
    """Prints what was done; raises DataError for images that cannot be read."""
    lights = [note.light for note in notes if note.light is not None]
    kinds = f"{{{','.join(pictures.KINDS)}}}"
    print(f"{len(lights)} of {len(notes)} images: {printable(output)}/{kinds}")
    if turned := sum(note.turned for note in notes):
        asks = counted(turned, "of them asks", "of them ask")
        print(f"{asks} for a rotation by EXIF; it was ignored, as in training")
    if dark := find_darkness(lights):
        print(f"warning: {dark.text}: {dark.names[0]}")
    if infinite := sum(not note.is_finite for note in notes):
        print(
            f"warning: the scores of {counted(infinite, 'image', 'images')} are not finite, and "
            "predictions from them mean nothing; if they were computed in float16, use bfloat16"
        )
    if problems := [note.problem for note in notes if note.problem]:
        raise DataError(
            first_lines(f"{len(problems)} of {len(notes)} images cannot be read", problems)
        )
