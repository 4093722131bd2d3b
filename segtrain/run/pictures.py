"""Labels and predictions as pictures for people: TensorBoard, `segtrain eval` and `predict`.

OpenCV 5 has Latin, Greek, Cyrillic, Chinese, Japanese and Korean letters; for older versions there
is Pillow's font, which has ASCII. Names in other letters are told apart by their numbers.

Every picture is an (H, W, 3) uint8 RGB array. Labels are (H, W) uint8 train ids or IGNORE_INDEX.
Where classes overlap they are (H, W, K): 1 where a class is, 0 where not, or IGNORE_INDEX.
"""

import io
import math
import os
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from PIL import Image, ImageDraw, ImageFont

from segtrain.data.read.classes import ClassFile
from segtrain.data.sample.geometry import by_bands
from segtrain.errors import ConfigError, ExecutionError
from segtrain.files import check_replaceable, os_errors_as, write_atomic
from segtrain.text import MAX_NAME, distinct, first_of, printable
from segtrain.types import IGNORE_INDEX, Batch

# Images that TensorBoard shows at the start of training and at an evaluation.
NUM_IMAGES = 4
# A little above regular (400), whose lines are thin at these sizes.
_WEIGHT = 500


def text_mask(text: str, size_px: int) -> np.ndarray:
    """One line of `text`: (height, width) uint8, 255 where there is ink.

    The height depends on `size_px` only.
    """
    height, baseline = round(1.4 * size_px), round(1.05 * size_px)
    if hasattr(cv2, "FontFace"):
        font = cv2.FontFace("sans")
        left, _, width, _ = cv2.getTextSize((0, 0), text, (0, 0), font, size_px, _WEIGHT)
        mask = np.zeros((height, max(1, left + width + 1)), dtype=np.uint8)
        cv2.putText(mask, text, (0, baseline), (255,), font, size_px, _WEIGHT)
        return mask
    font = ImageFont.load_default(size_px)
    picture = Image.new("L", (max(1, round(font.getlength(text)) + 1), height))
    ImageDraw.Draw(picture).text((0, baseline), text, fill=255, font=font, anchor="ls")
    return np.array(picture)


def class_labels(names: Sequence[str], ids: Iterable[int] | None = None) -> list[str]:
    """A label for each class: its id, by default its position in the class file, and its name.

    Numbers tell names apart that are cut, or in letters that the font lacks.
    """
    ids = range(len(names)) if ids is None else ids
    return [f"{i} {printable(name, MAX_NAME)}" for i, name in zip(ids, names, strict=True)]


Rgb = tuple[int, int, int]

BLACK, WHITE = (0, 0, 0), (255, 255, 255)
_INK = (32, 32, 32)
_WRONG, _RIGHT, _IGNORED = (228, 26, 28), (235, 235, 235), (128, 128, 128)
_ERRORS = {"errors: wrong": _WRONG, "errors: right": _RIGHT, "errors: ignored": _IGNORED}
_FONT_PX = 14
_LINE_PX = 20
_GAP_PX = 6


def as_rgb(image: np.ndarray, value_range: tuple[float, float] | None) -> np.ndarray:
    """An image (H, W, C) as stored, to look at: (H, W, 3) uint8.

    The first three channels are shown as red, green and blue, of fewer the first one as grey.
    value_range: `data.value_range`; the values that are black and white.
    """
    if image.dtype == np.uint8 and image.shape[2] == 3 and value_range is None:
        return image
    top = np.iinfo(image.dtype).max if image.dtype.kind == "u" else 255
    low, high = value_range or (0, top)
    shown = image[..., :3] if image.shape[2] >= 3 else image[..., :1]
    scaled = np.rint((shown.astype(np.float32) - low) * (255 / (high - low)))
    return np.broadcast_to(scaled.clip(0, 255), (*image.shape[:2], 3)).astype(np.uint8)


def colorize(label: np.ndarray, palette: Sequence[Rgb]) -> np.ndarray:
    """`label` in the colors of its classes; black for every value that is no class.

    Where classes overlap in the mean of theirs.
    """
    if label.ndim == 3:
        present = (label == 1).astype(np.float32)
        sums = present @ np.array(palette, np.float32)
        return np.rint(sums / np.maximum(present.sum(2, keepdims=True), 1)).astype(np.uint8)
    table = np.zeros((256, 3), dtype=np.uint8)
    table[: len(palette)] = palette
    return table[label]


