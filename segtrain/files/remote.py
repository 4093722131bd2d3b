"""Objects behind an address such as `s3://bucket/camvid`, by fsspec: list, read, put.

What fails for a moment is tried again; what stays wrong becomes one line. Works after a fork, since
each process asks fsspec anew.
"""

import errno
import time
from collections.abc import Callable, Iterable
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any, NamedTuple, TypeVar
from urllib.parse import quote

from segtrain.errors import ConfigError, ExecutionError
from segtrain.text import address_problem, printable, scheme_of

T = TypeVar("T")

# Between attempts: a server that restarts, or a limit on requests, takes some seconds.
WAITS_S = (0.5, 1, 2, 4, 8)
THREADS = 32  # a request mostly waits
_CONNECT_S, _SILENT_S = 10, 30
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# An object is another one if this differs, whatever a file system calls it.
_VERSIONS = (
    "ETag",
    "etag",
    "md5Hash",
    "generation",
    "LastModified",
    "Last-Modified",
    "mtime",
    "updated",
    "created",
)


class Version(NamedTuple):
    """Of an object: its bytes, and what changes when it is replaced; empty: it is not known."""

    num_bytes: int
    mark: str


class Store:
    """The objects below `url`, by their names relative to it. FileNotFoundError: there is none.

    Raises:
        ConfigError: no library for this kind of address, or access is refused.
        ExecutionError: the server does not answer, or the disk here is full.
    """

    def __init__(self, url: str) -> None:
        self.url, self.is_http = url.rstrip("/"), url.startswith("http")
        if problem := address_problem(self.url):
            raise ConfigError(problem)

    def find(self) -> dict[str, Version]:
        """All objects, at least one, but for names that lead out of a folder."""

        def listed(fs: Any, path: str) -> dict[str, Any]:
            infos = fs.find(path, detail=True).items()
            return {name.removeprefix(path).removeprefix("/"): info for name, info in infos}

        found = {
            name: _version_of(info)
            for name, info in self._do("", listed).items()
            if not {"", ".", ".."} & set(name.split("/"))
        }
        if not found:
            raise FileNotFoundError(errno.ENOENT, f"nothing in {self.url}")
        return found

    def versions(self, names: Iterable[str]) -> dict[str, Version]:
        """Those of `names` that are there."""

        def version(name: str) -> dict[str, Version]:
            try:
                return {name: self._do(name, lambda fs, path: _version_of(fs.info(path)))}
            except FileNotFoundError:
                return {}

        with ThreadPoolExecutor(THREADS) as pool:
            return {name: one for found in pool.map(version, names) for name, one in found.items()}

    def read(self, name: str, start: int = 0, num_bytes: int | None = None) -> bytes:
        """The bytes of an object, or so many from `start` on."""

        def content(fs: Any, path: str) -> bytes:
            if num_bytes is None:
                return fs.cat_file(path)
            found = fs.cat_file(path, start=start, end=start + num_bytes)
            if len(found) != num_bytes:
                raise EOFError(f"{len(found)} of {num_bytes} bytes")
            return found

        return self._do(name, content)

    def get(self, name: str, target: Path) -> None:
        """Writes an object to the file `target`."""
        self._do(name, lambda fs, path: fs.get_file(path, str(target)))

    def put(self, source: Path, name: str) -> None:
        """Creates or replaces an object: a reader finds the old one or the new one."""
        self._do(name, lambda fs, path: fs.put_file(str(source), path))

    def remove(self, name: str) -> None:
        """Removes an object."""
        self._do(name, lambda fs, path: fs.rm_file(path))

    def _open(self, name: str) -> tuple[Any, str]:
        """The file system and the path of an object in it."""
        import fsspec  # of an extra

        options: dict[str, Any] = {"use_listings_cache": False}
        if scheme_of(self.url) in ("s3://", "s3a://"):
            limits = {"connect_timeout": _CONNECT_S, "read_timeout": _SILENT_S}
            # What is tried again here need not be tried again by each library below.
            limits |= {"max_pool_connections": 2 * THREADS, "retries": {"max_attempts": 0}}
            options["config_kwargs"] = limits
        elif self.is_http:
            import aiohttp

            limits = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=_SILENT_S)
            options["client_kwargs"] = {"timeout": limits}
        fs, path = fsspec.core.url_to_fs(self.url, **options)
        if hasattr(fs, "retries"):
            fs.retries = 1
        name = quote(name) if self.is_http else name
        return fs, f"{path.rstrip('/')}/{name}".rstrip("/")

    def _do(self, name: str, work: Callable[[Any, str], T]) -> T:
        """What `work` returns, tried again while it fails for reasons that may pass."""
        place = printable(f"{self.url}/{name}".rstrip("/"), 300)
        for wait_s in (*WAITS_S, None):
            try:
                return work(*self._open(name))
            except ImportError as error:
                what = f"needs pip install 'segtrain[storage]' ({printable(error)})"
                raise ConfigError(f"{place}: {what}") from None
            except (FileNotFoundError, IsADirectoryError):
                raise FileNotFoundError(errno.ENOENT, f"no such object: {place}") from None
            # Each protocol has a library with errors of its own, and all are told as lines.
            except Exception as error:
                reason = printable(f"{type(error).__name__}: {error}", 160)
                if isinstance(error, OSError) and error.errno in _FULL:
                    what = "this disk is full; SEGTRAIN_CACHE names another folder"
                    raise ExecutionError(f"{place}: {what}") from error
                if isinstance(error, PermissionError) or "Credential" in reason:
                    what = f"access is refused ({reason}); are the credentials right?"
                    raise ConfigError(f"{place}: {what}") from error
                if "rotocol not known" in reason:
                    raise ConfigError(f"{place}: no library for this kind of address") from None
                if wait_s is None:
                    what = f"tried {len(WAITS_S) + 1} times; check the connection and the server"
                    again = "a training goes on with --resume"
                    raise ExecutionError(f"{place}: {reason}; {what}; {again}") from error
                time.sleep(wait_s)
        raise AssertionError


def _version_of(info: dict[str, Any]) -> Version:
    mark = next((str(info[key]) for key in _VERSIONS if info.get(key)), "")
    return Version(int(info.get("size") or 0), mark)
