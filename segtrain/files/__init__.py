"""Files that survive crashes and files from strangers: reading, atomic writes, manifest, loading.

Reading opens regular files only: a pipe without a writer would block for ever, and a device has no
end. Writing is atomic: after a crash the old file is there or the new one, never a part of one.
"""

import errno
import hashlib
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import get_native_id
from typing import IO, Any

from segtrain.errors import ExecutionError, UserError
from segtrain.text import printable

# A file name may have 255 bytes; a temporary name adds a dot, a process id and a suffix.
_MAX_NAME_BYTES = 220
# Environment: where the cache lies.
_CACHE = "SEGTRAIN_CACHE"


class NotRegularError(OSError):
    """A path leads to something that is not a regular file."""


@contextmanager
def os_errors_as(
    kind: type[UserError], place: object = "", what: str = "cannot be read"
) -> Iterator[None]:
    """Raises an OSError inside as `kind`: `PLACE: cannot be read: permission denied`.

    place: what is named if the error itself names no file.
    """
    try:
        yield
    except OSError as error:
        reason = (error.strerror or str(error)).lower()
        if isinstance(error, FileNotFoundError) and isinstance(error.filename, str | Path):
            # A disk that is gone takes many files along, of which this is only the first.
            parents = Path(error.filename).parents
            if gone := [parent for parent in parents if not os.path.exists(parent)]:
                reason += f"; there is no folder {printable(gone[-1])}"
        raise kind(f"{printable(place or error.filename)}: {what}: {reason}") from error


def cache_folder(*below: str) -> Path:
    """The folder of the user's cache, or one in it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.path.abspath(os.environ.get(_CACHE) or f"{base}/segtrain"), *below)


@contextmanager
def cache_failures() -> Iterator[None]:
    """ExecutionError where the cache cannot be written."""
    with os_errors_as(
        ExecutionError, what=f"the cache cannot be written ({_CACHE} names another folder)"
    ):
        yield


def open_regular(path: str | Path, mode: str = "rb", **options: Any) -> IO[Any]:
    """As `open`, but raises NotRegularError for a folder, a pipe, a device or a socket."""

    def opener(name: str, flags: int) -> int:
        # Without O_NONBLOCK, opening a pipe waits for the other end.
        return os.open(name, flags | os.O_NONBLOCK, 0o666)

    file = open(path, mode, opener=opener, **options)  # noqa: SIM115 - the caller closes it
    # Checked after opening: `path` could lead elsewhere a moment later.
    if not stat.S_ISREG(os.fstat(file.fileno()).st_mode):
        file.close()
        raise NotRegularError(errno.EINVAL, "not a regular file", str(path))
    return file


def read_bytes(path: str | Path, max_bytes: int | None = None) -> bytes:
    """The content of a regular file; raises OSError if it holds more than `max_bytes`."""
    with open_regular(path) as file:
        content = file.read(-1 if max_bytes is None else max_bytes + 1)
    if max_bytes is not None and len(content) > max_bytes:
        raise OSError(errno.EFBIG, f"larger than {max_bytes:,} bytes", str(path))
    return content


def parse_json(text: str | bytes) -> Any:
    """As `json.loads`, but ValueError also for brackets nested deeper than Python's stack."""
    try:
        return json.loads(text)
    except RecursionError:
        raise ValueError("brackets nested too deeply") from None


def is_same_file(handle: int, path: Path) -> bool:
    """Whether `path` still leads to the open file `handle`."""
    try:
        return os.path.samestat(os.fstat(handle), path.stat())
    except (FileNotFoundError, NotADirectoryError):
        return False


def kind_of(path: Path) -> str:
    """What there is at `path`, for messages: "a folder", "a pipe", ..."""
    if path.is_symlink() and not path.exists():
        return "a link to nothing"
    kinds = {"a folder": path.is_dir, "a pipe": path.is_fifo, "a socket": path.is_socket}
    kinds["a file"] = path.is_file
    return next((kind for kind, is_kind in kinds.items() if is_kind()), "a device")