def overlay(
    image: np.ndarray, label: np.ndarray, palette: Sequence[Rgb], alpha: float = 0.5
) -> np.ndarray:
    """`image` tinted with the colors of `label`; `alpha` is their opacity.

    Ignored pixels and a black class, usually the background, are not tinted.
    """
    colors = colorize(label, palette)
    mixed = cv2.addWeighted(image, 1 - alpha, colors, alpha, 0)
    # Blended with black they would be dimmed: the image is put back there.
    clear = (colors == BLACK).all(axis=2)  # ignored pixels are black too
    mixed[clear] = image[clear]
    return mixed


def error_map(label: np.ndarray, pred: np.ndarray) -> np.ndarray:
    """Red where `pred` is wrong, near white where it is right, grey where the label is ignored."""
    ignored = label == IGNORE_INDEX
    wrong = (label != pred) & ~ignored
    if label.ndim == 3:  # wrong in one class, ignored in all
        wrong, ignored = wrong.any(2), ignored.all(2)
    picture = np.full((*wrong.shape, 3), _RIGHT, dtype=np.uint8)
    picture[wrong] = _WRONG
    picture[ignored] = _IGNORED
    return picture


def legend(labels: Sequence[str], palette: Sequence[Rgb], width: int = 640) -> np.ndarray:
    """Colors and what they mean, in as many columns as fit into `width` pixels."""
    text_px = max(text_mask(label, _FONT_PX).shape[1] for label in labels)
    column_px = text_px + _LINE_PX + 3 * _GAP_PX
    num_rows = math.ceil(len(labels) / max(1, width // column_px))
    picture = Image.new("RGB", (width, num_rows * _LINE_PX + _GAP_PX), WHITE)
    draw = ImageDraw.Draw(picture)
    for i, (label, color) in enumerate(zip(labels, palette, strict=True)):
        # Down the columns, so that neighbours in the class file stay neighbours.
        x = i // num_rows * column_px + _GAP_PX
        y = i % num_rows * _LINE_PX + _GAP_PX
        draw.rectangle((x, y, x + _FONT_PX, y + _FONT_PX), fill=tuple(color), outline=_INK)
        _text(draw, (x + _LINE_PX, y + _FONT_PX // 2), label)
    return np.array(picture)


def panel(
    image: np.ndarray,
    label: np.ndarray,
    pred: np.ndarray,
    *,
    palette: Sequence[Rgb],
    names: Sequence[str],
    title: str = "",
    max_side_px: int = 512,
) -> np.ndarray:
    """Image, label, prediction and errors side by side, each at most `max_side_px` long.

    The title is above; below are the legend and the colors of the errors. All three arrays have the
    same height and width.
    """
    shrink = min(1.0, max_side_px / max(label.shape[:2]))
    height, width = (max(1, round(side * shrink)) for side in label.shape[:2])
    image = cv2.resize(image, (width, height), interpolation=cv2.INTER_AREA)
    label, pred = (
        by_bands(lambda band: cv2.resize(band, (width, height), interpolation=cv2.INTER_NEAREST), x)
        for x in (label, pred)
    )
    parts = {
        "image": image,
        "label": overlay(image, label, palette, alpha=0.6),
        "prediction": overlay(image, pred, palette, alpha=0.6),
        "errors": error_map(label, pred),
    }
    # A gap after each part but the last.
    gap = np.full((height, _GAP_PX, 3), WHITE, dtype=np.uint8)
    row = np.hstack([x for part in parts.values() for x in (part, gap)][:-1])
    headers = [_header([printable(title, 2 * MAX_NAME)], row.shape[1], step_px=0)] if title else []
    headers.append(_header(list(parts), row.shape[1], step_px=width + _GAP_PX))
    keys = [
        legend(class_labels(names), palette, row.shape[1]),
        legend(list(_ERRORS), list(_ERRORS.values()), row.shape[1]),
    ]
    return np.vstack([*headers, row, *keys])


def spread(total: int, num: int) -> set[int]:
    """Up to `num` of `total` images to show, spread evenly: neighbours are often alike."""
    return set(np.linspace(0, total - 1, num).round().astype(int).tolist())


def training_picture(
    batch: Batch,
    shown: Callable[[np.ndarray], np.ndarray],
    key: tuple[Sequence[str], Sequence[Rgb]],
    value_range: tuple[float, float] | None,
) -> np.ndarray:
    """The first crops of a batch above their labels, with the legend.

    shown, key: as of `Task`. value_range: see `as_rgb`.
    """
    names, palette = key
    columns = []
    for image, label in zip(batch.images[:NUM_IMAGES], batch.labels, strict=False):
        pixels = as_rgb(image.permute(1, 2, 0).numpy(), value_range)
        labelled = overlay(pixels, shown(label.numpy()), palette, alpha=0.6)
        columns.append(np.pad(np.vstack([pixels, labelled]), ((0, 4), (0, 4), (0, 0))))
    row = np.hstack(columns)
    return np.vstack([row, legend(class_labels(names), palette, row.shape[1])])


def write_png(path: Path, picture: np.ndarray) -> None:
    """Writes a picture, or a label of one channel (uint8 or uint16), atomically; makes its folder.

    ExecutionError if the disk is full, or `path` cannot be written or is no regular file.
    """
    _write(path, to_png(picture))


def write_indexed_png(path: Path, indices: np.ndarray, palette: Sequence[Rgb]) -> None:
    """As `write_png`: a PNG of `indices` (H, W) uint8 into `palette`, its colours from index 0."""
    picture = Image.fromarray(indices)
    picture.putpalette([value for color in palette for value in color])
    data = io.BytesIO()
    picture.save(data, "PNG")
    _write(path, data.getvalue())


def write_bands(path: Path, bands: np.ndarray) -> None:
    """As `write_png`: a TIFF of (H, W, K), a band a class."""
    import tifffile

    data = io.BytesIO()
    options = {"photometric": "minisblack", "metadata": None, "compression": "deflate"}
    options |= {"planarconfig": "separate"} if bands.shape[2] > 1 else {}
    tifffile.imwrite(data, np.moveaxis(bands, 2, 0), **options)
    _write(path, data.getvalue())


def to_png(picture: np.ndarray) -> bytes:
    """The file of a picture, or of a label of one channel (uint8 or uint16).

    In memory, because cv2.imwrite only returns False when the disk is full.
    """
    if picture.ndim == 3:
        picture = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
    ok, data = cv2.imencode(".png", picture)
    assert ok, "PNG holds any 8 or 16 bit picture"
    return data.tobytes()


def _write(path: Path, data: bytes) -> None:
    with os_errors_as(ExecutionError, path, "cannot write the picture"):
        path.parent.mkdir(parents=True, exist_ok=True)
        check_replaceable(path)
        write_atomic(path, data, durable=False)


def _header(texts: Sequence[str], width: int, step_px: int) -> np.ndarray:
    picture = Image.new("RGB", (width, _LINE_PX), WHITE)
    draw = ImageDraw.Draw(picture)
    for i, text in enumerate(texts):
        # From left to right: each hides the end of an overlong text before it.
        draw.rectangle((i * step_px, 0, width, _LINE_PX), fill=WHITE)
        _text(draw, (i * step_px, _LINE_PX // 2), text)
    return np.array(picture)


def _text(draw: ImageDraw.ImageDraw, place: tuple[int, int], text: str) -> None:
    """Writes a line; `place` is the middle of its left end."""
    mask = text_mask(text, _FONT_PX)
    draw.bitmap((place[0], place[1] - len(mask) // 2), Image.fromarray(mask), fill=_INK)


LABELS, COLORS, OVERLAYS = "labels", "colors", "overlays"
VIDEOS, PROBABILITIES, MASKS = "videos", "probabilities", "masks"
PROBABILITY_ENDINGS = "npz", "tif"


class Tint(NamedTuple):
    """How an overlay shows classes. palette: their colours; what is black there stays clear."""

    palette: Sequence[Rgb]
    opacity: float = 0.5

    def over(self, image: np.ndarray, label: np.ndarray) -> np.ndarray:
        """The overlay of `label` on `image`."""
        return overlay(image, label, self.palette, self.opacity)


def make_tint(
    names: Sequence[str], palette: Sequence[Rgb], opacity: float, clear: Sequence[str]
) -> Tint:
    """The tint of these classes, of which those of the names `clear` are left out.

    Raises:
        ConfigError: there is no such class.
    """
    if unknown := set(clear) - set(names):
        there = first_of(names, 20)
        raise ConfigError(f"--clear: no class {first_of(sorted(unknown))}; there are {there}")
    pairs = zip(names, palette, strict=True)
    return Tint([BLACK if name in clear else color for name, color in pairs], opacity)


def check_output(output: Path, names: Sequence[str], *, overwrite: bool) -> None:
    """ConfigError if a directory already holds some of the predictions."""
    ends = [f"{LABELS}/*{end}" for end in (".png", ".tif", ".nii.gz")] + [f"{VIDEOS}/*.mp4"]
    ends += [f"{PROBABILITIES}/*.{ending}" for ending in PROBABILITY_ENDINGS]
    paths = (output / end.replace("*", name) for name in names for end in ends)
    there = [path for path in paths if os.path.lexists(path)]
    if there and not overwrite:
        repair = "choose another directory or pass --overwrite"
        raise ConfigError(f"--output {first_of(there, 1)}: exists already; {repair}")


def raw_ids(classes: ClassFile) -> np.ndarray:
    """The id to write for each train id and IGNORE_INDEX, (256,) uint8; uint16 if one is larger."""
    # A class file allows no ids above 16 bits.
    dtype = np.min_scalar_type(max(classes.write_ignored, *classes.write_ids))
    ids = np.full(256, classes.write_ignored, dtype)
    ids[: classes.num_classes] = classes.write_ids
    return ids


def write_legend(
    output: Path, names: Sequence[str], palette: Sequence[Rgb], ids: Sequence[int] | None
) -> None:
    """Writes the colour, the id in label maps and the name of each class."""
    write_png(output / "legend.png", legend(class_labels(names, ids), palette))


def raw_bands(classes: ClassFile, pred: np.ndarray) -> np.ndarray:
    """The label of classes that overlap as their files have it, (H, W, K) uint8 or uint16.

    pred: (H, W, K) of 0, 1 and IGNORE_INDEX.
    """
    dtype = np.min_scalar_type(max(classes.write_ignored, *classes.write_ids))
    bands = pred * np.array(classes.write_ids, dtype)
    return np.where(pred == IGNORE_INDEX, dtype.type(classes.write_ignored), bands)


def write_stored(path: Path, stored: np.ndarray) -> None:
    """Writes what `Task.stored` returns: a PNG, or a TIFF of bands or floats; with its ending."""
    if stored.ndim == 2 and stored.dtype.kind == "u":
        write_png(path.with_name(f"{path.name}.png"), stored)
    else:
        write_bands(path.with_name(f"{path.name}.tif"), np.atleast_3d(stored))


def mask_names(classes: ClassFile) -> list[str]:
    """The folder of each class below MASKS, where classes overlap; its own name if that can be."""
    names = [re.sub(r"[/\\]|^\.+$", "_", name) for name in classes.names]
    order = sorted(range(len(names)), key=lambda i: names[i] != classes.names[i])
    made = distinct([names[i] for i in order], key=str.casefold)
    return [made[order.index(i)] for i in range(len(names))]


def write_prediction(
    output: Path,
    name: str,
    image: np.ndarray,
    pred: np.ndarray,
    palette: Sequence[Rgb],
    tint: Tint,
    pictures: Mapping[str, np.ndarray],
) -> None:
    """Writes `pred`, (H, W) or (H, W, K), in colours and over its image, and further pictures.

    pictures: by their folders, as of `Task.pictures`.

    ExecutionError if it cannot.
    """
    drawn = {COLORS: colorize(pred, palette), OVERLAYS: tint.over(image, pred)}
    for kind, picture in (drawn | dict(pictures)).items():
        write_png(output / kind / f"{name}.png", picture)
