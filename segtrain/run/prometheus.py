"""metrics.prom (`log.prometheus`): a run's present for the textfile collector of node_exporter.

Times are those at which something was done: an age would stand still in a run that was killed.
"""

import re
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
# The metrics by their tags in metrics.jsonl, if they have one.
_HELP = {
    "step": "Updates of the weights.",
    "train/steps": "Those at the end of the training.",
    "train/loss": "Mean loss between the last two log lines.",
    "train/lr": "Learning rate of the last step.",
    "images_per_s": "Images of all ranks.",
    "eval/mIoU": "mIoU of the newest evaluation.",
    "best_score": "Best score so far, by eval.best.",
    "checkpoint_timestamp_seconds": "When last.pt was saved.",
    "written_timestamp_seconds": "When this was written.",
    "state": "1 for the state of the run; a run that was killed stays as it was.",
}
_STATES = {"": "training", "FINISHED": "complete", "FAILED": "failed", "KILLED": "stopped"}


class MetricsFile:
    """That of one run, a `Tracker`; a resumed run begins with what metrics.jsonl holds."""

    def __init__(self, directory: Path, config: Config) -> None:
        self._directory, self._best_tag = directory, config.eval.best_tag
        self._values: dict[str, float] = {"train/steps": config.train.steps}
        lines: list[bytes] = []
        with suppress(FileNotFoundError):
            lines = read_bytes(directory / METRICS).splitlines()
        for line in lines:
            with suppress(ValueError):  # a last line that is just being written
                self._take(parse_json(line))
        self.finish({}, (), "")

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes the values of a log line."""
        self._take({"step": step, **values})
        self.finish({}, (), "")

    def _take(self, values: Mapping[str, Any]) -> None:
        known = {tag: x for tag, x in values.items() if x is not None}
        if self._best_tag in known:
            score = known[self._best_tag]
            known["best_score"] = max(score, self._values.get("best_score", score))
        self._values |= known

    def finish(self, results: Mapping[str, float], files: Sequence[Path], status: str) -> None:
        """Writes the file as a whole; status: how the run ended, empty if it goes on."""
        now = self._values | {"written_timestamp_seconds": time.time()}
        with suppress(OSError):  # nothing is saved
            last = self._directory / CHECKPOINTS / "last.pt"
            now["checkpoint_timestamp_seconds"] = last.stat().st_mtime
        path = printable(self._directory.resolve(), 4096)
        run = 'run="{}"'.format(path.replace("\\", r"\\").replace('"', r"\""))
        samples = [(tag, run, now[tag]) for tag in _HELP if tag in now]
        for key, state in _STATES.items():
            samples.append(("state", f'{run},state="{state}"', int(key == status)))
        lines: dict[str, None] = {}  # those of a metric say once what it is
        for tag, labels, value in samples:
            name = "segtrain_" + re.sub(r"\W", "_", tag).lower()
            lines |= dict.fromkeys((f"# HELP {name} {_HELP[tag]}", f"# TYPE {name} gauge"))
            lines[f"{name}{{{labels}}} {value}"] = None
        write_atomic(self._directory / PROMETHEUS, "\n".join([*lines, ""]), durable=False)
