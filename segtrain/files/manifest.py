"""The manifest beside a run's checkpoints: the SHA-256 that each file must have.

torch.load cannot detect a flipped bit in a tensor. So a file's hash is written before its name is
given to it. During a replace the manifest lists both hashes, so a crash leaves a valid file.
"""

import hashlib
import json
import re
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import IO, NamedTuple

from segtrain import files
from segtrain.errors import CheckpointError

MANIFEST = "manifest.json"

_MAX_BYTES = 16 << 20  # an entry takes about 130 bytes
_NAME = re.compile(r"[A-Za-z0-9_-]{1,100}\.pt\Z")


class Entry(NamedTuple):
    """One version of a file: its optimizer step, its size and its SHA-256 in hexadecimal."""

    step: int
    num_bytes: int
    sha256: str


def read_entries(directory: Path) -> dict[str, list[Entry]]:
    """The entries of every file name; empty if there is no manifest.

    Raises:
        CheckpointError: the manifest cannot be read.
    """
    text = read_raw(directory)
    try:
        content = {} if text is None else json.loads(text)
        return {_name(name): [_entry(fields) for fields in kept] for name, kept in content.items()}
    except (ValueError, TypeError, AttributeError, RecursionError) as error:
        raise CheckpointError(
            f"{directory / MANIFEST}: damaged ({type(error).__name__}), so the checkpoints beside "
            "it cannot be verified; remove it to use them unchecked"
        ) from None


def read_raw(directory: Path) -> bytes | None:
    """The bytes of the manifest; None if there is none.

    Raises:
        CheckpointError: it exists and cannot be read.
    """
    path = directory / MANIFEST
    try:
        return files.read_bytes(path, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise CheckpointError(
            f"{path}: cannot be read ({error.strerror}), so the checkpoints beside it cannot be "
            "verified; remove it to use them unchecked"
        ) from None


def _entry(fields: dict[str, object]) -> Entry:
    entry = Entry(**fields)
    if [type(field) for field in entry] != [int, int, str]:
        raise ValueError("a field has another type")
    return entry


def _name(name: str) -> str:
    # Files named here are opened: no name may lead out of the directory.
    if not _NAME.match(name):
        raise ValueError("not the name of a checkpoint")
    return name


def write(directory: Path, entries: Mapping[str, Sequence[Entry]]) -> bytes:
    """Replaces the manifest atomically; returns its new bytes.

    Raises:
        OSError: it cannot be written.
    """
    content = {name: [entry._asdict() for entry in kept] for name, kept in entries.items()}
    text = (json.dumps(content, indent=2, sort_keys=True) + "\n").encode()
    files.write_atomic(directory / MANIFEST, text)
    return text


def sha256_of(path: Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal.

    Raises:
        OSError: it cannot be read.
    """
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, file: IO[bytes]) -> None:
    """Refuses an open file whose SHA-256 is not in the manifest beside `path`.

    A file without an entry passes: the user put it there.

    Raises:
        CheckpointError: another SHA-256, or the manifest is damaged.
        OSError: the file cannot be read.
    """
    entries = read_entries(path.parent).get(path.name)
    if not entries:
        return
    sha256 = hashlib.file_digest(file, "sha256").hexdigest()
    if sha256 not in {entry.sha256 for entry in entries}:
        raise CheckpointError(
            f"{path}: damaged: these are not the bytes that were saved (by {MANIFEST})"
        )


class HashingFile:
    """A file to write to that also hashes the bytes it is given, not those the disk returns."""

    def __init__(self, file: IO[bytes]) -> None:
        self.num_bytes = 0
        self.flush = file.flush
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Writes and hashes `data`; returns how many bytes were written."""
        self._hash.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def sha256(self) -> str:
        """The SHA-256 of everything written so far, in hexadecimal."""
        return self._hash.hexdigest()
