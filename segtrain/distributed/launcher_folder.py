"""The private folder through which ranks and the launcher that started them exchange files.

Each attempt has a subfolder. Every user may create folders beside it: if a cleaner removes it,
another user can put one of the same name there. So every access checks the owner and follows no
links.
"""

import json
import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any, TypeVar

T = TypeVar("T")

# Names the folder, in the environment of the ranks.
VARIABLE = "SEGTRAIN_OUTCOMES"

# Set if all ranks of the run are on this machine.
ONE_MACHINE = "SEGTRAIN_ONE_MACHINE"

_MAX_BYTES = 128


def has_launcher() -> bool:
    """Whether segtrain's own launcher started this process as a rank."""
    return VARIABLE in os.environ and "RANK" in os.environ


def store_file() -> Path | None:
    """Through which the ranks of this attempt meet; None unless all are on this machine."""
    if not has_launcher() or ONE_MACHINE not in os.environ:
        return None
    with _attempt_folder():
        return Path(os.environ[VARIABLE], _attempt(), "store")


def write_file(name: str, text: str = "", *, new: bool = False) -> None:
    """Writes at most 128 bytes to the file `name` of this attempt, in place by one system call.

    FileExistsError: `new`, and there is such a file. OSError: no disk space, no folder of ours.
    """
    flags = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | (os.O_EXCL if new else 0)
    with _attempt_folder() as folder:
        file = os.open(name, flags, 0o600, dir_fd=folder)
        with open(file, "wb", buffering=0) as opened:
            opened.write(text.encode().ljust(_MAX_BYTES))  # covers a longer text from before


def write_record(suffix: str, *values: Any) -> None:
    """Writes or replaces this rank's file with this suffix: its number and `values`, as JSON."""
    rank = int(os.environ["RANK"])
    # If the launcher is gone or its disk full, only the exit code of the process is left.
    with suppress(OSError):
        write_file(f"{rank}{suffix}", json.dumps([rank, *values]))


def read_records(root: Path, suffix: str, kind: Callable[..., T]) -> list[T]:
    """`kind` of each rank's values in the last attempt; skips files that others or half wrote."""
    records = []
    with (
        suppress(OSError),
        _open_folder(root) as root_fd,
        _open_folder(last_attempt(root), root_fd) as folder,
    ):
        for name in os.listdir(folder):
            if name.endswith(suffix):
                with suppress(OSError, ValueError, TypeError):  # a link, half a text
                    file = os.open(name, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK, dir_fd=folder)
                    with open(file, "rb") as opened:
                        records.append(kind(*json.loads(opened.read(_MAX_BYTES))))
    return records


def last_attempt(root: Path) -> str:
    """The name of the last attempt's folder in `root`, which may not exist yet."""
    with suppress(OSError):  # `root` was removed
        return max((name for name in os.listdir(root) if name.isdecimal()), key=int, default="0")
    return "0"


def ensure_folder(root: Path) -> bool:
    """Creates the launcher's folder again if it was removed; whether it is this user's alone."""
    with suppress(OSError):
        root.mkdir(mode=0o700, exist_ok=True)
        with _open_folder(root):
            return True
    return False


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@contextmanager
def _attempt_folder() -> Iterator[int]:
    """A descriptor of this attempt's folder, created if missing; only the launcher creates root."""
    with _open_folder(os.environ[VARIABLE]) as root:
        with suppress(FileExistsError):
            os.mkdir(_attempt(), 0o700, dir_fd=root)
        with _open_folder(_attempt(), root) as folder:
            yield folder


@contextmanager
def _open_folder(path: str | Path, dir_fd: int | None = None) -> Iterator[int]:
    """A descriptor of a folder; OSError unless it is ours and nobody else can write to it."""
    folder = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW, dir_fd=dir_fd)
    try:
        found = os.fstat(folder)
        if found.st_uid != os.geteuid() or found.st_mode & 0o022:
            raise PermissionError(f"{path}: other users can write here")
        yield folder
    finally:
        os.close(folder)
