"""Lines for the console and for the log files of the run."""

import os
import sys
from collections.abc import Callable

from tqdm import tqdm

from segtrain.text import printable_lines

log_files: list[Callable[[str], None]] = []
"""What writes a line to the log file of a run; filled while a run is open."""


def say(line: str) -> None:
    """Prints above any progress bar, and writes to the log files; escapes control characters.

    An error message may have several lines.
    """
    line = "\n".join(printable_lines(line))
    try:
        with tqdm.external_write_mode(file=sys.stderr):
            print(line, flush=True)
    except OSError:
        # The reader has gone, as after `| head`: no reason to end a training.
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    log_only(line)


def log_only(line: str) -> None:
    """Writes to the log files."""
    for write in log_files:
        write(line)
