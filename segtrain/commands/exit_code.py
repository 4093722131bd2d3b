"""Runs a command and turns its errors into messages and exit codes."""

import errno
import sys
from collections.abc import Callable

from segtrain.commands import streams
from segtrain.distributed import aftermath, signals
from segtrain.distributed.exit_status import is_first_to_print, write_exit_status
from segtrain.distributed.launcher_folder import has_launcher
from segtrain.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PIPE,
    EXIT_SYSTEM,
    EXIT_TERMINATED,
    LostRanksError,
    UserError,
)
from segtrain.text import say

Command = Callable[[], int]


def run(command: Command) -> int:
    """Runs `command` and returns the exit code; errors of segtrain itself keep their traceback."""
    code = _run_as_rank(command) if has_launcher() else _run_alone(command)
    aftermath.cut_now(code)  # after an error all has been told by now
    return code


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
        if not streams.reader_has_left():
            raise
        # Not success: the output that is lost may have reported a failure.
        return EXIT_PIPE
    except OSError as error:
        # Only errors without a file name can come from stdout.
        is_full = error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        problem = streams.stdout_problem() if is_full and error.filename is None else None
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
