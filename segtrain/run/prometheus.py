"""metrics.prom (`log.prometheus`): a run's present for the textfile collector of node_exporter.

The file is in Prometheus' text format, replaced as a whole, and readable by every user. Times are
those at which something was done, as Prometheus wants them: an age would stand still in a run that
was killed.
"""

import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from segtrain.config import Config
from segtrain.files import parse_json, read_bytes, write_atomic
from segtrain.run.directory import CHECKPOINTS, METRICS
from segtrain.text import printable

PROMETHEUS = "metrics.prom"
# By tag of metrics.jsonl: the name of the metric, and what it is.
_OF_TAGS = {
    "step": ("step", "Updates of the weights."),
    "train/loss": ("loss", "Mean loss between the last two log lines."),
    "train/lr": ("learning_rate", "Learning rate of the last step."),
    "images_per_s": ("images_per_second", "Images of all ranks."),
    "eval/mIoU": ("miou", "mIoU of the newest evaluation."),
}
_STATES = {"FINISHED": "complete", "FAILED": "failed", "KILLED": "stopped"}


class MetricsFile:
    """That of one run, a `Tracker`; a resumed run begins with what metrics.jsonl holds."""

    def __init__(self, directory: Path, config: Config) -> None:
        self._directory, self._config = directory, config
        self._newest: dict[str, float] = {}  # by tag
        self._best: float | None = None
        lines: list[bytes] = []
        with suppress(FileNotFoundError):
            lines = read_bytes(directory / METRICS).splitlines()
        for line in lines:
            with suppress(ValueError):  # a last line that is just being written
                self._take(parse_json(line))
        self._write("training")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Takes the values of a log line in."""
        self._take({"step": step, **values})
        self._write("training")

    def finish(self, results: Mapping[str, float], files: Sequence[Path], status: str) -> None:
        """Writes how the run ended."""
        self._write(_STATES[status])

    def _take(self, values: Mapping[str, Any]) -> None:
        self._newest |= {tag: x for tag, x in values.items() if tag in _OF_TAGS and x is not None}
        score = values.get(self._config.eval.best_tag)
        if score is not None and (self._best is None or score > self._best):
            self._best = score

    def _write(self, state: str) -> None:
        found = [(*_OF_TAGS[tag], {}, value) for tag, value in self._newest.items()]
        found.append(("steps", "train.steps.", {}, self._config.train.steps))
        if self._best is not None:
            by = {"by": self._config.eval.best_name}
            found.append(("best_score", "Best score so far, by eval.best.", by, self._best))
        with suppress(OSError):  # nothing is saved
            saved = (self._directory / CHECKPOINTS / "last.pt").stat().st_mtime
            what = "When last.pt was saved."
            found.append(("checkpoint_timestamp_seconds", what, {}, saved))
        found.append(("written_timestamp_seconds", "When this was written.", {}, time.time()))
        for other in ("training", *_STATES.values()):
            what = "1 for the state of the run; a run that was killed stays as it was."
            found.append(("state", what, {"state": other}, int(other == state)))
        lines: dict[str, None] = {}  # those of a metric say once what it is
        run = {"run": str(self._directory.resolve())}
        for name, what, labels, value in found:
            name = f"segtrain_{name}"
            shown = ",".join(f'{key}="{_escaped(text)}"' for key, text in (run | labels).items())
            lines |= dict.fromkeys((f"# HELP {name} {what}", f"# TYPE {name} gauge"))
            lines[f"{name}{{{shown}}} {value}"] = None
        write_atomic(self._directory / PROMETHEUS, "\n".join([*lines, ""]), durable=False)


def _escaped(text: str) -> str:
    r"""A value of a label.

    >>> _escaped('a"b\\')
    'a\\"b\\\\'
    """
    return printable(text, 4096).replace("\\", r"\\").replace('"', r"\"")
