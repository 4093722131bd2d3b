"""What a person sees: lines on the console and in the log files, and a progress bar."""

import os
import sys
import time
from collections.abc import Callable, Mapping
from typing import Any, Self

from tqdm import tqdm

from segtrain.text import MAX_NAME, printable, printable_lines

log_files: list[Callable[[str], None]] = []
"""What writes a line to the log file of a run; filled while a run is open."""


def say(line: str) -> None:
    """Prints above any progress bar, and writes to the log files; escapes control characters.

    An error message may have several lines.
    """
    line = "\n".join(printable_lines(line))
    try:
        with tqdm.external_write_mode(file=sys.stderr):
            print(line, flush=True)
    except OSError:
        # The reader has gone, as after `| head`: no reason to end a training.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    log_only(line)


def log_only(line: str) -> None:
    """Writes to the log files."""
    for write in log_files:
        write(line)


_PLAIN_EVERY_S = 10
# The most important first: tqdm cuts the line at the right edge of the terminal.
_LAYOUT = "{desc} {n_fmt}/{total_fmt} [{remaining}, {rate_fmt}]{postfix} |{bar}|"


class ProgressBar:
    """A bar on a terminal; otherwise a plain line every ten seconds and, optionally, at the end.

    The log files get the plain lines in both cases.
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
        # On a terminal the bar shows it already.
        self._say = log_only if sys.stderr.isatty() else say
        self._bar = tqdm(
            total=total,
            initial=done,
            desc=what,
            unit=unit,
            bar_format=_LAYOUT,
            disable=not (enabled and sys.stderr.isatty()),
            dynamic_ncols=True,
            leave=False,
        )
        self._enabled, self._last_line = enabled, last_line
        self._what, self._total, self._done = what, total, done
        self._words: tuple[str, ...] = ()
        self._plain_time = self._began = time.monotonic()
        self._first = done

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Takes the bar away."""
        self._bar.close()

    def describe(self, *words: str) -> None:
        """Sets the words shown after the count, the most important first."""
        self._words = words
        self._bar.set_postfix_str("  ".join(words), refresh=False)

    def update(self, count: int = 1) -> None:
        """Adds `count` to what is done."""
        self._done += count
        self._bar.update(count)
        late = time.monotonic() - self._plain_time > _PLAIN_EVERY_S
        last = self._last_line and self._done == self._total
        if self._enabled and (late or last):
            self._plain_time = time.monotonic()
            words = [f"{self._what} {self._done}/{self._total}", *self._words]
            left = self._total - self._done
            if left and self._say is say:  # a bar tells it itself
                each = (time.monotonic() - self._began) / (self._done - self._first)
                words.append(f"{tqdm.format_interval(left * each)} to go")
            self._say("  ".join(words))


def completion(steps: int, step: int, evaluated: int) -> str:
    """How far a run of `steps` came if nothing is left to do after `step`; otherwise empty.

    evaluated: the step of its newest evaluation.
    """
    if step > steps:
        return f"{step} steps (train.steps {steps})"
    return f"{step} steps" if evaluated == steps else ""


def score_text(best: dict[str, Any] | None) -> str:
    """Such as `best mIoU 0.7123 at step 4000`; the score is that of eval.best."""
    if best is None:
        return "no best score"
    return f"best {printable(best['by'], MAX_NAME)} {best['score']:.4f} at step {best['step']}"


def progress_words(values: Mapping[str, float], best: dict[str, Any] | None) -> list[str]:
    """What a progress bar of a training shows; `values` are those of a StepMeter, by tag."""
    digits, exponent = f"{values['train/lr']:.1e}".split("e")
    return [
        f"loss {values['train/loss']:.4f}",
        *([] if best is None else [f"best {printable(best['by'], 20)} {best['score']:.3f}"]),
        f"lr {digits}e{int(exponent)}",
        f"{values['images_per_s']:.1f} img/s",
        *(
            f"{key} {values[key]:.1f}"
            for key in ("staleness/mean", "staleness/max")
            if key in values
        ),
    ]
