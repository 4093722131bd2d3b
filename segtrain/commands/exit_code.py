"""Runs a command: its errors become messages and exit codes, whatever standard output is."""

import argparse
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from importlib import import_module

from segtrain.distributed import liveness, signals
from segtrain.distributed.liveness import has_launcher, is_first_to_print, write_exit_status
from segtrain.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PIPE,
    EXIT_SYSTEM,
    EXIT_TERMINATED,
    ConfigError,
    LostRanksError,
    UserError,
)
from segtrain.text import MAX_NAME, printable, say


def repair_stdio() -> None:
    """Makes the standard streams safe to use; for the start of the process.

    A stream that is closed, as by `>&-`, becomes /dev/null. Otherwise the next file to be opened,
    such as a checkpoint, would get the number of stdout, and every print would write into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # open() takes the lowest free number, so this one. Ranks must inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for number, (name, mode) in enumerate((("stdin", "r"), ("stdout", "w"), ("stderr", "w"))):
        if getattr(sys, name) is None:  # it was closed when Python started
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of classes and files may hold letters that the terminal's encoding lacks.
        sys.stdout.reconfigure(errors="backslashreplace")


def reader_has_left() -> bool:
    """Whether nobody reads stdout any more, as in `segtrain config show FILE | head -1`.

    If so, stdout becomes /dev/null: Python would complain once more at exit.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    left = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if left:
        _discard_stdout()
    return left


def stdout_problem() -> str | None:
    """Why stdout cannot be written; it becomes /dev/null then. None: it can be written."""
    try:
        # Write, do not flush: Python may have dropped the text that it could not write.
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        _discard_stdout()
        return (error.strerror or str(error)).lower()
    return None


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# With these errors a name is wrong: too long, in a folder of somebody else, not in UTF-8.
_WRONG_NAMES = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EILSEQ)


@dataclass
class _Outcome:
    """What a command came to: its exit code, which errors replace."""

    code: int = EXIT_INTERNAL


def run(command: Callable[..., int] | str, *args: argparse.Namespace) -> int:
    """Runs `command` and returns the exit code; errors of segtrain itself keep their traceback.

    command: called with `args`; as text "module:name" of segtrain, which is imported first.
    """
    outcome = _Outcome()
    told = _told_by_a_rank if has_launcher() else _told
    with told(outcome), _told_where(*args):
        if isinstance(command, str):
            module, name = command.split(":")
            command = getattr(import_module(f"segtrain.{module}"), name)
        outcome.code = command(*args)
        sys.stdout.flush()
    liveness.deferred_abort(outcome.code)  # after an error all has been told by now
    return outcome.code


@contextmanager
def _told_where(args: argparse.Namespace | None = None) -> Iterator[None]:
    """Makes an error about an option say where it is written: file and line, or --set.

    A name that the system refuses, wherever it is met, is a mistake of the user too: even to ask
    whether a file exists raises OSError then.
    """
    try:
        yield
    except UserError as error:
        named = (getattr(args, key, None) for key in ("config", "checkpoint", "source", "run"))
        if source := next(filter(None, named), None):
            from segtrain.config import recipes
            from segtrain.config.loading import with_places

            with suppress(ConfigError):
                source = recipes.find(str(source)).path
            error.args = (with_places(str(error), str(source), getattr(args, "set", ())),)
        raise
    except OSError as error:
        if error.errno not in _WRONG_NAMES or error.filename is None:
            raise
        # The name alone may fill a screen.
        name, reason = printable(os.fsdecode(error.filename), 2 * MAX_NAME), error.strerror or ""
        raise ConfigError(f"{name}: {reason[:1].lower()}{reason[1:]}") from None


@contextmanager
def _told(outcome: _Outcome) -> Iterator[None]:
    """Prints an error that is not of segtrain itself, and sets its exit code."""
    try:
        yield
    except UserError as error:
        say(str(error))
        outcome.code = error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        outcome.code = EXIT_INTERRUPTED
    except BrokenPipeError:
        if not reader_has_left():
            raise
        # Not success: the output that is lost may have reported a failure.
        outcome.code = EXIT_PIPE
    except OSError as error:
        # Only errors without a file name can come from stdout.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        problem = stdout_problem() if is_full and error.filename is None else None
        if problem is None:
            raise
        say(f"standard output: {problem}")
        outcome.code = EXIT_SYSTEM


@contextmanager
def _told_by_a_rank(outcome: _Outcome) -> Iterator[None]:
    """The same in a rank of the launcher: what all ranks have to say is said once."""
    signals.follow_launcher()
    consequence = False
    try:
        yield
    except UserError as error:
        outcome.code, consequence = error.exit_code, isinstance(error, LostRanksError)
        if not consequence and is_first_to_print(str(error)):
            say(str(error))
    finally:
        write_exit_status(outcome.code, consequence=consequence)
    # A rank that stopped because it was asked to has not failed: torch elastic must not restart it.
    if outcome.code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        outcome.code = EXIT_OK
