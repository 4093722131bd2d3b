"""A progress bar on a terminal, plain lines everywhere else."""

import sys
import time
from collections.abc import Mapping, Sequence
from typing import Any, Self

from tqdm import tqdm

from segtrain.run.console import log_only, say

_PLAIN_EVERY_S = 10
_DEFAULT_COLUMNS = 80  # of a terminal that does not tell its width
_MIN_BAR_COLUMNS = 8
# From the longest to the shortest, in tqdm's fields.
_TIMES = (
    "{elapsed}<{remaining}, {rate_fmt}",
    "{elapsed}<{remaining}",
    "{remaining} left",
    "{remaining}",
)


class ProgressBar:
    """A bar on a terminal; otherwise a plain line every ten seconds.

    Args:
        last_line: without a terminal, also write a plain line at the end.
    """

    def __init__(
        self,
        total: int,
        done: int,
        what: str,
        *,
        enabled: bool,
        unit: str = "step",
        last_line: bool = True,
    ) -> None:
        self._plain = enabled and not sys.stderr.isatty()
        self._bar = _Bar(
            total=total,
            initial=done,
            desc=what,
            unit=unit,
            disable=not enabled or self._plain,
            dynamic_ncols=True,
            leave=False,
        )
        self._enabled = enabled
        self._last_line = last_line
        self._what, self._total, self._done = what, total, done
        self._plain_time = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._bar.close()

    def describe(self, *words: str) -> None:
        """Sets what the next update shows behind the bar, the most important first."""
        self._bar.words = words

    def update(self, count: int = 1) -> None:
        """Adds `count` to what is done."""
        self._done += count
        self._bar.update(count)
        late = time.monotonic() - self._plain_time > _PLAIN_EVERY_S
        last = self._last_line and self._done == self._total
        if self._enabled and (late or last):
            self._plain_time = time.monotonic()
            line = "  ".join([f"{self._what} {self._done}/{self._total}", *self._bar.words])
            (say if self._plain else log_only)(line)


class _Bar(tqdm):
    """A bar that shortens its text to the width of the terminal, the least important words first.

    tqdm would cut the line at the right edge instead.
    """

    words: Sequence[str] = ()

    def __str__(self) -> str:
        """Called by tqdm to draw the bar."""
        values = self.format_dict
        width = values["ncols"] or _DEFAULT_COLUMNS
        layouts = [(times, self.words) for times in _TIMES]
        layouts += [(_TIMES[-1], self.words[:n]) for n in reversed(range(len(self.words)))]
        for times, words in layouts:
            text = "".join(f"  {word}" for word in words)
            line = self._head(values, times) + text
            room = width - len(line) - len(" ||")
            if room >= _MIN_BAR_COLUMNS:
                return self._head(values, times, bar=f"|{{bar:{room}}}| ") + text
            if room >= -len(" ||"):
                break
        return line[:width]

    def _head(self, values: dict[str, Any], times: str, bar: str = "") -> str:
        layout = f"{{desc}} {bar}{{n_fmt}}/{{total_fmt}} [{times}]"
        return self.format_meter(**values | {"bar_format": layout, "ncols": None})


def score_text(best: dict[str, Any] | None) -> str:
    """Such as `best mIoU 0.7123 at step 4000`."""
    if best is None:
        return "not evaluated yet"
    return f"best mIoU {best['mean_iou']:.4f} at step {best['step']}"


def progress_words(values: Mapping[str, float], best: dict[str, Any] | None) -> list[str]:
    """What to show behind the progress bar of a training, the most important first.

    values: by tag, from StepMeter.
    """
    digits, exponent = f"{values['train/lr']:.1e}".split("e")
    return [
        f"loss {values['train/loss']:.4f}",
        *([] if best is None else [f"best mIoU {best['mean_iou']:.3f}"]),
        f"lr {digits}e{int(exponent)}",
        f"{values['images_per_s']:.1f} img/s",
    ]
