"""How each rank ended, written by the ranks for their launcher.

Exit codes do not tell a cause from its consequences: when a rank fails, the others lose their
connections to it and fail too, often before it has ended.
"""

import time
import zlib
from pathlib import Path
from typing import NamedTuple

from segtrain.distributed import launcher_folder


class ExitStatus(NamedTuple):
    """The end of a rank."""

    rank: int
    code: int | None  # None from the start of training until it ends in good order
    consequence: bool  # it failed because another rank did
    time: float  # in seconds since the epoch


def write_exit_status(code: int | None, *, consequence: bool = False) -> None:
    """Writes or replaces the exit status of this rank."""
    launcher_folder.write_record(".json", code, consequence, time.time())


def read_exit_statuses(root: Path) -> list[ExitStatus]:
    """Those of the last attempt in the launcher's folder `root`, by time."""
    statuses = launcher_folder.read_records(root, ".json", ExitStatus)
    return sorted(statuses, key=lambda status: status.time)


def is_first_to_print(message: str) -> bool:
    """Whether no other rank of this machine has asked for `message`, so that it appears once."""
    try:
        launcher_folder.write_file(message_file(message), new=True)
    except FileExistsError:
        return False
    except OSError:
        pass  # better printed twice than never
    return True


def message_file(message: str) -> str:
    """The name of the file that marks `message` as printed."""
    return f"{zlib.crc32(message.encode()):08x}.said"
