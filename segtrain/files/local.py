"""Files that are written whole, opened without waiting, and listed in one order on every disk.

This is the door for every file that a command line, a config or a checkpoint names: plain files
only, of bounded size. A pipe that nobody writes to would be waited for without end; a device never
ends, or is changed by being read.
"""

import errno
import hashlib
import os
import re
import stat
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, suppress
from pathlib import Path
from typing import IO, Any

# Opening a pipe waits for its other end unless this is given.
_AT_ONCE = getattr(os, "O_NONBLOCK", 0)

# A disk takes names of 255 bytes; a dot, a process id and a suffix are added to those written.
_LONG_NAME = 220

_KINDS: tuple[tuple[Callable[[int], bool], str], ...] = (
    (stat.S_ISDIR, "a folder"),
    (stat.S_ISFIFO, "a pipe"),
    (stat.S_ISSOCK, "a socket"),
    (stat.S_ISREG, "a file"),
)


class NotRegularError(OSError):
    """What a name leads to is no plain file."""


@contextmanager
def temporary(path: Path) -> Iterator[Path]:
    """A name beside `path` under which nothing lies yet, for a file that is to replace `path`.

    What still lies there at the end is removed, whatever happened.

    Raises:
        OSError: what an earlier process left there cannot be removed.
    """
    name = path.name
    if len(os.fsencode(name)) > _LONG_NAME:
        name = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    draft = path.with_name(f".{name}.{os.getpid()}.tmp")
    # In containers processes often have the same id as those before them.
    draft.unlink(missing_ok=True)
    try:
        yield draft
    finally:
        # On a disk that has become read-only this fails; the first error says more.
        with suppress(OSError):
            draft.unlink(missing_ok=True)


def is_temporary(path: Path, name: re.Pattern[str]) -> bool:
    """Whether `temporary` made this name for a file whose whole name matches `name`."""
    match = re.fullmatch(r"\.(.+)\.\d+\.tmp", path.name)
    return match is not None and name.fullmatch(match[1]) is not None


def write_whole(path: Path, content: str | bytes, *, durable: bool = True) -> None:
    """Writes the file `path`: at every instant the old file or the new one is there, whole.

    A link of this name is replaced, not followed.

    Args:
        content: text is written as UTF-8.
        durable: wait until it would outlive a loss of power.

    Raises:
        OSError: it cannot be written; then nothing has changed.
    """
    with temporary(path) as draft:
        with draft.open("xb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
            if durable:
                file.flush()
                os.fsync(file.fileno())
        draft.replace(path)
        if durable:
            sync_directory(path.parent)


def write_output(path: Path, content: str | bytes) -> None:
    """Writes a file that the user named: whole, but in place where it is no plain file.

    Replacing /dev/stdout or /dev/null would take it from the whole machine.

    Raises:
        OSError: it cannot be written; such as a pipe that nobody reads, which is not waited for.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        with open(_open_at_once(path), "wb") as file:
            file.write(content.encode() if isinstance(content, str) else content)
    else:
        write_whole(path, content, durable=False)


@contextmanager
def output_place(path: Path) -> Iterator[None]:
    """Refuses, before the work, what `write_output` could not write after it.

    A pipe is held open meanwhile: its reader would take a close for the end.

    Raises:
        NotRegularError: `path` is a folder, a socket, or a pipe that nobody reads.
        OSError: a pipe that may not be written.
    """
    if path.is_dir() or path.is_socket():
        raise NotRegularError(errno.EINVAL, f"is {kind_of(path)}; name a file", str(path))
    with ExitStack() as stack:
        if path.is_fifo():
            stack.callback(os.close, _open_at_once(path))
        yield


def refuse_odd(path: Path) -> None:
    """Refuses to replace what is neither a plain file nor a link.

    Raises:
        NotRegularError: a folder, a pipe, a socket or a device lies at `path`.
    """
    try:
        mode = path.lstat().st_mode
    except FileNotFoundError:
        return
    if not (stat.S_ISREG(mode) or stat.S_ISLNK(mode)):
        raise NotRegularError(errno.EINVAL, f"is {kind_of(path)}; remove it", str(path))


def _open_at_once(path: Path) -> int:
    """A handle for writing in place, which a pipe without a reader does not keep waiting."""
    try:
        handle = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | _AT_ONCE, 0o666)
    except OSError as error:
        if error.errno == errno.ENXIO and path.is_fifo():
            raise NotRegularError(error.errno, "is a pipe that nobody reads", str(path)) from None
        raise
    os.set_blocking(handle, True)  # what the reader has no room for yet is waited for
    return handle


def sync_directory(directory: Path) -> None:
    """Makes the names in `directory` outlive a loss of power, as fsync does the bytes of a file."""
    handle = os.open(directory, os.O_RDONLY)
    try:
        os.fsync(handle)
    except OSError as error:
        # Some network file systems know no such thing.
        if error.errno not in (errno.EINVAL, errno.ENOTSUP):
            raise
    finally:
        os.close(handle)


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """As `open`, for plain files only.

    Raises:
        OSError: it cannot be opened; NotRegularError: it is a folder, a pipe, a device or a socket.
    """

    def opener(name: str, flags: int) -> int:
        return os.open(name, flags | _AT_ONCE, 0o666)

    file = open(path, mode, opener=opener, **options)  # noqa: SIM115 - the caller closes it
    # Asked after opening: what a name leads to can change in between.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_bytes(path: str | Path, max_bytes: int | None = None) -> bytes:
    """The content of a plain file.

    Raises:
        OSError: as `open_regular`; or it holds more than `max_bytes`.
    """
    with open_regular(path) as file:
        content = file.read(-1 if max_bytes is None else max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def is_at(handle: int, path: Path) -> bool:
    """Whether the open file `handle` is the one that `path` names now."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def kind_of(path: Path) -> str:
    """What lies at `path`, for messages: "a folder", "a pipe", ..."""
    mode = path.lstat().st_mode
    if stat.S_ISLNK(mode):
        if not path.exists():
            return "a link to nothing"
        mode = path.stat().st_mode
    return next((name for is_kind, name in _KINDS if is_kind(mode)), "a device")


def walk(folder: Path, *, hidden: bool) -> Iterator[tuple[Path, list[str]]]:
    """Every folder below and including `folder` with the sorted names of its files.

    The order does not depend on the disk's own. Each folder comes once, however many links lead to
    it: under its own name if that lies below `folder`, else under the first of the links' names.

    Args:
        hidden: also folders and files whose names begin with a dot.

    Raises:
        OSError: a folder cannot be read.
    """
    seen: set[str] = set()
    links = [folder]
    while links:
        # Links wait until no folder is left that is reached without them.
        links.sort()
        waiting = [links.pop(0)]
        while waiting:
            here = waiting.pop()
            real = os.path.realpath(here)
            if real in seen:
                continue
            seen.add(real)
            with os.scandir(here) as found:
                listed = sorted(
                    (entry.name, _is_folder(entry), entry.is_symlink()) for entry in found
                )
            listed = [one for one in listed if hidden or not one[0].startswith(".")]
            yield here, [name for name, is_folder, _ in listed if not is_folder]
            inside = [(here / name, is_link) for name, is_folder, is_link in listed if is_folder]
            links += [path for path, is_link in inside if is_link]
            # The last one is taken first.
            waiting += [path for path, is_link in reversed(inside) if not is_link]


def _is_folder(entry: os.DirEntry[str]) -> bool:
    try:
        return entry.is_dir()
    except OSError:  # a link to itself
        return False
