"""`segtrain predict`: label maps, colour maps and overlays for images of any size.

Pixels count as they are stored, as in training: a rotation that a camera noted in the file's EXIF
is ignored, and said so.
"""

import argparse
import dataclasses
import io
import os
from collections import Counter, deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from itertools import islice
from pathlib import Path
from typing import NamedTuple, TypeVar

import numpy as np
import torch
from PIL import Image, UnidentifiedImageError
from torch import nn

from segtrain.checkpoint.contents import LoadedModel, load_model
from segtrain.config import Config, override_config
from segtrain.data.brightness import Brightness, brightness, lost_bits, whole_split_problem
from segtrain.data.classes import ClassFile
from segtrain.data.decode import (
    MAX_PIXELS,
    exif_orientation,
    read_bytes,
    read_header,
    read_image,
)
from segtrain.data.layouts import IMAGE_SUFFIXES, OTHER_IMAGES, first_lines
from segtrain.data.protect import check_pictures
from segtrain.distributed.collectives import device_for
from segtrain.errors import EXIT_OK, ConfigError, DataError, ExecutionError
from segtrain.evaluation.inference import InferenceSettings, num_windows, predict_label, view_size
from segtrain.files import NotRegularError, refuse_odd, walk
from segtrain.models.memory import check_windows, is_out_of_memory
from segtrain.run import pictures
from segtrain.run.log import ProgressBar
from segtrain.text import printable

# Training reads PNG and JPEG only; predictions are wanted for whatever a camera or scanner made.
MORE_SUFFIXES = (".bmp", ".tif", ".tiff", ".webp")
SUFFIXES = (*IMAGE_SUFFIXES, *MORE_SUFFIXES)
_MORE_FORMATS = ("BMP", "TIFF", "WEBP")
_MORE_MODES = ("1", "L", "LA", "P", "RGB", "RGBA", "RGBX")

_BITS_PER_SAMPLE = 258
# The inverse of what ImageOps.exif_transpose does for each orientation.
_TURN_BACK = {
    2: Image.Transpose.FLIP_LEFT_RIGHT,
    3: Image.Transpose.ROTATE_180,
    4: Image.Transpose.FLIP_TOP_BOTTOM,
    5: Image.Transpose.TRANSPOSE,
    6: Image.Transpose.ROTATE_90,
    7: Image.Transpose.TRANSVERSE,
    8: Image.Transpose.ROTATE_270,
}
_SHOWN = 10

# Everything else was decided when the model was trained.
_SETTABLE = ("eval.", "data.short_side_px", "train.precision")

LABELS, COLORS, OVERLAYS = "labels", "colors", "overlays"

# Decoding and PNG compression happen outside the interpreter lock; two threads of each keep up with
# a device that takes 20 ms for an image of two million pixels.
_THREADS = 2

# An image of more pixels is predicted by windows, unless the command line asks for whole images.
# Twice the pixels of an image of Cityscapes; the memory that a whole image takes grows with them.
MAX_WHOLE_PIXELS = 2**22

# The least height and width of the windows for such images, where eval.crop_size does not set them.
# The training crop may be tiny: 12 megapixels would take thousands of windows, most of them border.
LARGE_WINDOW_PX = 1024

T = TypeVar("T")
R = TypeVar("R")


class Source(NamedTuple):
    """An image and the name of what is predicted for it: a relative path without suffix, unique."""

    path: Path
    name: str


class Decoded(NamedTuple):
    """An image (H, W, 3) uint8 RGB, or why there is none.

    turned: EXIF asks for a rotation.
    light: how bright it is, None without an image.
    """

    image: np.ndarray | None
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
    _check_output(output, sources, overwrite=args.overwrite)
    device = device_for(args.device)
    loaded = load_model(args.source, device=device)
    config = _config(loaded, args)
    names = [f"{kind}/{one.name}" for one in sources for kind in (LABELS, COLORS, OVERLAYS)]
    check_pictures("--output", output, names, config.data)
    if config.train.precision == "float64":
        loaded.model.double()
    if config.train.channels_last and device.type == "cuda":
        loaded.model.to(memory_format=torch.channels_last)
    check_windows(config, loaded.classes.num_classes, device)
    settings = InferenceSettings.from_config(config)
    large = _settings_of_large_images(settings, config, args.set)
    print(f"step {loaded.step}; {_describe(settings, large)}; {device}")
    if skipped := skipped_files(args.inputs, output):
        print(skipped)
    problems, turned, seen = predict_images(
        loaded.model,
        sources,
        output,
        settings=settings,
        large=large,
        classes=loaded.classes,
        device=device,
    )
    done = f"{len(sources) - len(problems)} of {len(sources)} images"
    print(f"{done}: {printable(output)}/{{{LABELS},{COLORS},{OVERLAYS}}}")
    if turned:
        print(f"{turned} of them ask for a rotation in their EXIF; it was ignored, as in training")
    if lost := [one for one in seen if one.lost]:
        print(f"warning: {len(lost)} {lost_bits(lost)}, if these are not just dark: {lost[0].name}")
    elif problem := whole_split_problem(seen):
        print(f"warning: such as {seen[0].name}: {problem}")
    if problems:
        raise DataError(
            first_lines(f"{len(problems)} of {len(sources)} images cannot be read", problems)
        )
    return EXIT_OK


