"""Atomic writes: after a crash the old file is there or the new one, never a part of one."""

import errno
import hashlib
import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path

from segtrain.files.reading import NotRegularError, kind_of

# A file name may have 255 bytes; a temporary name adds a dot, a process id and a suffix.
_MAX_NAME_BYTES = 220


@contextmanager
def temporary(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """A free name beside `path`, for a file that is to replace it; an unused file is removed."""
    name = path.name
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    draft = path.with_name(f".{name}.{os.getpid()}{suffix}")
    # In containers, processes often have the same id as earlier ones.
    draft.unlink(missing_ok=True)
    try:
        yield draft
    finally:
        # Fails on a disk that has become read-only; the first error says more.
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def write_atomic(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Creates or replaces the file `path`; a symbolic link is replaced, not followed.

    Text is written as UTF-8. durable: return only when the file would survive a loss of power.
    """
    with temporary(path) as draft:
        with draft.open("xb") as file:
            file.write(_encoded(content))
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            sync_directory(path.parent)


def sync_directory(directory: Path) -> None:
    """Makes new names in `directory` survive a loss of power, as fsync does for contents."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems do not support it.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def write_output(path: Path, content: str | bytes) -> None:
    """Writes a file that the user named: atomically, but links, pipes and devices in place.

    Replacing /dev/stdout or /dev/null would take it from the whole machine.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with open(_open_in_place(path), "wb") as file:
            file.write(_encoded(content))
    else:
        write_atomic(path, content, durable=False)


@contextmanager
def reserve_output(path: Path) -> Iterator[None]:
    """Raises OSError at once for what `write_output` could not write after a long computation.

    A pipe is held open meanwhile: its reader would take a close for the end of the data.
    """
    if path.is_dir() or path.is_socket():
        raise NotRegularError(errno.EINVAL, f"is {kind_of(path)}; name a file", str(path))
    folder = Path(os.path.realpath(path)).parent  # of what a link leads to, which is written
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    if os.path.islink(os.path.realpath(path)):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not (path.exists() or os.access(folder, os.W_OK)):
        raise PermissionError(errno.EACCES, "its folder may not be written", str(path))
    handle = _open_in_place(path) if path.is_fifo() else None
    try:
        yield
    finally:
        if handle is not None:
            os.close(handle)


def check_replaceable(path: Path) -> None:
    """Raises NotRegularError for a folder, pipe, socket or device; files and links are fine."""
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file()):
        raise NotRegularError(errno.EINVAL, f"is {kind_of(path)}; remove it", str(path))


def _encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content


def _open_in_place(path: Path) -> int:
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NONBLOCK, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():
            raise NotRegularError(error.errno, "is a pipe that nobody reads", str(path)) from None
        raise
    os.set_blocking(handle, True)  # a slow reader is waited for
    return handle
