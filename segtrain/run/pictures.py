"""Labels and predictions as pictures for people: TensorBoard, `segtrain eval` and `predict`.

Every picture is an (H, W, 3) uint8 RGB array. Labels are (H, W) uint8 train ids or IGNORE_INDEX.
"""

import math
from collections.abc import Sequence
from pathlib import Path

import cv2
import numpy as np
from PIL import Image, ImageDraw

from segtrain.errors import ExecutionError
from segtrain.files import check_replaceable, write_atomic
from segtrain.run.lettering import class_labels, numbered_labels, text_mask, title_text
from segtrain.types import IGNORE_INDEX

Rgb = tuple[int, int, int]

BLACK, WHITE = (0, 0, 0), (255, 255, 255)
_PAPER, _INK, _FAINT = (255, 255, 255), (32, 32, 32), (200, 200, 200)
_WRONG, _RIGHT, _IGNORED = (228, 26, 28), (235, 235, 235), (128, 128, 128)
# Full cells of the confusion matrix; ColorBrewer's darkest blue.
_FULL_CELL = (8, 48, 107)
_FONT_PX = 14
_LINE_PX = 20
_GAP_PX = 6


def color_table(palette: Sequence[Rgb], ignore_color: Rgb = BLACK) -> np.ndarray:
    """The colour of every value a label can have, (256, 3) uint8; no class has `ignore_color`."""
    table = np.full((256, 3), ignore_color, dtype=np.uint8)
    table[: len(palette)] = palette
    return table


def colorize(label: np.ndarray, palette: Sequence[Rgb], ignore_color: Rgb = BLACK) -> np.ndarray:
    """`label` in the colours of its classes."""
    return color_table(palette, ignore_color)[label]


def overlay(
    image: np.ndarray, label: np.ndarray, palette: Sequence[Rgb], alpha: float = 0.5
) -> np.ndarray:
    """`image` under the colours of `label`, whose opacity is `alpha`; ignored pixels stay clear.

    So do the pixels of a class whose colour is black: as a rule it is the background, and a tint of
    black would only darken most of the picture. If black stands for something to look at, give that
    class another colour in the class file; colour maps and legends show black as black.

    Raises:
        ValueError: image and label have different sizes.
    """
    if image.shape[:2] != label.shape:
        raise ValueError(f"image {image.shape[:2]} and label {label.shape} differ in size")
    mixed = cv2.addWeighted(image, 1 - alpha, colorize(label, palette), alpha, 0)
    clear = (color_table(palette) == BLACK).all(axis=1)[label]  # no class: black too
    mixed[clear] = image[clear]
    return mixed


def error_map(label: np.ndarray, pred: np.ndarray) -> np.ndarray:
    """Where `pred` is wrong: red; right: near white; label ignored: grey."""
    picture = np.full((*label.shape, 3), _RIGHT, dtype=np.uint8)
    picture[label != pred] = _WRONG
    picture[label == IGNORE_INDEX] = _IGNORED
    return picture


