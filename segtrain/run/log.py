"""What a run writes while it trains: console, train.log, metrics.jsonl, TensorBoard.

A full disk or a deleted directory must not end days of training: a writer that fails prints one
warning and is not used again.
"""

import errno
import json
import logging
import math
import os
import sys
import threading
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from typing import IO, Any, Self

import numpy as np

from segtrain.files import open_regular, read_bytes, write_atomic
from segtrain.run.console import log_only, logger, say
from segtrain.run.directory import LOG, METRICS
from segtrain.text import printable, printable_lines


class RunLog:
    """The log of one run; on ranks other than 0, which are not `enabled`, calls do nothing.

    Training goes on at `start_step`, its last evaluation was at `evaluated_step`. Later values,
    from before a crash, are dropped, so that curves do not run back and forth.
    """

    def __init__(
        self, directory: Path, *, enabled: bool, start_step: int = 0, evaluated_step: int = 0
    ) -> None:
        self.enabled = enabled
        self._failed: set[str] = set()
        if not enabled:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        self._handler: logging.Handler = logging.NullHandler()
        self._try(LOG, self._open_log)
        self._try(METRICS, _drop_later, directory / METRICS, start_step, evaluated_step)
        # TensorBoard writes in a thread: Python would print a traceback when that fails.
        self._excepthook, threading.excepthook = threading.excepthook, self._on_thread_error
        self._try("TensorBoard", self._open_board, start_step + 1 if start_step else 0)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if self.enabled:
            self._try("TensorBoard", lambda: self._board.close())
            threading.excepthook = self._excepthook
            if error is not None:
                log_only("\n".join(printable_lines(f"ended by {type(error).__name__}: {error}")))
            logger.removeHandler(self._handler)
            with suppress(OSError):  # a full disk; there was a warning about it
                self._handler.close()
            os.close(self._handle)

    def lines(self, lines: Sequence[str]) -> None:
        """Writes `lines` to the console and train.log."""
        if self.enabled:
            for line in lines:
                say(line)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a line of metrics.jsonl (NaN and infinity become null) and TensorBoard points."""
        clean = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self._try(METRICS, self._append, json.dumps({"step": step, **clean}) + "\n")
        curves = {printable(tag): value for tag, value in values.items()}
        self._to_board(lambda: [self._board.add_scalar(tag, curves[tag], step) for tag in curves])

    def picture(self, step: int, tag: str, picture: np.ndarray) -> None:
        """Shows an (H, W, 3) uint8 RGB picture in TensorBoard."""
        name = printable(tag)
        self._to_board(lambda: self._board.add_image(name, picture, step, dataformats="HWC"))

    def text(self, tag: str, text: str) -> None:
        """Shows preformatted text in TensorBoard."""
        indented = "\n".join("    " + line for line in printable_lines(text, len(text) + 1))
        self._to_board(lambda: self._board.add_text(tag, indented))

    def hparams(
        self,
        options: Mapping[str, Any],
        scores: Mapping[str, float],
        step: int,
        *,
        first: Collection[str],
    ) -> None:
        """Adds a row to TensorBoard's table of hyperparameters; columns `first` come first.

        Give all options, also defaults: TensorBoard takes the columns from one of the runs.
        """
        plain = {
            printable(key): value if isinstance(value, int | float) else printable(value)
            for key, value in options.items()
        }
        # Tags of their own: the curve of the score already has a point at this step.
        named = {f"hparam/{name}": score for name, score in scores.items()}
        self._to_board(lambda: _write_hparams(self._board, plain, named, step, first))

    def _open_log(self) -> None:
        self._handler = _LogFile(self._directory / LOG)
        logger.addHandler(self._handler)

    def _open_board(self, purge_step: int) -> None:
        # Slow to import, and only rank 0 needs it.
        from torch.utils.tensorboard import SummaryWriter

        self._board = SummaryWriter(str(self._directory), purge_step=purge_step)

    def _append(self, line: str) -> None:
        _check_not_deleted(self._directory, self._handle)
        with open_regular(self._directory / METRICS, "a") as file:
            file.write(line)

    def _to_board(self, write: Callable[[], object]) -> None:
        def write_or_fail() -> None:
            _check_not_deleted(self._directory, self._handle)
            write()

        self._try("TensorBoard", write_or_fail)

    def _try(self, what: str, call: Callable[..., object], *args: object) -> None:
        if not self.enabled or what in self._failed:
            return
        try:
            call(*args)
        except OSError as error:
            self._failed.add(what)
            say(f"warning: {what} cannot be written any more, training goes on: {error}")

    def _on_thread_error(self, failure: threading.ExceptHookArgs) -> None:
        # TensorBoard raises its own OSErrors again at the next call.
        if not (
            isinstance(failure.exc_value, OSError)
            and type(failure.thread).__module__.startswith("tensorboard.")
        ):
            self._excepthook(failure)


class _LogFile(logging.FileHandler):
    """train.log; warns once when the disk is full or the file was deleted."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def _open(self) -> IO[str]:
        """Called by logging instead of open(), which would wait for the reader of a pipe."""
        return open_regular(self.baseFilename, self.mode, encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging with every line."""
        try:
            _check_not_deleted(Path(self.baseFilename), self.stream.fileno())
        except OSError:
            self.handleError(record)
        else:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Called by logging inside `except`, instead of raising."""
        logger.removeHandler(self)
        say(f"warning: {LOG} cannot be written any more, training goes on: {sys.exc_info()[1]}")


def _check_not_deleted(path: Path, handle: int) -> None:
    """Raises OSError if `path`, open as `handle`, was deleted or renamed.

    A new file at `path` would begin in the middle of the run.
    """
    if os.fstat(handle).st_nlink == 0 or not path.exists():
        raise FileNotFoundError(errno.ENOENT, "deleted during the run", str(path))


def _drop_later(metrics: Path, step: int, evaluated_step: int) -> None:
    """Drops lines of metrics.jsonl after `step`, and evaluations after `evaluated_step`.

    Also drops damaged lines, such as a last line cut short by a crash.
    """
    if not metrics.exists():
        return
    kept, content = [], read_bytes(metrics)
    for line in content.decode(errors="replace").splitlines(keepends=True):
        try:
            values = json.loads(line)
            newest = evaluated_step if "eval/mIoU" in values else step
            if line.endswith("\n") and values["step"] <= newest:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    text = "".join(kept).encode()
    if text != content:
        write_atomic(metrics, text)


def _write_hparams(
    board: Any, options: dict[str, Any], scores: dict[str, float], step: int, first: Collection[str]
) -> None:
    """As SummaryWriter.add_hparams, but into the same event file and with ordered columns."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    experiment, *session = hparams(options, scores)
    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    # TensorBoard sorts by name, but options marked as different between runs come first.
    for column in data.experiment.hparam_infos:
        column.differs = column.name in first
    plugin.content = data.SerializeToString()
    for summary in (experiment, *session):
        board.file_writer.add_summary(summary, step)
    for name, score in scores.items():
        board.add_scalar(name, score, step)