def find_images(inputs: Sequence[str | Path], output: Path) -> list[Source]:
    """The images among `inputs`, files or folders searched to any depth, each once.

    Names are relative to the folder given. A name that another image already has, whatever the
    case of its letters, gets the suffix of its file and then a number behind it. What lies in
    `output` is left out, so that a second run does not predict the pictures of the first.

    Raises:
        DataError: an input is missing, of another format, or a folder without images.
    """
    found: list[Source] = []
    problems = []
    for given in map(Path, inputs):
        if given.is_dir():
            inside = [
                path for path in _walk(given) if not path.resolve().is_relative_to(output.resolve())
            ]
            found += [
                Source(path, path.relative_to(given).with_suffix("").as_posix()) for path in inside
            ]
            if given.resolve().is_relative_to(output.resolve()):
                problems.append(
                    f"{printable(given)}: lies in --output, where predictions are no input; choose "
                    "another directory for them"
                )
            elif not inside:
                problems.append(f"{printable(given)}: no images ({' '.join(SUFFIXES)}) in it")
        elif not given.exists():
            problems.append(f"{printable(given)}: no such file or folder")
        elif given.suffix.lower() in set(OTHER_IMAGES) - set(SUFFIXES):
            problems.append(
                f"{printable(given)}: images of this format are not read; convert it to PNG or JPEG"
            )
        elif given.suffix.lower() not in SUFFIXES:
            problems.append(f"{printable(given)}: not an image ({' '.join(SUFFIXES)})")
        else:
            found.append(Source(given, given.stem))
    if problems:
        raise DataError(first_lines("input", problems))
    return _unique(found)


def skipped_files(inputs: Sequence[str | Path], output: Path) -> str:
    """How many visible files of the folders among `inputs` are not predicted; empty if none.

    A line for images of other formats, with the repair, and a line for files that are no images.
    """
    counts: Counter[str] = Counter()
    for folder in {given.resolve() for given in map(Path, inputs) if given.is_dir()}:
        for here, files in walk(folder, hidden=True):
            if not Path(here).is_relative_to(output.resolve()):
                suffixes = (Path(name).suffix.lower() for name in files if name[0] != ".")
                counts.update(suffix for suffix in suffixes if suffix not in SUFFIXES)
    unread = Counter({end: n for end, n in counts.items() if end in OTHER_IMAGES})
    counts -= unread
    lines = []
    if unread:
        what = f"skipped {unread.total()} images of formats that are not read"
        lines.append(f"{what}: {_by_suffix(unread)}; convert them to PNG or JPEG")
    if counts:
        what = f"skipped {counts.total()} files that are no images"
        lines.append(f"{what}: {_by_suffix(counts)}")
    return "\n".join(lines)


def _by_suffix(counts: Counter[str]) -> str:
    shown = sorted(counts.most_common(_SHOWN), key=lambda one: (-one[1], not one[0], one[0]))
    named = [f"{count} {printable(suffix, _SHOWN) or 'without suffix'}" for suffix, count in shown]
    return ", ".join(named) + (", others" if len(counts) > _SHOWN else "")