def check_utf8(path: Path) -> None:
    """OSError if TensorBoard, torch and onnx cannot write to `path`: they take UTF-8 alone."""
    try:
        str(path).encode()
    except UnicodeEncodeError:
        raise OSError(errno.EILSEQ, "expected a name in UTF-8", str(path)) from None


def walk(folder: Path, *, hidden: bool) -> Iterator[tuple[Path, list[str]]]:
    """`folder` and every folder below it, each with the sorted names of its files.

    Each folder comes once: under its own name if that is below `folder`, otherwise under the first
    link that leads to it. OSError if one cannot be read. hidden: also names that begin with a dot.
    """

    def fail(error: OSError) -> None:
        raise error

    seen: set[str] = set()
    links = [folder]
    while links:
        # Follow links only when all folders reached without them are done.
        links.sort()
        for here, folders, names in os.walk(links.pop(0), onerror=fail):
            real = os.path.realpath(here)
            if real in seen:
                # os.walk goes on with what is left in this list.
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
            links += [path for name in folders if (path := Path(here, name)).is_symlink()]
            yield Path(here), sorted(name for name in names if hidden or not name.startswith("."))


@contextmanager
def temporary(path: Path, suffix: str = ".tmp") -> Iterator[Path]:
    """A free name beside `path`, for a file that is to replace it; an unused file is removed."""
    name = path.name
    if len(os.fsencode(name)) > _MAX_NAME_BYTES:
        name = hashlib.blake2b(os.fsencode(name), digest_size=16).hexdigest()
    # That of a thread: several may write one file. The main thread has that of its process.
    draft = path.with_name(f".{name}.{get_native_id()}{suffix}")
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
        # The content before the name: a crash between them leaves the old file.
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
    """Writes a file that the user named: atomically, but links and devices in place.

    Replacing /dev/stdout or /dev/null would take it from the whole machine.
    """
    if path.is_symlink() or (path.exists() and not path.is_file()):
        path.write_bytes(_encoded(content))
    else:
        write_atomic(path, content, durable=False)


def check_output(path: Path, *begins: str) -> None:
    """Raises OSError for what `write_output` may not replace or could not write.

    Call it before a long computation. Labels, images, checkpoints and configs are not replaced: a
    file that is there must be empty, or an earlier one of the same option.

    begins: how such files begin; nothing: none is replaced.
    A pipe by its own name is refused, because writing would wait for a reader.
    """
    if path.is_dir() or path.is_socket() or (path.is_fifo() and not path.is_symlink()):
        raise NotRegularError(errno.EINVAL, f"is {kind_of(path)}; name a file", str(path))
    folder = Path(os.path.realpath(path)).parent  # of what a link leads to, which is written
    if not folder.is_dir():
        raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(folder))
    # realpath gives a link only where links lead in a circle.
    if os.path.islink(os.path.realpath(path)):
        raise OSError(errno.ELOOP, os.strerror(errno.ELOOP), str(path))
    if not (path.exists() or os.access(folder, os.W_OK)):
        raise PermissionError(errno.EACCES, "its folder may not be written", str(path))
    if path.is_file():
        with path.open("rb") as file:
            there = file.read(max(map(len, begins), default=1))
        if there and not there.startswith(tuple(text.encode("latin-1") for text in begins)):
            what = "exists, and is no earlier file of this option; remove it or choose another name"
            raise FileExistsError(errno.EEXIST, what, str(path))


def check_replaceable(path: Path) -> None:
    """Raises NotRegularError for a folder, pipe, socket or device; files and links are fine."""
    if os.path.lexists(path) and not (path.is_symlink() or path.is_file()):
        raise NotRegularError(errno.EINVAL, f"is {kind_of(path)}; remove it", str(path))


def _encoded(content: str | bytes) -> bytes:
    return content.encode() if isinstance(content, str) else content
