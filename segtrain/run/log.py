"""What a run writes for people and programs: console, train.log, metrics.jsonl, TensorBoard.

A disk that is full or a log directory that is gone must not end days of training: each writer that
fails says so once and stays silent from then on.
"""

import errno
import json
import logging
import math
import os
import sys
import threading
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

import numpy as np
from tqdm import tqdm

from segtrain.files import open_regular, read_bytes, write_atomic
from segtrain.run.directory import LOG, METRICS
from segtrain.text import printable, printable_lines

logger = logging.getLogger("segtrain")

# How often a run without a terminal says where it is.
_PLAIN_EVERY_S = 10

# Of a terminal that does not say how wide it is.
_DEFAULT_COLUMNS = 80
_SHORTEST_BAR = 8
# In the head of a bar, from the longest to the shortest, in the fields of tqdm.
_TIMES = (
    "{elapsed}<{remaining}, {rate_fmt}",
    "{elapsed}<{remaining}",
    "{remaining} left",
    "{remaining}",
)


class RunLog:
    """The files of one run; without `enabled`, as on all ranks but 0, every call does nothing.

    Args:
        start_step, evaluated_step: where training goes on, and its last evaluation. What an earlier
            part of the run wrote beyond them is dropped, so that curves do not run back and forth
            after a crash.
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
        self._metrics = directory / METRICS
        self._handler: logging.Handler = logging.NullHandler()
        self._try(LOG, self._open_log)
        self._try(METRICS, _drop_after, self._metrics, start_step, evaluated_step)
        # Slow to import, and of use to rank 0 only.
        from torch.utils.tensorboard import SummaryWriter

        # It writes in a thread, whose end Python would show with a traceback.
        self._excepthook, threading.excepthook = threading.excepthook, self._of_thread
        purge_step = start_step + 1 if start_step else 0
        self._try("TensorBoard", self._open_board, SummaryWriter, purge_step)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        if self.enabled:
            self._try("TensorBoard", lambda: self._board.close())
            threading.excepthook = self._excepthook
            if error is not None:
                _record("\n".join(printable_lines(f"ended by {type(error).__name__}: {error}")))
            logger.removeHandler(self._handler)
            # What a full disk did not take it does not take now; it was said when it was tried.
            with suppress(OSError):
                self._handler.close()
            os.close(self._handle)

    def lines(self, lines: Sequence[str]) -> None:
        """Shows `lines` on the console and in train.log."""
        if self.enabled:
            for line in lines:
                say(line)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """One line of metrics.jsonl and one point a curve; what is not finite becomes null."""
        if not self.enabled:
            return
        clean = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self._try(METRICS, self._append, json.dumps({"step": step, **clean}) + "\n")
        curves = {printable(tag): value for tag, value in values.items()}
        self._to_board(lambda: [self._board.add_scalar(tag, curves[tag], step) for tag in curves])

    def picture(self, step: int, tag: str, picture: np.ndarray) -> None:
        """An (H, W, 3) uint8 RGB picture."""
        if self.enabled:
            name = printable(tag)
            self._to_board(lambda: self._board.add_image(name, picture, step, dataformats="HWC"))

    def text(self, tag: str, text: str) -> None:
        """Preformatted text."""
        if self.enabled:
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
        """A row in TensorBoard's table of hyperparameters, for comparing runs.

        Args:
            options: all of them, also those left at their defaults: of several runs TensorBoard
                asks one for the columns, and an option that this one lacks would not be shown.
            first: the options whose columns come before the others.
        """
        if self.enabled:
            plain = {
                printable(key): value if isinstance(value, (int, float, bool)) else printable(value)
                for key, value in options.items()
            }
            # Names of their own: the scores' curves have a point at this step already.
            named = {f"hparam/{name}": score for name, score in scores.items()}
            self._to_board(lambda: _write_hparams(self._board, plain, named, step, first))

    def _open_log(self) -> None:
        self._handler = _LogFile(self._directory / LOG)
        logger.addHandler(self._handler)

    def _open_board(self, writer: type, purge_step: int) -> None:
        self._board = writer(str(self._directory), purge_step=purge_step)

    def _append(self, line: str) -> None:
        _check_is_there(self._directory, self._handle)
        with open_regular(self._metrics, "a") as file:
            file.write(line)

    def _to_board(self, call: Callable[[], object]) -> None:
        def write() -> None:
            _check_is_there(self._directory, self._handle)
            call()

        self._try("TensorBoard", write)

    def _try(self, what: str, call: Callable[..., object], *args: object) -> None:
        if what in self._failed:
            return
        try:
            call(*args)
        except OSError as error:
            self._failed.add(what)
            say(f"warning: {what} cannot be written any more, training goes on: {error}")

    def _of_thread(self, failure: threading.ExceptHookArgs) -> None:
        # TensorBoard raises it again at the next call.
        if not (
            isinstance(failure.exc_value, OSError)
            and type(failure.thread).__module__.startswith("tensorboard.")
        ):
            self._excepthook(failure)


def _write_hparams(
    board: Any,
    options: dict[str, Any],
    scores: dict[str, float],
    step: int,
    first: Collection[str],
) -> None:
    """As SummaryWriter.add_hparams, into the file of `board`, with the columns in order."""
    from tensorboard.plugins.hparams.plugin_data_pb2 import HParamsPluginData
    from torch.utils.tensorboard.summary import hparams

    experiment, *session = hparams(options, scores)
    plugin = experiment.value[0].metadata.plugin_data
    data = HParamsPluginData.FromString(plugin.content)
    # TensorBoard sorts by name, except that options said to differ between runs come first.
    for column in data.experiment.hparam_infos:
        column.differs = column.name in first
    plugin.content = data.SerializeToString()
    for summary in (experiment, *session):
        board.file_writer.add_summary(summary, step)
    for name, score in scores.items():
        board.add_scalar(name, score, step)


def _check_is_there(path: Path, handle: int) -> None:
    """Refuses to write into a file or directory that was deleted after it had been opened.

    What is at `path` by then is another one: files that begin in the middle would mislead.

    Raises:
        OSError: it was deleted or renamed.
    """
    if os.fstat(handle).st_nlink == 0 or not path.exists():
        raise FileNotFoundError(errno.ENOENT, "deleted during the run", str(path))


class _LogFile(logging.FileHandler):
    """train.log; a disk that is full, or a file that is gone, is mentioned once."""

    def __init__(self, path: Path) -> None:
        super().__init__(path, encoding="utf-8")
        self.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(message)s"))

    def _open(self) -> IO[str]:
        """Called by logging in place of open(), which would wait for the reader of a pipe."""
        return open_regular(Path(self.baseFilename), self.mode, encoding=self.encoding)

    def emit(self, record: logging.LogRecord) -> None:
        """Called by logging with every line."""
        try:
            _check_is_there(Path(self.baseFilename), self.stream.fileno())
        except OSError:
            self.handleError(record)
        else:
            super().emit(record)

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Called by logging in place of raising."""
        logger.removeHandler(self)
        say(f"warning: {LOG} cannot be written any more, training goes on: {sys.exc_info()[1]}")


