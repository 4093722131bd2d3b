"""Reading files and folders that a user, a config or a checkpoint names.

Only regular files are opened: a pipe without a writer would block for ever, and a device has no
end.
"""

import errno
import json
import os
import stat
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any

from segtrain.errors import UserError
from segtrain.text import printable


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
        raise kind(f"{printable(place or error.filename)}: {what}: {reason}") from error


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
                folders.clear()
                continue
            seen.add(real)
            folders[:] = sorted(name for name in folders if hidden or not name.startswith("."))
            links += [path for name in folders if (path := Path(here, name)).is_symlink()]
            yield Path(here), sorted(name for name in names if hidden or not name.startswith("."))