def legend(names: Sequence[str], palette: Sequence[Rgb], width: int = 640) -> np.ndarray:
    """A patch of colour and the name of each class, in as many columns as fit into `width` pixels.

    The picture is `width` wide whatever the names; a name that is longer than that is cut. Then all
    have the number of the class first, so that names stay different which differ at their ends.
    """
    labels = class_labels(names)
    column_px = max(_text_width(label) for label in labels) + _LINE_PX + 3 * _GAP_PX
    if column_px > width:
        labels, column_px = numbered_labels(names), width
    columns = max(1, width // column_px)
    num_rows = math.ceil(len(labels) / columns)
    picture = Image.new("RGB", (width, num_rows * _LINE_PX + _GAP_PX), _PAPER)
    draw = ImageDraw.Draw(picture)
    for i, (label, color) in enumerate(zip(labels, palette, strict=True)):
        # Down the columns, so that neighbours in the class file stay neighbours.
        x = i // num_rows * column_px + _GAP_PX
        y = i % num_rows * _LINE_PX + _GAP_PX
        draw.rectangle((x, y, x + _FONT_PX, y + _FONT_PX), fill=tuple(color), outline=_INK)
        _text(draw, (x + _LINE_PX, y + _FONT_PX // 2), label, anchor="lm")
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
    """Image, label, prediction and errors side by side, with a title above and the legend below.

    Each of the four is shrunk to at most `max_side_px` on its longer side. image, label and pred
    have the same height and width.
    """
    shrink = min(1.0, max_side_px / max(label.shape))
    size = [max(1, round(side * shrink)) for side in label.shape]
    image = cv2.resize(image, size[::-1], interpolation=cv2.INTER_AREA)
    label, pred = (_nearest(array, size) for array in (label, pred))
    parts = {
        "image": image,
        "label": overlay(image, label, palette, alpha=0.6),
        "prediction": overlay(image, pred, palette, alpha=0.6),
        "errors": error_map(label, pred),
    }
    gap = np.full((size[0], _GAP_PX, 3), _PAPER, dtype=np.uint8)
    row = np.hstack([x for part in parts.values() for x in (part, gap)][:-1])
    width = row.shape[1]
    headers = [_header(list(parts), width, step_px=size[1] + _GAP_PX)]
    if title:
        headers.insert(0, _header([title_text(title)], width, step_px=width))
    return np.vstack([*headers, row, legend(names, palette, width)])


def confusion_picture(counts: np.ndarray, names: Sequence[str]) -> np.ndarray:
    """The confusion matrix with each row divided by its sum: where the pixels of a class went.

    counts: (K, K) integers, rows label, columns prediction. Cells of at least half a percent show
    their percentage while there are at most 40 classes; a class without pixels is a blank row.
    """
    names = class_labels(names)
    counts = np.asarray(counts, dtype=np.float64)
    totals = counts.sum(axis=1, keepdims=True)
    shares = np.divide(counts, totals, out=np.zeros_like(counts), where=totals > 0)  # (K, K)
    cell = 30 if len(names) <= 40 else 8
    margin = max(_text_width(name) for name in names) + 2 * _GAP_PX if cell >= _FONT_PX else _GAP_PX
    left, top = margin + _LINE_PX, margin + _LINE_PX
    side = cell * len(names)
    picture = Image.new("RGB", (left + side + _GAP_PX, top + side + _GAP_PX), _PAPER)
    blend = shares[..., None] * np.array(_FULL_CELL) + (1 - shares[..., None]) * np.array(_PAPER)
    cells = blend.round().astype(np.uint8).repeat(cell, axis=0).repeat(cell, axis=1)
    picture.paste(Image.fromarray(cells), (left, top))
    draw = ImageDraw.Draw(picture)
    _grid(draw, left, top, cell, len(names))
    _text(draw, (left + side // 2, _GAP_PX), "prediction", anchor="mt")
    _vertical_text(picture, (_GAP_PX // 2, top + side // 2), "label", middle=True)
    if cell >= _FONT_PX:
        for i, name in enumerate(names):
            middle = i * cell + cell // 2
            _text(draw, (left - _GAP_PX, top + middle), name, anchor="rm")
            _vertical_text(picture, (left + middle - _LINE_PX // 2, top - _GAP_PX), name)
        for i, j in zip(*np.nonzero(shares >= 0.005), strict=True):
            place = (left + j * cell + cell // 2, top + i * cell + cell // 2)
            ink = _PAPER if shares[i, j] > 0.5 else _INK
            _text(draw, place, f"{100 * shares[i, j]:.0f}", anchor="mm", fill=ink, size=12)
    return np.array(picture)


def write_png(path: Path, picture: np.ndarray) -> None:
    """Writes a picture, or a label of one channel (uint8 or uint16), making the folder if needed.

    The file is written whole; a link of its name is replaced, not followed.

    Raises:
        ExecutionError: the disk is full, the place cannot be written or is no plain file.
    """
    # Encoded in memory and written by Python: cv2.imwrite reports a full disk with a bare False.
    if picture.ndim == 3:
        picture = cv2.cvtColor(picture, cv2.COLOR_RGB2BGR)
    ok, data = cv2.imencode(".png", picture)
    assert ok, "PNG holds any 8 or 16 bit picture"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        check_replaceable(path)
        write_atomic(path, data.tobytes(), durable=False)
    except OSError as error:
        raise ExecutionError(f"{path}: cannot write the picture: {error.strerror}") from error


def _nearest(array: np.ndarray, size: Sequence[int]) -> np.ndarray:
    return cv2.resize(array, tuple(size[::-1]), interpolation=cv2.INTER_NEAREST)


def _header(texts: Sequence[str], width: int, step_px: int) -> np.ndarray:
    picture = Image.new("RGB", (width, _LINE_PX), _PAPER)
    draw = ImageDraw.Draw(picture)
    for i, text in enumerate(texts):
        # Painted from left to right, each over the overlong text before it.
        x = i * step_px
        draw.rectangle((x, 0, width, _LINE_PX), fill=_PAPER)
        _text(draw, (x, _LINE_PX // 2), text, anchor="lm")
    return np.array(picture)


def _grid(draw: ImageDraw.ImageDraw, left: int, top: int, cell: int, num: int) -> None:
    for i in range(num + 1):
        at, end = i * cell, num * cell
        draw.line((left + at, top, left + at, top + end), fill=_FAINT)
        draw.line((left, top + at, left + end, top + at), fill=_FAINT)


def _text_width(text: str) -> int:
    return text_mask(text, _FONT_PX).shape[1]


def _text(
    draw: ImageDraw.ImageDraw,
    place: tuple[int, int],
    text: str,
    *,
    anchor: str,
    fill: Rgb = _INK,
    size: int = _FONT_PX,
) -> None:
    """Writes a line that is drawable; `anchor` says which point of it is at `place`.

    Its first letter is l, m or r (left, middle, right) and its second t or m (top, middle).
    """
    mask = text_mask(text, size)
    height, width = mask.shape
    x = place[0] - {"l": 0, "m": width // 2, "r": width}[anchor[0]]
    y = place[1] - {"t": 0, "m": height // 2}[anchor[1]]
    draw.bitmap((x, y), Image.fromarray(mask), fill=fill)


def _vertical_text(
    picture: Image.Image, place: tuple[int, int], text: str, *, middle: bool = False
) -> None:
    """Writes upwards; `place` is the left and lower (or middle) end of the line."""
    line = Image.new("RGB", (max(1, _text_width(text)), _LINE_PX), _PAPER)
    _text(ImageDraw.Draw(line), (0, _LINE_PX // 2), text, anchor="lm")
    line = line.rotate(90, expand=True)
    x, y = place
    picture.paste(line, (x, y - line.height // 2 if middle else y - line.height))
