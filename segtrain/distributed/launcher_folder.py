"""The private folder through which ranks and the launcher that started them exchange files.

Each attempt to run has a subfolder. The folder lies in a place where every user may create folders:
if a cleaner removes it, another user can put a folder of the same name there. So every access
checks the owner first and follows no links.
"""

import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

# Names the folder, in the environment of the ranks.
VARIABLE = "SEGTRAIN_OUTCOMES"

# Set if all ranks of the run are on this machine.
ONE_MACHINE = "SEGTRAIN_ONE_MACHINE"

_OPEN_FOLDER = os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW | os.O_CLOEXEC
_CREATE_FILE = os.O_WRONLY | os.O_CREAT | os.O_NOFOLLOW | os.O_CLOEXEC
_MAX_BYTES = 4096


def has_launcher() -> bool:
    """Whether segtrain's own launcher started this process as a rank."""
    return VARIABLE in os.environ and "RANK" in os.environ


def store_file() -> Path | None:
    """The file through which the ranks of this attempt find each other.

    None unless segtrain's launcher started all ranks on this machine.

    Raises:
        OSError: its folder cannot be made.
    """
    if not has_launcher() or ONE_MACHINE not in os.environ:
        return None
    with _attempt_folder():
        return Path(os.environ[VARIABLE], _attempt(), "store")


def open_file(name: str, flags: int = 0) -> int:
    """A descriptor for writing `name` in this attempt's folder, created if missing.

    Raises:
        OSError: it cannot be created, or the launcher's folder is missing or not ours.
    """
    with _attempt_folder() as folder:
        return os.open(name, _CREATE_FILE | flags, 0o600, dir_fd=folder)


def replace_file(name: str, content: bytes) -> None:
    """Writes `name` in this attempt's folder; readers see the old content or the new.

    Raises:
        OSError: as `open_file`.
    """
    temporary = f"{name}.tmp"
    with _attempt_folder() as folder:
        with suppress(FileNotFoundError):
            os.unlink(temporary, dir_fd=folder)
        handle = os.open(temporary, _CREATE_FILE | os.O_EXCL, 0o600, dir_fd=folder)
        try:
            os.write(handle, content)
        finally:
            os.close(handle)
        os.replace(temporary, name, src_dir_fd=folder, dst_dir_fd=folder)


def ensure_folder(root: Path) -> bool:
    """Creates the launcher's folder again if it was removed; whether it is this user's alone."""
    with suppress(OSError):
        root.mkdir(mode=0o700, exist_ok=True)
    return _is_own(root)


def last_attempt(root: Path) -> Path:
    """The folder of the last attempt, which may not exist yet."""
    try:
        attempts = [path for path in root.iterdir() if path.name.isdecimal()]
    except OSError:  # `root` was removed
        attempts = []
    return max(attempts, key=lambda path: int(path.name), default=root / "0")


def read_files(root: Path, suffix: str) -> dict[str, str]:
    """The texts of the last attempt's files with this suffix, by their names without it."""
    folder = last_attempt(root)
    if not _is_own(root) or not _is_own(folder):
        return {}
    texts = {}
    for path in folder.glob(f"*{suffix}"):
        with suppress(OSError):  # just removed, or a link
            handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
            try:
                texts[path.stem] = os.read(handle, _MAX_BYTES).decode(errors="replace")
            finally:
                os.close(handle)
    return texts


def _attempt() -> str:
    return os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")


@contextmanager
def _attempt_folder() -> Iterator[int]:
    """A descriptor of this attempt's folder, created if missing.

    Ranks never create the launcher's folder itself: its launcher does.
    """
    root = _open_own(os.environ[VARIABLE])
    try:
        with suppress(FileExistsError):
            os.mkdir(_attempt(), 0o700, dir_fd=root)
        folder = _open_own(_attempt(), dir_fd=root)
    finally:
        os.close(root)
    try:
        yield folder
    finally:
        os.close(folder)


def _open_own(path: str, dir_fd: int | None = None) -> int:
    folder = os.open(path, _OPEN_FOLDER, dir_fd=dir_fd)
    if _is_private(os.fstat(folder)):
        return folder
    os.close(folder)
    raise PermissionError(f"{path}: other users can write here")


def _is_own(path: Path) -> bool:
    try:
        return _is_private(path.lstat())
    except OSError:
        return False


def _is_private(found: os.stat_result) -> bool:
    """Whether it is a folder of this user that nobody else can write to."""
    return (
        stat.S_ISDIR(found.st_mode)
        and found.st_uid == os.geteuid()
        and not found.st_mode & (stat.S_IWGRP | stat.S_IWOTH)
    )
