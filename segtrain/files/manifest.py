"""The manifest beside the checkpoints of a run: which bytes each of them may hold.

torch.load takes a flipped bit in a tensor for a weight. So a file's SHA-256 is written down before
the file takes its name. While one replaces another the name has two entries; at every instant the
file is one of them, and nothing has to happen to two files at once.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from segtrain.errors import CheckpointError
from segtrain.files import local as files

MANIFEST = "manifest.json"

# An entry takes some 130 bytes.
_MAX_BYTES = 16 << 20
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}\.pt\Z")


class Entry(NamedTuple):
    """One state of a file.

    step: the updates of training in it.
    num_bytes, sha256: its size, and its hash in hexadecimal digits.
    """

    step: int
    num_bytes: int
    sha256: str


Entries = Mapping[str, Sequence[Entry]]


def read(directory: Path) -> dict[str, list[Entry]]:
    """The entries of every file name; none where there is no manifest.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    path = directory / MANIFEST
    try:
        text = read_text(directory)
        content = {} if text is None else json.loads(text)
        return {_name(name): [_entry(one) for one in listed] for name, listed in content.items()}
    except (ValueError, TypeError, AttributeError, KeyError, RecursionError) as error:
        raise CheckpointError(
            f"{path}: damaged ({type(error).__name__}): it cannot tell whether the checkpoints "
            "beside it are; remove it to use them unchecked"
        ) from None


def read_text(directory: Path) -> bytes | None:
    """The manifest as it stands on the disk; None if there is none.

    Raises:
        CheckpointError: it is there and cannot be read.
    """
    path = directory / MANIFEST
    try:
        return files.read_bytes(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}), so it cannot tell whether the checkpoints "
            "beside it are damaged; remove it to use them unchecked"
        ) from None


def _entry(fields: dict[str, object]) -> Entry:
    entry = Entry(**fields)
    if [type(field) for field in entry] != [int, int, str]:
        raise ValueError("a field of another type")
    return entry


def _name(name: str) -> str:
    # What is named is opened: it must lie beside the manifest, and be no device.
    if not _NAME.match(name):
        raise ValueError("not a name of a checkpoint")
    return name


def write(directory: Path, entries: Entries) -> bytes:
    """Replaces the manifest, whole or not at all; returns what it says now.

    Raises:
        OSError: it cannot be written.
    """
    content = {name: [one._asdict() for one in listed] for name, listed in entries.items()}
    text = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    files.write_whole(directory / MANIFEST, text)
    return text


def digest_of(path: Path) -> str:
    """The SHA-256 of a file, in hexadecimal digits.

    Raises:
        OSError: it cannot be read, or is no plain file.
    """
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, file: IO[bytes]) -> None:
    """Refuses an open file that is not what was saved under its name, `path`.

    A file that the manifest does not name, or that has none beside it, passes: it was brought here.

    Raises:
        CheckpointError: it holds something else, or the manifest is damaged.
        OSError: it cannot be read.
    """
    entries = read(path.parent).get(path.name)
    if not entries:
        return
    digest = hashlib.file_digest(file, "sha256").hexdigest()
    if digest not in {entry.sha256 for entry in entries}:
        raise CheckpointError(
            f"{path}: damaged: these are not the bytes that were saved (by {MANIFEST})"
        )


class HashingFile:
    """Writes to `file` and takes the hash of what it is given, not of what the disk made of it."""

    def __init__(self, file: IO[bytes]) -> None:
        self._file = file
        self._hash = hashlib.sha256()
        self.num_bytes = 0

    def write(self, data: bytes) -> int:
        """As a file's."""
        self._hash.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def flush(self) -> None:
        """As a file's."""
        self._file.flush()

    def digest(self) -> str:
        """The SHA-256 so far, in hexadecimal digits."""
        return self._hash.hexdigest()
