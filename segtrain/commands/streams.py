"""Standard input, output and error: what to do when they are closed, full or not read."""

import io
import os
import select
import sys


def prepare() -> None:
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