def predict_images(
    model: nn.Module,
    sources: Sequence[Source],
    output: Path,
    *,
    settings: InferenceSettings,
    large: InferenceSettings,
    classes: ClassFile,
    device: torch.device,
) -> tuple[list[str], int, list[Brightness]]:
    """Writes `output`/{labels,colors,overlays}/<name>.png for every image that can be read.

    Label maps hold the raw ids of the class file (grey; 16 bits if an id exceeds 255). Images of
    more than MAX_WHOLE_PIXELS are predicted with the settings `large`. Returns the problems, a line
    for each image that was left out, the number with a rotation in EXIF, and how bright each image
    is.

    Raises:
        ExecutionError: the disk is full or not writable, or the device's memory does not suffice.
    """
    ids = np.array(classes.write_ids)
    ids = ids.astype(np.uint8 if ids.max() <= 255 else np.uint16)  # a class file allows no more
    problems, turned, seen = [], 0, []

    def write(name: str, image: np.ndarray, pred: np.ndarray) -> None:
        colors = pictures.colorize(pred, classes.palette)
        blended = pictures.overlay(image, pred, classes.palette)
        for folder, picture in ((LABELS, ids[pred]), (COLORS, colors), (OVERLAYS, blended)):
            pictures.write_png(output / folder / f"{name}.png", picture)

    decoded = _ahead(_decode, [source.path for source in sources])
    bar = ProgressBar(len(sources), 0, "predict", enabled=True, unit="image", last_line=False)
    try:
        pictures.write_png(output / "legend.png", pictures.legend(classes.names, classes.palette))
        with _Writer(write) as writer, bar:
            for source, (image, problem, is_turned, light) in zip(sources, decoded, strict=True):
                turned += is_turned
                seen += [] if light is None else [light]
                if image is None:
                    problems.append(problem)
                else:
                    how = _settings_for(image.shape[:2], settings, large)
                    writer.put(source.name, image, _predict(model, image, how, device, source))
                bar.update()
    except OSError as error:
        raise ExecutionError(f"{error.filename or output}: {error.strerror or error}") from error
    return problems, turned, seen


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


def _settings_of_large_images(
    settings: InferenceSettings, config: Config, overrides: Sequence[str]
) -> InferenceSettings:
    """`settings` with sliding windows, unless `overrides` say how images are taken.

    Windows are those of `eval.crop_size`; where that is not set, at least LARGE_WINDOW_PX a side.
    """
    if any(text.partition("=")[0].strip() == "eval.mode" for text in overrides):
        return settings
    crop_size = settings.crop_size
    if settings.mode == "whole" and config.eval.crop_size is None:
        crop_size = (max(crop_size[0], LARGE_WINDOW_PX), max(crop_size[1], LARGE_WINDOW_PX))
    return dataclasses.replace(settings, mode="slide", crop_size=crop_size)


def _describe(settings: InferenceSettings, large: InferenceSettings) -> str:
    if settings == large:
        return settings.describe()
    windows = large.describe().partition(";")[0]
    return f"{settings.describe()}; above {MAX_WHOLE_PIXELS / 1e6:.1f} megapixels {windows}"


def _settings_for(
    size: tuple[int, int], settings: InferenceSettings, large: InferenceSettings
) -> InferenceSettings:
    """Those for an image of `size`, (height, width); no window is padded to LARGE_WINDOW_PX."""
    if _is_whole(size, settings):
        return settings
    sides = view_size(size, settings.short_side_px, 1.0)
    height, width = (
        min(window, max(crop, side))
        for window, crop, side in zip(large.crop_size, settings.crop_size, sides, strict=True)
    )
    return dataclasses.replace(large, crop_size=(height, width))


def _is_whole(size: tuple[int, int], settings: InferenceSettings) -> bool:
    """Whether an image of `size`, (height, width), is small enough to be taken as a whole."""
    height, width = view_size(size, settings.short_side_px, 1.0)
    return height * width <= MAX_WHOLE_PIXELS


def _walk(folder: Path) -> Iterator[Path]:
    try:
        for place, files in walk(folder, hidden=True):
            yield from (place / name for name in files if Path(name).suffix.lower() in SUFFIXES)
    except OSError as error:
        where = printable(error.filename or folder)
        raise DataError(f"{where}: cannot be read: {error.strerror}") from error


def _unique(found: Iterable[Source]) -> list[Source]:
    sources: dict[Path, Source] = {}
    taken: set[str] = set()
    for path, name in found:
        if path.resolve() in sources:
            continue
        candidates = [name, f"{name}_{path.suffix[1:].lower()}"]
        number = 2
        while candidates[0].casefold() in taken:
            candidates = candidates[1:] or [f"{name}_{number}"]
            number += len(candidates) == 1
        taken.add(candidates[0].casefold())
        sources[path.resolve()] = Source(path, candidates[0])
    return list(sources.values())


def _decode(path: Path) -> Decoded:
    try:
        if path.suffix.lower() in MORE_SUFFIXES:
            image, depth, orientation = _read_other(path)
            light = brightness(image, depth, printable(path))
            return Decoded(image, turned=orientation != 1, light=light)
        header, image = read_header(path), read_image(path)
        light = brightness(image, header.depth, printable(path))
        return Decoded(image, turned=header.orientation != 1, light=light)
    except DataError as error:
        return Decoded(None, str(error))


