"""The manifest beside a run's checkpoints: the SHA-256 that each file must have.

torch.load cannot detect a flipped bit in a tensor. During a replace the manifest lists both hashes,
so a crash leaves a valid file.
"""

import hashlib
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import IO, Annotated

from pydantic import ConfigDict, StringConstraints, TypeAdapter, ValidationError

from segtrain import files
from segtrain.errors import CheckpointError

MANIFEST = "manifest.json"

_MAX_BYTES = 16 << 20  # an entry takes about 130 bytes


@dataclass(frozen=True)
class Entry:
    """One version of a file: its optimizer step, its size and its SHA-256 in hexadecimal."""

    __pydantic_config__ = ConfigDict(extra="forbid", strict=True)

    step: int
    num_bytes: int
    sha256: str


# Files named here are opened: no name may lead out of the directory.
_Name = Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9_-]{1,100}\.pt$")]
_ENTRIES = TypeAdapter(dict[_Name, list[Entry]])


def read_entries(directory: Path) -> dict[str, list[Entry]]:
    """The entries of every file name; empty if there is no manifest."""
    raw = read_raw(directory)
    return {} if raw is None else parse(raw, directory)


def parse(raw: bytes, place: Path | str) -> dict[str, list[Entry]]:
    """The entries of every file name in the bytes of the manifest at `place`."""
    try:
        return _ENTRIES.validate_json(raw)
    except ValidationError:
        raise _unusable(place, "damaged") from None


def read_raw(directory: Path) -> bytes | None:
    """The bytes of the manifest; None if there is none."""
    try:
        return files.read_bytes(directory / MANIFEST, _MAX_BYTES)
    except FileNotFoundError:
        return None
    except OSError as error:
        raise _unusable(directory, f"cannot be read ({error.strerror})") from None


def _unusable(directory: Path | str, reason: str) -> CheckpointError:
    what = "so the checkpoints beside it cannot be verified; remove it to use them unchecked"
    return CheckpointError(f"{directory}/{MANIFEST}: {reason}, {what}")


def write(directory: Path, entries: Mapping[str, Sequence[Entry]]) -> bytes:
    """Replaces the manifest atomically; returns its new bytes."""
    text = _ENTRIES.dump_json(dict(sorted(entries.items())), indent=2) + b"\n"
    files.write_atomic(directory / MANIFEST, text)
    return text


def sha256_of(path: Path) -> str:
    """The SHA-256 of a regular file, in hexadecimal."""
    with files.open_regular(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def verify(path: Path, file: IO[bytes]) -> bool:
    """Raises CheckpointError if the SHA-256 of an open file is not in the manifest beside `path`.

    False: it has no entry to compare with, as the user put it there.
    """
    known = [entry.sha256 for entry in read_entries(path.parent).get(path.name, ())]
    if known and hashlib.file_digest(file, "sha256").hexdigest() not in known:
        what = f"these are not the bytes that were saved (by {MANIFEST})"
        raise CheckpointError(f"{path}: damaged: {what}")
    return bool(known)


class HashingFile:
    """A file to write to that also hashes the bytes it is given, not those the disk returns."""

    def __init__(self, file: IO[bytes]) -> None:
        self.num_bytes = 0
        self.flush = file.flush
        self._file = file
        self._hash = hashlib.sha256()

    def write(self, data: bytes) -> int:
        """Writes and hashes `data`."""
        self._hash.update(data)
        self.num_bytes += len(data)
        return self._file.write(data)

    def sha256(self) -> str:
        """The SHA-256 of everything written so far, in hexadecimal."""
        return self._hash.hexdigest()