def _drop_after(metrics: Path, step: int, evaluated_step: int) -> None:
    """Keeps the lines of metrics.jsonl up to `step`, and those of evaluations to `evaluated_step`.

    A last line cut short by a crash goes too.
    """
    if not metrics.exists():
        return
    kept, whole = [], read_bytes(metrics)
    for line in whole.decode(errors="replace").splitlines(keepends=True):
        try:
            values = json.loads(line)
            newest = evaluated_step if "eval/mIoU" in values else step
            if line.endswith("\n") and values["step"] <= newest:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    text = "".join(kept).encode()
    if text != whole:
        write_atomic(metrics, text)


def say(line: str) -> None:
    """Shows one line above any progress bar, and writes it to the log files.

    A message of an error may bring several lines; what no terminal should get is escaped.
    """
    line = "\n".join(printable_lines(line))
    try:
        with tqdm.external_write_mode(file=sys.stderr):
            print(line, flush=True)
    except OSError:
        # Nobody reads any more, as after `| head`: no reason to end a training.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    _record(line)


def _record(line: str) -> None:
    for handler in list(logger.handlers):
        handler.handle(logging.LogRecord("segtrain", logging.INFO, "", 0, line, None, None))


class _Bar(tqdm):
    """A bar that leaves out what does not fit into the terminal, the least important first.

    A bar of tqdm's own is cut at the right edge instead, which hides the words behind it.
    """

    words: Sequence[str] = ()

    def __str__(self) -> str:
        """Called by tqdm to draw it."""
        values = self.format_dict
        width = values["ncols"] or _DEFAULT_COLUMNS
        heads = [self._head(values, times) for times in _TIMES]
        texts = [
            "".join(f"  {word}" for word in self.words[:n]) for n in range(len(self.words), -1, -1)
        ]
        lines = [(head, texts[0]) for head in heads] + [(heads[-1], text) for text in texts[1:]]
        fitting = (line for line in lines if len(line[0]) + len(line[1]) <= width)
        head, text = next(fitting, (heads[-1][:width], ""))
        room = width - len(head) - len(text) - len(" ||")
        if room >= _SHORTEST_BAR:
            times = _TIMES[heads.index(head)]
            head = self._head(values, times, bar=f"|{{bar:{room}}}| ")
        return head + text

    def _head(self, values: dict[str, Any], times: str, bar: str = "") -> str:
        layout = f"{{desc}} {bar}{{n_fmt}}/{{total_fmt}} [{times}]"
        return self.format_meter(**values | {"bar_format": layout, "ncols": None})


class ProgressBar:
    """A bar on a terminal; where there is none, now and then a plain line.

    Args:
        last_line: write a plain line at the end, too, whenever the last one was.
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
        self._words: tuple[str, ...] = ()
        self._said = time.monotonic()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._bar.close()

    def describe(self, *words: str) -> None:
        """What stands behind the bar, the most important first: a narrow terminal lacks the rest.

        It is shown with the next update.
        """
        self._words = self._bar.words = words

    def update(self, count: int = 1) -> None:
        """So many more are done."""
        self._done += count
        self._bar.update(count)
        late = time.monotonic() - self._said > _PLAIN_EVERY_S
        last = self._last_line and self._done == self._total
        if self._enabled and (late or last):
            self._said = time.monotonic()
            line = "  ".join([f"{self._what} {self._done}/{self._total}", *self._words])
            # Beside a bar the line is for the log file only.
            (say if self._plain else _record)(line)