def _read_other(path: Path) -> tuple[np.ndarray, int, int]:
    """A BMP, TIFF or WebP image, (H, W, 3) uint8 RGB; of several pages the first.

    With it the depth in bits and the EXIF orientation.
    """
    try:
        with Image.open(io.BytesIO(read_bytes(path)), formats=_MORE_FORMATS) as image:
            if image.width * image.height > MAX_PIXELS:
                raise DataError(f"{printable(path)}: more than {MAX_PIXELS:,} pixels; cut it up")
            if image.mode not in _MORE_MODES:
                raise DataError(
                    f"{printable(path)}: the image is {image.mode}; convert it to 8-bit RGB"
                )
            is_tiff = image.format == "TIFF"
            depth = int(np.max(image.tag_v2.get(_BITS_PER_SAMPLE, 8))) if is_tiff else 8
            orientation = exif_orientation(image)
            image.load()
            if orientation != 1 and exif_orientation(image) == 1:
                # Pillow has turned a TIFF as EXIF says, and dropped the note.
                stored = image.transpose(_TURN_BACK[orientation])
            else:
                stored = image
            return np.array(stored.convert("RGB")), depth, orientation
    except DataError:
        raise
    except UnidentifiedImageError as error:  # whose text names an object of Python
        raise DataError(f"{printable(path)}: not an image of a known kind") from error
    except Exception as error:  # Pillow's parsers raise a dozen kinds on damaged bytes
        raise DataError(f"{printable(path)}: damaged image: {error}") from error


def _config(loaded: LoadedModel, args: argparse.Namespace) -> Config:
    foreign = [text for text in args.set if not text.strip().startswith(_SETTABLE)]
    if foreign:
        raise ConfigError(
            "\n".join(
                f"--set {text}: no effect on predictions; only {_SETTABLE[0]}* and "
                f"{', '.join(_SETTABLE[1:])} have one"
                for text in foreign
            )
        )
    return override_config(loaded.config, args.set, source=str(args.source))


def _check_output(output: Path, sources: Sequence[Source], *, overwrite: bool) -> None:
    if output.exists() and not output.is_dir():
        raise ConfigError(f"--output {printable(output)}: is a file; expected a directory")
    names = [f"{kind}/{s.name}.png" for s in sources for kind in (LABELS, COLORS, OVERLAYS)]
    for name in ("legend.png", *names):
        try:
            refuse_odd(output / name)
        except NotRegularError as error:
            place = printable(output / name)
            raise ConfigError(f"--output {place}: {error.strerror}") from None
        except OSError:
            continue  # the folder cannot be read; writing will say so
    there = [s.name for s in sources if os.path.lexists(output / LABELS / f"{s.name}.png")]
    if there and not overwrite:
        raise ConfigError(
            f"--output {printable(output)}: holds predictions for {len(there)} of these "
            f"{len(sources)} images, such as {LABELS}/{printable(there[0])}.png; "
            "choose another directory or pass --overwrite"
        )


def _ahead(function: Callable[[T], R], items: Iterable[T]) -> Iterator[R]:
    """`function` of every item, in order, computed by threads a few items ahead."""
    left = iter(items)
    with ThreadPoolExecutor(_THREADS, thread_name_prefix="decode") as pool:
        waiting = deque(pool.submit(function, item) for item in islice(left, _THREADS + 1))
        try:
            while waiting:
                result = waiting.popleft().result()
                waiting.extend(pool.submit(function, item) for item in islice(left, 1))
                yield result
        finally:
            for future in waiting:
                future.cancel()


class _Writer:
    """Calls `function` in threads, a few calls behind; its errors surface in `put` and at exit."""

    def __init__(self, function: Callable[..., None]) -> None:
        self._function = function
        self._pool = ThreadPoolExecutor(_THREADS, thread_name_prefix="write")
        self._waiting: deque[Future[None]] = deque()

    def put(self, *args: object) -> None:
        if len(self._waiting) > _THREADS:
            self._waiting.popleft().result()
        self._waiting.append(self._pool.submit(self._function, *args))

    def __enter__(self) -> "_Writer":
        return self

    def __exit__(self, kind: type | None, *rest: object) -> None:
        self._pool.shutdown(wait=True, cancel_futures=kind is not None)
        if kind is None:
            for future in self._waiting:
                future.result()
