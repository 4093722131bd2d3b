"""How the ranks ended, told to the launcher that started them.

Exit codes alone do not tell a cause from its consequences: when one rank fails, the others lose
their connections to it and fail too, often before it has ended. So every rank leaves a note in a
folder of the launcher's, which has one inside for each attempt to run.

The folder lies where every user may make folders. If a cleaner removes it, another user can put one
of the same name there; so whoever reads or writes looks first whose it is, and follows no links.
"""

import json
import os
import stat
import time
import zlib
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import NamedTuple

# Names the launcher's folder, in the environment of the ranks that it starts.
VARIABLE = "SEGTRAIN_OUTCOMES"

# Set where all ranks of the run are on this machine.
ONE_MACHINE = "SEGTRAIN_ONE_MACHINE"

_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 4096


class ExitStatus(NamedTuple):
    """The end of one rank.

    code: its exit code; None if it began to train and has left no other note.
    consequence: it failed because another rank did.
    time: seconds since the epoch.
    """

    rank: int
    code: int | None
    consequence: bool
    time: float


def is_wanted() -> bool:
    """Whether this process is a rank that segtrain's own launcher started."""
    return VARIABLE in os.environ and "RANK" in os.environ


def meeting_file() -> Path | None:
    """The file through which the ranks of this attempt meet, if all of them are on this machine.

    Raises:
        OSError: its folder cannot be made.
    """
    if not is_wanted() or ONE_MACHINE not in os.environ:
        return None
    with _own_folder():
        return Path(os.environ[VARIABLE], _attempt(), "store")


def create(name: str, flags: int) -> int:
    """A file of this attempt, opened with `flags` and made if need be.

    Raises:
        OSError: it cannot be, or the launcher's folder is gone or somebody else's.
    """
    with _own_folder() as folder:
        return os.open(
            name, flags | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC, 0o600, dir_fd=folder
        )


def tell(code: int | None, *, consequence: bool = False) -> None:
    """Leaves the note of this rank, in the place of an earlier one."""
    rank = int(os.environ["RANK"])
    text = json.dumps(ExitStatus(rank, code, consequence, time.time())).encode()
    # The launcher may be gone, or its disk full: then it goes by the exit code.
    with suppress(OSError), _own_folder() as folder:
        with suppress(FileNotFoundError):
            os.unlink(f"{rank}.tmp", dir_fd=folder)
        handle = create(f"{rank}.tmp", os.O_WRONLY | os.O_EXCL)
        try:
            os.write(handle, text)
        finally:
            os.close(handle)
        os.replace(f"{rank}.tmp", f"{rank}.json", src_dir_fd=folder, dst_dir_fd=folder)


def is_first_to_say(text: str) -> bool:
    """Whether no other rank of this machine has said `text`: a mistake is shown once."""
    try:
        os.close(create(said_name(text), os.O_WRONLY | os.O_EXCL))
    except FileExistsError:
        return False
    except OSError:
        pass  # better twice than never
    return True


def said_name(text: str) -> str:
    """The name of the file that says that `text` has been said."""
    return f"{zlib.crc32(text.encode()):08x}.said"


def keep_root(root: Path) -> bool:
    """Makes the launcher's folder again where it was removed; whether it is this user's alone."""
    with suppress(OSError):
        root.mkdir(mode=0o700, exist_ok=True)
    return _is_own(root)


def notes(root: Path, suffix: str) -> dict[str, str]:
    """What stands in the files of the last attempt with this suffix, by their names without it."""
    folder = last_attempt(root)
    if not _is_own(root) or not _is_own(folder):
        return {}
    found = {}
    for path in folder.glob(f"*{suffix}"):
        with suppress(OSError):  # removed in this moment, or a link
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                found[path.stem] = os.read(handle, _MAX_BYTES).decode(errors="replace")
            finally:
                os.close(handle)
    return found


def last_attempt(root: Path) -> Path:
    """Where the ranks of the last attempt leave their notes; it need not be there yet."""
    try:
        attempts = [path for path in root.iterdir() if path.name.isdecimal()]
    except OSError:  # it was removed
        attempts = []
    return max(attempts, key=lambda path: int(path.name), default=root / "0")


def read(root: Path) -> list[ExitStatus]:
    """The notes of the last attempt, in the order of time; what makes no sense is passed over."""
    found = []
    for text in notes(root, ".json").values():
        with suppress(ValueError, TypeError):
            note = ExitStatus(*json.loads(text))
            if type(note.rank) is int and type(note.code) in (int, type(None)):
                found.append(note)
    return sorted(found, key=lambda note: note.time)


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@contextmanager
def _own_folder() -> Iterator[int]:
    """A descriptor of this attempt's folder, which is made if need be.

    Not so the launcher's folder: its launcher makes it again.

    Raises:
        OSError: one of them is missing, or not this user's alone.
    """
    root = _opened(os.environ[VARIABLE])
    try:
        with suppress(FileExistsError):
            os.mkdir(_attempt(), 0o700, dir_fd=root)
        folder = _opened(_attempt(), dir_fd=root)
    finally:
        os.close(root)
    try:
        yield folder
    finally:
        os.close(folder)


def _opened(path: str, dir_fd: int | None = None) -> int:
    folder = os.open(path, _FOLDER, dir_fd=dir_fd)
    if _is_private(os.fstat(folder)):
        return folder
    os.close(folder)
    raise PermissionError(f"{path}: not this user's alone")


def _is_own(path: Path) -> bool:
    try:
        return _is_private(path.lstat())
    except OSError:
        return False


def _is_private(found: os.stat_result) -> bool:
    """Whether it is a folder of this user's into which nobody else can write."""
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
