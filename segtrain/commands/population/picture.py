"""The history of a population as a picture: the mIoU of every member over the steps."""

import math
from pathlib import Path
from typing import NamedTuple

import numpy as np
from PIL import Image, ImageDraw

from segtrain.commands.population.history import History
from segtrain.errors import ExecutionError
from segtrain.run.pictures import text_mask

Rgb = tuple[int, int, int]
SIZE = (960, 480)
_PAPER, _INK, _FAINT = (255, 255, 255), (32, 32, 32), (225, 225, 225)
COLORS: tuple[Rgb, ...] = (
    *((31, 119, 180), (230, 120, 20), (40, 150, 60), (200, 45, 45)),
    *((130, 90, 180), (125, 80, 70), (215, 105, 185), (120, 120, 120)),
)
# Drawn at twice the size and shrunk: Pillow's lines have jagged edges.
_ZOOM = 2
_LEFT, _TOP, _WIDTH, _HEIGHT = 80, 50, 720, 365
_MAX_NAMED = 16


class _Scale(NamedTuple):
    """What the edges of the chart stand for."""

    steps: int
    lowest: float
    highest: float

    def place(self, step: float, value: float) -> tuple[float, float]:
        share = (value - self.lowest) / (self.highest - self.lowest)
        return _LEFT + _WIDTH * step / self.steps, _TOP + _HEIGHT * (1 - share)


def write_picture(path: Path, history: History) -> None:
    """Writes a PNG of `draw`; ExecutionError if it cannot."""
    try:
        Image.fromarray(draw(history)).save(path, optimize=True)
    except OSError as error:
        raise ExecutionError(f"{path}: cannot be written: {error.strerror}") from None


def draw(history: History) -> np.ndarray:
    """The chart, (480, 960, 3) uint8.

    A dashed line with a dot leads from the score of a member to the one that it takes over.
    """
    picture = Image.new("RGB", (_ZOOM * SIZE[0], _ZOOM * SIZE[1]), _PAPER)
    scores = [row.mean_iou for past in history.rounds for row in past.rows]
    numbers = [value for value in scores if value is not None] or [0.0]
    tick = _tick(max(numbers) - min(numbers))
    low, high = math.floor(min(numbers) / tick), math.ceil(max(numbers) / tick)
    high = max(high, low + 1)
    scale = _Scale(history.config.train.steps, low * tick, high * tick)
    _axes(picture, scale, [i * tick for i in range(low, high + 1)], history.ends)
    for member in range(history.members):
        color = COLORS[member % len(COLORS)]
        for piece in lines_of(history, member):
            _line(picture, [scale.place(*point) for point in piece], color, 2)
        for step, before, after in jumps_of(history, member):
            end = scale.place(step, after)
            if before is not None:
                _dashed(picture, scale.place(step, before), end, color)
            _dot(picture, end, color)
        if member < _MAX_NAMED:
            y = _TOP + 22 * member
            _line(picture, [(820, y + 10), (845, y + 10)], color, 2)
            _write(picture, (852, y), f"member {member}")
    kind = "members left alone" if history.alone else "a dot: weights taken over"
    _write(picture, (_LEFT, 14), f"mIoU of {history.members} members; {kind}", size=16)
    return np.array(picture.resize(SIZE, Image.Resampling.LANCZOS))


def lines_of(history: History, member: int) -> list[list[tuple[int, float]]]:
    """The pieces of a member's line as (step, mIoU); a new one begins where it takes over."""
    pieces: list[list[tuple[int, float]]] = [[]]
    for past in history.rounds:
        score = past.rows[member].mean_iou if member < len(past.rows) else None
        if score is not None:
            pieces[-1].append((past.step, score))
        for takeover in past.exchange or ():
            if takeover.member == member:
                pieces.append([(past.step, past.rows[takeover.source].mean_iou)])
    return [piece for piece in pieces if len(piece) > 1]


def jumps_of(history: History, member: int) -> list[tuple[int, float | None, float]]:
    """(step, own mIoU, that of the source) for each time that a member takes over."""
    return [
        (past.step, past.rows[member].mean_iou, past.rows[takeover.source].mean_iou)
        for past in history.rounds
        for takeover in past.exchange or ()
        if takeover.member == member
    ]


def _tick(span: float) -> float:
    """A round distance between lines, for at most about ten of them."""
    wanted = max(span, 1e-3) / 8
    power = 10.0 ** math.floor(math.log10(wanted))
    return next(power * i for i in (1, 2, 5, 10) if power * i >= wanted)


def _axes(picture: Image.Image, scale: _Scale, ticks: list[float], ends: list[int]) -> None:
    digits = max(2, -math.floor(math.log10(ticks[1] - ticks[0]) + 1e-9))
    for tick in ticks:
        _line(picture, [scale.place(0, tick), scale.place(scale.steps, tick)], _FAINT, 1)
        text = f"{tick:.{digits}f}"
        _write(picture, (_LEFT - 9 * len(text) - 8, scale.place(0, tick)[1] - 10), text)
    corners = [(0, scale.highest), (0, scale.lowest), (scale.steps, scale.lowest)]
    _line(picture, [scale.place(*corner) for corner in corners], _INK, 1)
    for step in ends[:: math.ceil(len(ends) / 10)]:
        x, y = scale.place(step, scale.lowest)
        _line(picture, [(x, y), (x, y + 5)], _INK, 1)
        _write(picture, (x - 4 * len(str(step)), y + 8), str(step))
    _write(picture, (_LEFT + _WIDTH / 2 - 15, _TOP + _HEIGHT + 32), "step")


def _line(
    picture: Image.Image, places: list[tuple[float, float]], color: Rgb, width: float
) -> None:
    points = [(_ZOOM * x, _ZOOM * y) for x, y in places]
    ImageDraw.Draw(picture).line(points, fill=color, width=round(_ZOOM * width), joint="curve")


def _dashed(
    picture: Image.Image, start: tuple[float, float], end: tuple[float, float], color: Rgb
) -> None:
    (x, y), dashes = start, max(1, round(abs(end[1] - start[1]) / 6))
    for i in range(0, dashes, 2):
        part = [y + (end[1] - y) * share / dashes for share in (i, i + 1)]
        _line(picture, [(x, part[0]), (x, part[1])], color, 1)


def _dot(picture: Image.Image, place: tuple[float, float], color: Rgb) -> None:
    center = (_ZOOM * place[0], _ZOOM * place[1])
    ImageDraw.Draw(picture).circle(center, 4 * _ZOOM, fill=color)


def _write(picture: Image.Image, place: tuple[float, float], text: str, size: int = 14) -> None:
    mask = Image.fromarray(text_mask(text, _ZOOM * size))
    corner = (round(_ZOOM * place[0]), round(_ZOOM * place[1]))
    ImageDraw.Draw(picture).bitmap(corner, mask, fill=_INK)
