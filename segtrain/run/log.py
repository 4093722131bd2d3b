"""What a run writes while it trains: console, train.log, metrics.jsonl, receipts, TensorBoard.

A full disk or a deleted directory must not end days of training: a writer that fails prints one
warning and is not used again.
"""

import errno
import json
import math
import os
import threading
from collections.abc import Callable, Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Self

import numpy as np

from segtrain.errors import EXIT_INTERNAL
from segtrain.files import open_regular, parse_json, read_bytes, write_atomic
from segtrain.run.console import log_files, log_only, say
from segtrain.run.directory import ENDING, LOG, METRICS, OF_EVALUATIONS, RECEIPTS
from segtrain.run.receipts import Receipt
from segtrain.run.trackers import Trackers
from segtrain.text import printable, printable_lines

if TYPE_CHECKING:
    from torch.utils.tensorboard import SummaryWriter


class RunLog:
    """The log of one run; on ranks other than 0, which are not `enabled`, calls do nothing.

    Training goes on at `start_step`, its last evaluation was at `evaluated_step`. Later values,
    from before a crash, are dropped, so that curves do not run back and forth. With `changed`, the
    config is another from here on: earlier steps cannot be repeated, and their receipts go.
    All this happens at `begin`, with `describe`, which writes what the run is from here on: a
    resumption that comes to no step leaves all files but train.log as they were.

    trackers: get the scalars, too. An error inside ends them; otherwise the caller does.
    """

    def __init__(
        self,
        directory: Path,
        *,
        enabled: bool,
        start_step: int = 0,
        evaluated_step: int = 0,
        changed: bool = False,
        describe: Callable[[], None] = lambda: None,
        trackers: Trackers | None = None,
    ) -> None:
        self.enabled = enabled
        self.trackers = trackers or Trackers()
        self._failed: set[str] = set()
        self._waiting: list[Callable[[SummaryWriter], object]] = []  # for TensorBoard
        self._board: SummaryWriter | None = None
        self._begun = False
        self._steps = start_step, evaluated_step
        self._changed, self._describe = changed, describe
        if not enabled:
            return
        directory.mkdir(parents=True, exist_ok=True)
        self._directory = directory
        self._handle = os.open(directory, os.O_RDONLY | os.O_CLOEXEC)
        log_files.append(self._write_log)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: object, _trace: object) -> None:
        if self.enabled:
            if self._begun:
                if self._board is not None:
                    self._try("TensorBoard", self._board.close)
                threading.excepthook = self._excepthook
            if error is not None:
                self.trackers.finish("FAILED")
                if isinstance(error, RuntimeError):  # torch's begin with a place in its source
                    from segtrain.distributed.process_group import meaning

                    error = meaning(error, in_set_up=False) or error
                lines = printable_lines(f"ended by {type(error).__name__}: {error}")
                log_only("\n".join(lines))
                if self._begun and isinstance(error, Exception):  # not Ctrl-C
                    code = getattr(error, "exit_code", EXIT_INTERNAL)
                    why = str(error) or type(error).__name__
                    self._end({"exit_code": code, "message": printable_lines(why)[0]})
            log_files.remove(self._write_log)
            os.close(self._handle)

    def begin(self) -> None:
        """Call this once a step is done; so do the first values.

        Raises:
            ConfigError: as `describe`.
        """
        if not self.enabled or self._begun:
            return
        self._describe()  # first: if it raises, all other files stay as they were
        self._begun = True
        step, evaluated = self._steps
        for name, newest in ((METRICS, step), (RECEIPTS, 0 if self._changed else step)):
            self._try(name, drop_later, self._directory / name, newest, evaluated)
        # TensorBoard writes in a thread: Python would print a traceback when that fails.
        self._excepthook, threading.excepthook = threading.excepthook, self._on_thread_error
        if (self._directory / ENDING).exists():  # at an address, files are replaced alone
            self._end({})
        self.trackers.begin()

    def lines(self, lines: Sequence[str]) -> None:
        """Writes `lines` to the console and train.log."""
        if self.enabled:
            for line in lines:
                say(line)

    def scalars(self, step: int, values: Mapping[str, float]) -> None:
        """Writes a line of metrics.jsonl (NaN and infinity become null) and TensorBoard points."""
        self.begin()
        clean = {tag: value if math.isfinite(value) else None for tag, value in values.items()}
        self._try(METRICS, self._append, METRICS, json.dumps({"step": step, **clean}))
        curves = {printable(tag): value for tag, value in values.items()}
        self.trackers.scalars(step, curves)
        self._to_board(lambda board: [board.add_scalar(tag, curves[tag], step) for tag in curves])

    def receipts(self, receipts: Sequence[Receipt]) -> None:
        """Writes a line of receipts.jsonl for each."""
        if receipts:
            self.begin()
            self._try(RECEIPTS, self._append, RECEIPTS, "\n".join(r.line() for r in receipts))

    def picture(self, step: int, tag: str, picture: np.ndarray) -> None:
        """Shows an (H, W, 3) uint8 RGB picture in TensorBoard."""
        name = printable(tag)
        self._to_board(lambda board: board.add_image(name, picture, step, dataformats="HWC"))

    def text(self, tag: str, text: str) -> None:
        """Shows preformatted text in TensorBoard."""
        indented = "\n".join("    " + line for line in printable_lines(text, len(text) + 1))
        self._to_board(lambda board: board.add_text(tag, indented))

    def _to_board(self, write: Callable[["SummaryWriter"], object]) -> None:
        if not self.enabled or "TensorBoard" in self._failed:
            return
        self._waiting.append(write)
        if self._begun:
            self._try("TensorBoard", self._write_waiting)

    def _write_waiting(self) -> None:
        self._check_not_deleted()
        # What fails below is not tried again: the board is given up then.
        waiting, self._waiting = self._waiting, []
        if self._board is None:
            # Slow to import, and only rank 0 needs it.
            from torch.utils.tensorboard import SummaryWriter

            # TensorBoard drops what it has read of this step and later ones.
            purge_step = self._steps[0] + 1 if self._steps[0] else 0
            self._board = SummaryWriter(str(self._directory), purge_step=purge_step)
        for write in waiting:
            write(self._board)

    def _write_log(self, line: str) -> None:
        now = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
        self._try(LOG, self._append, LOG, f"{now} INFO {line}")

    def _append(self, name: str, line: str) -> None:
        self._check_not_deleted()
        with open_regular(self._directory / name, "a", encoding="utf-8") as file:
            file.write(line + "\n")

    def _end(self, ending: Mapping[str, object]) -> None:
        text = json.dumps(ending) + "\n"
        self._try(ENDING, write_atomic, self._directory / ENDING, text)

    def _check_not_deleted(self) -> None:
        """A new directory in its place would begin in the middle of the run."""
        if os.fstat(self._handle).st_nlink == 0 or not self._directory.exists():
            raise FileNotFoundError(errno.ENOENT, "deleted during the run", str(self._directory))

    def _try(self, what: str, call: Callable[..., object], *args: object) -> None:
        if not self.enabled or what in self._failed:
            return
        try:
            call(*args)
        except OSError as error:
            # Before it is said: `say` writes to the log, too, and would come here again.
            self._failed.add(what)
            say(f"warning: {what} cannot be written any more, training goes on: {error}")

    def _on_thread_error(self, failure: threading.ExceptHookArgs) -> None:
        # TensorBoard raises its own OSErrors again at the next call.
        if not (
            isinstance(failure.exc_value, OSError)
            and type(failure.thread).__module__.startswith("tensorboard.")
        ):
            self._excepthook(failure)


def drop_later(path: Path, step: int, evaluated_step: int) -> None:
    """Drops lines of metrics or receipts after `step`, and evaluations after `evaluated_step`.

    Also drops damaged lines, such as a last line cut short by a crash.
    """
    if not path.exists():
        return
    kept, content = [], read_bytes(path)
    for line in content.decode(errors="replace").splitlines(keepends=True):
        try:
            values = parse_json(line)
            is_evaluation = any(tag in values for tag in OF_EVALUATIONS)
            newest = evaluated_step if is_evaluation else step
            if line.endswith("\n") and values["step"] <= newest:
                kept.append(line)
        except (ValueError, KeyError, TypeError):
            continue
    text = "".join(kept).encode()
    if text != content:
        write_atomic(path, text)
