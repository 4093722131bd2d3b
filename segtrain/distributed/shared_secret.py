"""The key that only the machines of a run know, with which their launchers sign what they write."""

import hashlib
import os
import secrets
import stat
from contextlib import suppress
from pathlib import Path

from segtrain.errors import ConfigError, ExecutionError

# Holds the key as text, for machines that cannot share it as a file.
SECRET_VARIABLE = "SEGTRAIN_SECRET"
_SECRET_BYTES = 32
_MIN_CHARACTERS = 16


def shared_secret(path: Path) -> bytes:
    """The key of a run: from SEGTRAIN_SECRET, else from the file `path`, which is made if missing.

    Raises:
        ConfigError: others could have read or written the file, or the variable is too short.
        ExecutionError: the file cannot be written or read.
    """
    text = os.environ.get(SECRET_VARIABLE)
    if text is not None:
        if len(text) < _MIN_CHARACTERS:
            raise ConfigError(
                f"environment: {SECRET_VARIABLE}: expected at least {_MIN_CHARACTERS} characters, "
                f"the same on all machines, got {len(text)}"
            )
        return hashlib.sha256(os.fsencode(text)).digest()
    try:
        if not os.path.lexists(path):
            _create(path)
        return _read(path)
    except OSError as error:
        raise ExecutionError(
            f"{path}: the key that the machines share: {(error.strerror or str(error)).lower()}; "
            f"give all machines the same long random text in {SECRET_VARIABLE} instead"
        ) from error


def _create(path: Path) -> None:
    """Writes a new key to `path`; if several machines do so at once, the first one's stays."""
    path.parent.mkdir(parents=True, exist_ok=True)
    temporary = path.with_name(f"{path.name}.{secrets.token_hex(8)}.tmp")
    handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW, 0o600)
    try:
        os.write(handle, secrets.token_bytes(_SECRET_BYTES))
        os.fsync(handle)
        with suppress(FileExistsError):
            os.link(temporary, path)  # never a half-written file, never over another's key
    finally:
        os.close(handle)
        temporary.unlink()


def _read(path: Path) -> bytes:
    handle = os.open(path, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    try:
        found = os.fstat(handle)
        if not stat.S_ISREG(found.st_mode) or found.st_size != _SECRET_BYTES:
            raise ConfigError(f"{path}: not a key of segtrain; remove it on all machines")
        if found.st_uid != os.geteuid() or found.st_mode & 0o077:
            raise ConfigError(
                f"{path}: expected a file of this user that nobody else may read (mode 600), found "
                f"user {found.st_uid}, mode {stat.S_IMODE(found.st_mode):o}; remove it, or set "
                f"{SECRET_VARIABLE} on all machines"
            )
        return os.read(handle, _SECRET_BYTES)
    finally:
        os.close(handle)
