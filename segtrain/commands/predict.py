"""`segtrain predict`: label maps, colour maps and overlays for images of any size.

As in training, pixels count as they are stored: a rotation in the file's EXIF is ignored, and the
command says so.
"""

import argparse
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import NamedTuple

import numpy as np
import torch
from torch import nn

from segtrain.checkpoint.loading import load_model
from segtrain.config import Config, override_config
from segtrain.data.brightness import Brightness, brightness, lost_bits, whole_split_problem
from segtrain.data.classes import ClassFile
from segtrain.data.decode_more import read_photo
from segtrain.data.find_images import Source, find_images, skipped_files
from segtrain.data.listing import first_lines
from segtrain.data.prefetch import prefetch
from segtrain.data.protect import check_pictures
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, DataError, ExecutionError
from segtrain.evaluation.inference import predict_label
from segtrain.evaluation.large_images import SettingsBySize
from segtrain.evaluation.settings import InferenceSettings
from segtrain.evaluation.windows import num_windows
from segtrain.models.memory import check_windows, is_out_of_memory
from segtrain.models.precision import float32_products
from segtrain.run import prediction_files
from segtrain.run.progress import ProgressBar
from segtrain.text import printable

# Everything else was decided when the model was trained.
_SETTABLE = ("eval.", "data.short_side_px", "train.precision")

# Two threads each for decoding and PNG compression keep up with a device that takes 20 ms for an
# image of two million pixels.
_THREADS = 2


class Notes(NamedTuple):
    """What the command says about an image at the end.

    problem: why it cannot be read; empty if it can.
    turned: EXIF asks for a rotation.
    light: how bright it is; None without an image.
    """

    problem: str = ""
    turned: bool = False
    light: Brightness | None = None


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    args: source (run directory or checkpoint), inputs (files and folders), output (a directory),
        device ("auto", "cpu" or "cuda"), set (a list of `section.key=value`), overwrite.

    Raises:
        DataError: nothing to predict; or, after all others are done, images that cannot be read.
    """
    output = Path(args.output)
    sources = find_images(args.inputs, output)
    names = [source.name for source in sources]
    prediction_files.check_output(output, names, overwrite=args.overwrite)

    device = device_for(args.device)
    loaded = load_model(args.source, device=device)
    config = _config(loaded.config, args)
    check_pictures("--output", output, prediction_files.file_names(names), config.data)
    check_windows(config, loaded.classes.num_classes, device)
    model = _prepare(loaded.model, config, device)
    mode_is_given = any(text.partition("=")[0].strip() == "eval.mode" for text in args.set)
    settings = SettingsBySize.from_config(config, mode_is_given=mode_is_given)
    print(f"step {loaded.step}; {settings.describe()}; {device}")
    for line in skipped_files(args.inputs, output):
        print(line)

    with float32_products(config.train):
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
        ExecutionError: the disk is full or not writable, or the device's memory does not suffice.
    """
    prediction_files.write_legend(output, classes)
    bar = ProgressBar(len(sources), 0, "predict", enabled=True, unit="image", last_line=False)
    decoded = prefetch(_decode, [source.path for source in sources], _THREADS)
    notes = []

    def predictions() -> Iterator[tuple[str, np.ndarray, np.ndarray]]:
        for source, (image, note) in zip(sources, decoded, strict=True):
            notes.append(note)
            if image is not None:
                pred = _predict(model, image, settings.of(image.shape[:2]), device, source)
                yield source.name, image, pred
            bar.update()

    def write(prediction: tuple[str, np.ndarray, np.ndarray]) -> None:
        prediction_files.write_prediction(output, *prediction, classes)

    with bar, closing(decoded), closing(prefetch(write, predictions(), _THREADS)) as written:
        for _ in written:
            pass
    return notes


def _config(trained: Config, args: argparse.Namespace) -> Config:
    foreign = [
        text
        for text in map(str.strip, args.set)
        if not text.startswith(_SETTABLE) or text.startswith("eval.statistics")
    ]
    if foreign:
        raise ConfigError(
            "\n".join(
                f"--set {text}: no effect on predictions; only {_SETTABLE[0]}* and "
                f"{', '.join(_SETTABLE[1:])} have one"
                for text in foreign
            )
        )
    return override_config(trained, args.set, source=str(args.source))


def _prepare(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    if config.train.precision == "float64":
        model.double()
    if config.train.channels_last and device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    return model


def _decode(path: Path) -> tuple[np.ndarray | None, Notes]:
    try:
        image, depth, orientation = read_photo(path)
    except DataError as error:
        return None, Notes(str(error))
    light = brightness(image, depth, printable(path))
    return image, Notes(turned=orientation != 1, light=light)


def _predict(
    model: nn.Module,
    image: np.ndarray,
    settings: InferenceSettings,
    device: torch.device,
    source: Source,
) -> np.ndarray:
    pixels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0).to(device)
    size = image.shape[:2]
    total = num_windows(size, settings) if settings.mode == "slide" else 0
    bar = ProgressBar(total, 0, "windows", enabled=total > 1, unit="window", last_line=False)
    bar.describe(printable(source.name))
    try:
        with bar:
            label = predict_label(model, pixels, settings, size, on_windows=bar.update)
            return label.cpu().numpy()
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        height, width = size
        how = "predict by windows: --set eval.mode=slide"
        if settings.mode == "slide":
            how = "use smaller windows: --set eval.crop_size=[HEIGHT,WIDTH]"
        raise ExecutionError(
            f"{printable(source.path)}: {height}x{width} px do not fit into the memory of "
            f"{device}; {how}"
        ) from error


def _summarize(notes: Sequence[Notes], output: Path) -> None:
    """Prints what was done.

    Raises:
        DataError: images that cannot be read.
    """
    problems = [note.problem for note in notes if note.problem]
    turned = sum(note.turned for note in notes)
    lights = [note.light for note in notes if note.light is not None]
    kinds = f"{{{','.join(prediction_files.KINDS)}}}"
    print(f"{len(lights)} of {len(notes)} images: {printable(output)}/{kinds}")
    if turned:
        print(f"{turned} of them ask for a rotation in their EXIF; it was ignored, as in training")
    if lost := [light for light in lights if light.lost]:
        print(f"warning: {len(lost)} {lost_bits(lost)}, if these are not just dark: {lost[0].name}")
    elif problem := whole_split_problem(lights):
        print(f"warning: such as {lights[0].name}: {problem}")
    if problems:
        raise DataError(
            first_lines(f"{len(problems)} of {len(notes)} images cannot be read", problems)
        )
