"""Runs a command: its errors become messages and exit codes, whatever standard output is."""

import argparse
import errno
import io
import os
import select
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from importlib import import_module

from segtrain import plugins
from segtrain.commands.addresses import fetch_runs
from segtrain.distributed import liveness, signals
from segtrain.distributed.liveness import has_launcher, is_first_to_print, write_exit_status
from segtrain.errors import (
    EXIT_CONFIG,
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


def _discard_stdout() -> None:
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


# With these errors a name is wrong: too long, in a folder of somebody else, not in UTF-8.
_WRONG_NAMES = (errno.ENAMETOOLONG, errno.EACCES, errno.EPERM, errno.EILSEQ)
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EIO)


def run(command: Callable[..., int] | str, *args: argparse.Namespace) -> int:
    """Runs `command` and returns the exit code; errors of segtrain itself keep their traceback.

    A module of segtrain that is missing is told in a line: features can be deleted.

    command: called with `args`; as text "module:name" of segtrain, which is imported first.
    """
    code, consequence, is_rank = EXIT_INTERNAL, False, has_launcher()
    # A torchrun that is killed leaves its ranks behind.
    if is_rank or "TORCHELASTIC_RUN_ID" in os.environ:
        signals.follow_launcher()
    try:
        with _with_place(*args):
            for parsed in args:
                fetch_runs(parsed)
            for source in getattr(args[0], "plugin", ()) if args else ():
                plugins.load(source)
            if isinstance(command, str):
                module, name = command.split(":")
                command = getattr(import_module(f"segtrain.{module}"), name)
            code = command(*args)
            sys.stdout.flush()
    except UserError as error:
        code = error.exit_code
        consequence = is_rank and isinstance(error, LostRanksError)
        # What all ranks have to say is said once.
        if not is_rank or (not consequence and is_first_to_print(str(error))):
            say(str(error))
    except KeyboardInterrupt:
        say("interrupted")
        code = EXIT_INTERRUPTED
    except BrokenPipeError:
        if not reader_has_left():
            raise
        code = EXIT_PIPE  # not success: the output that is lost may have reported a failure
    except ModuleNotFoundError as error:
        if not f"{error.name}.".startswith("segtrain."):
            raise
        code, missing = EXIT_CONFIG, f"this needs {error.name}, which is not installed"
        if not is_rank or is_first_to_print(missing):
            say(missing)
    except OSError as error:
        # Only errors without a file name can come from stdout.
        if is_rank or error.errno not in _FULL or error.filename is not None:
            raise
        _discard_stdout()
        say(f"cannot write: {(error.strerror or str(error)).lower()}")
        code = EXIT_SYSTEM
    finally:  # after an error that is raised on, too
        if is_rank:
            write_exit_status(code, consequence=consequence)
    # A rank that stopped because it was asked to has not failed, and is not to be started again.
    if is_rank and code in (EXIT_INTERRUPTED, EXIT_TERMINATED):
        code = EXIT_OK
    liveness.deferred_abort(code)  # after an error all has been told by now
    return code


@contextmanager
def _with_place(args: argparse.Namespace | None = None) -> Iterator[None]:
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
