"""The lock that keeps two runs out of one directory."""

import errno
import fcntl
import os
import socket
import stat
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Self

from segtrain import files
from segtrain.errors import ConfigError, ExecutionError
from segtrain.text import printable

LOCK = ".lock"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no locks


class Claim:
    """A context in which no other run can use `directory`, which is made if need be.

    what: the directory holds, for messages.
    The kernel releases the lock when the process ends. Some file systems have no locks.
    """

    def __init__(self, directory: Path, *, what: str = "run directory") -> None:
        self._directory, self._what = directory, what
        self._path = directory / LOCK
        self._handle: int | None = None
        self._made = False

    def __enter__(self) -> Self:
        """Locks the directory; ConfigError if another run uses it or it cannot be written."""
        # If there is a lock file already, a killed run made the directory.
        self._made = not self._directory.exists() or self._path.exists()
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            self._handle = _locked(self._path)
        except _HeldError as error:
            repair = "wait for it to end, or choose another directory by --output"
            raise ConfigError(f"{self._directory}: in use by {error}; {repair}") from None
        except OSError as error:
            raise ConfigError(cannot_write(self._directory, error, self._what)) from None
        return self

    def __exit__(self, *_: object) -> None:
        # If the directory was deleted meanwhile, the lock file there may be another run's.
        with suppress(OSError):
            if files.is_same_file(self._handle, self._path):
                self._path.unlink()
        os.close(self._handle)
        self._handle = None
        if self._made:
            with suppress(OSError):
                self._directory.rmdir()  # if it is empty

    def renew(self) -> None:
        """Locks again if the lock file was deleted; called before each write.

        ExecutionError if another run has locked the directory, or the file cannot be made again.
        """
        if self._handle is None or files.is_same_file(self._handle, self._path):
            return
        try:
            self._directory.mkdir(parents=True, exist_ok=True)
            handle = _locked(self._path)
        except (_HeldError, OSError) as error:
            reason = f"in use by {error}" if isinstance(error, _HeldError) else error.strerror
            raise ExecutionError(
                f"{self._path}: deleted during this run, and cannot be locked again: {reason}; "
                "this run stops before it writes into files of another one"
            ) from None
        os.close(self._handle)
        self._handle = handle


def use_by_others(directory: Path) -> str | None:
    """Which other process uses `directory`, and what to do; None if there is none."""
    holder = ""
    try:
        with files.open_regular(directory / LOCK, "r", errors="replace") as file:
            holder = printable(file.read(200).strip())
            fcntl.flock(file, fcntl.LOCK_SH | fcntl.LOCK_NB)
            return None
    except BlockingIOError:
        remedy = "wait for it to end"
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            return None
        # Without locks, nothing tells whether the process has ended.
        remedy = f"if it has ended, delete {directory / LOCK}"
    return None if holder == _this_process() else f"in use by {holder or 'another run'}; {remedy}"


class _HeldError(Exception):
    """Another process holds the lock; says which."""


def _locked(path: Path) -> int:
    """A handle of the lock file at `path`, which this process has locked."""
    # A link would put the lock elsewhere, and opening a pipe would block.
    flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW | os.O_NONBLOCK
    with ExitStack() as stack:
        handle = os.open(path, flags, 0o644)
        stack.callback(os.close, handle)
        if not stat.S_ISREG(os.fstat(handle).st_mode):
            raise OSError(errno.EINVAL, "not a plain file", str(path))
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            holder = printable(os.read(handle, 200).decode(errors="replace").strip())
            raise _HeldError(holder or "another run") from None
        except OSError as error:
            if error.errno not in _NO_LOCKS:
                raise
        # Between open and lock, another run may have removed the file.
        if files.is_same_file(handle, path):
            os.truncate(handle, 0)
            with suppress(OSError):  # a full disk; the name is only for people
                os.write(handle, f"{_this_process()}\n".encode())
            stack.pop_all()
            return handle
    return _locked(path)


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


def cannot_write(directory: Path, error: OSError, kind: str = "run directory") -> str:
    """The message that a run cannot write into `directory`."""
    # A failed rename has two names; the second is the one that the user knows.
    path = error.filename2 or error.filename
    where = f" ({Path(path).name})" if path and Path(path) != directory else ""
    what = f"{error.strerror}{where}; choose another by --output"
    return f"{directory}: cannot write the {kind}: {what}"
