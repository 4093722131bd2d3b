"""Runs a command: its errors become messages and exit codes, whatever standard output is."""

import errno
import io
import os
import select
import sys
from collections.abc import Callable
from functools import partial

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


Command = Callable[[], int]

# With these errors a name is wrong: too long, in a folder of somebody else, not in UTF-8.
_WRONG_NAMES = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EILSEQ)


def run(command: Command) -> int:
    """Runs `command` and returns the exit code; errors of segtrain itself keep their traceback."""
    command = partial(_with_names_refused, command)
    code = _run_as_rank(command) if has_launcher() else _run_alone(command)
    liveness.deferred_abort(code)  # after an error all has been told by now
    return code


def _with_names_refused(command: Command) -> int:
    """As `command`; a name that the system refuses, wherever it is met, is a mistake of the user.

    Even to ask whether a file exists raises OSError then.
    """
    try:
        return command()
    except OSError as error:
        if error.errno not in _WRONG_NAMES or error.filename is None:
            raise
        name, reason = os.fsdecode(error.filename), error.strerror or ""
        if error.errno == errno.ENAMETOOLONG:
            name = printable(name, 2 * MAX_NAME)
            reason += ": expected at most 255 bytes between two slashes and 4095 in all"
        raise ConfigError(f"{name}: {reason[:1].lower()}{reason[1:]}") from None


def _run_alone(command: Command) -> int:
    try:
        code = command()
        sys.stdout.flush()
        return code
    except UserError as error:
        say(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        say("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not reader_has_left():
            raise
        # Not success: the output that is lost may have reported a failure.
        return EXIT_PIPE
    except OSError as error:
        # Only errors without a file name can come from stdout.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        problem = stdout_problem() if is_full and error.filename is None else None
        if problem is None:
            raise
        say(f"standard output: {problem}")
        return EXIT_SYSTEM


def _run_as_rank(command: Command) -> int:
    """The same in a rank of the launcher: what all ranks have to say is said once."""
    signals.follow_launcher()
    code, consequence = EXIT_INTERNAL, False
    try:
        code = command()
        sys.stdout.flush()
    except UserError as error:
        code, consequence = error.exit_code, isinstance(error, LostRanksError)
        if not consequence and is_first_to_print(str(error)):
            say(str(error))
    finally:
        write_exit_status(code, consequence=consequence)
    # A rank that stopped because it was asked to has not failed: torch elastic must not restart it.
    return EXIT_OK if code in (EXIT_INTERRUPTED, EXIT_TERMINATED) else code
