"""Objects behind an address such as `s3://bucket/camvid`, by fsspec: list, read, put.

What fails for a moment is tried again; what stays wrong becomes one line.
"""

import errno
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any, TypeVar

from segtrain.errors import ConfigError, ExecutionError
from segtrain.text import address_problem, install_line, printable, scheme_of

T = TypeVar("T")

# Between attempts: a server that restarts, or a limit on requests, takes some seconds.
WAITS_S = (0.5, 1, 2, 4, 8)
_CONNECT_S, _SILENT_S = 10, 30
_FULL = (errno.ENOSPC, errno.EDQUOT, errno.EROFS)
# In the names of errors and in S3's codes: no credentials, expired ones, a session that has ended.
_REFUSALS = ("Credential", "Token", "Authorization", "Unauthorized", "RefreshError")
_REFUSALS += ("ProfileNotFound", "ConfigParseError")  # as while the file is being written


class Store:
    """The objects below `url`, by their names relative to it. FileNotFoundError: there is none.

    Raises:
        ConfigError: no library for this kind of address.
        ExecutionError: access is refused, the server does not answer, or the disk here is full.
    """

    def __init__(self, url: str) -> None:
        self.url = url.rstrip("/")
        if problem := address_problem(self.url):
            raise ConfigError(problem)

    def find(self) -> list[str]:
        """The names of all objects, but for those that lead out of a folder."""

        def listed(fs: Any, path: str) -> list[str]:
            return [name.removeprefix(path).removeprefix("/") for name in fs.find(path)]

        names = self._do("", listed)
        return [name for name in names if not {"", ".", ".."} & set(name.split("/"))]

    def read(self, name: str) -> bytes:
        """The bytes of an object."""
        # Without `start`, s3fs sends HEAD first, and S3 refuses that without a reason.
        return self._do(name, lambda fs, path: fs.cat_file(path, start=0))

    def get(self, name: str, target: Path) -> None:
        """Writes an object to the file `target`."""
        self._do(name, lambda fs, path: fs.get_file(path, str(target)))

    def put(self, source: Path, name: str) -> None:
        """Creates or replaces an object: a reader finds the old one or the new one."""
        self._do(name, lambda fs, path: fs.put_file(str(source), path))

    def remove(self, name: str) -> None:
        """Removes an object."""
        self._do(name, lambda fs, path: fs.rm_file(path))

    def _open(self, name: str, *, anew: bool) -> tuple[Any, str]:
        """The file system and the path of an object in it.

        anew: not that of earlier objects, which holds the credentials that it has read.
        """
        import fsspec  # of an extra

        if anew:
            protocol = scheme_of(self.url).removesuffix("://")
            fsspec.get_filesystem_class(protocol).clear_instance_cache()
        # A listing from before would not show what others have written since.
        options: dict[str, Any] = {"use_listings_cache": False}
        if scheme_of(self.url) in ("s3://", "s3a://"):
            limits = {"connect_timeout": _CONNECT_S, "read_timeout": _SILENT_S}
            # What is tried again here need not be tried again by each library below.
            options["config_kwargs"] = limits | {"retries": {"max_attempts": 0}}
        elif self.url.startswith("http"):
            import aiohttp

            limits = aiohttp.ClientTimeout(sock_connect=_CONNECT_S, sock_read=_SILENT_S)
            options["client_kwargs"] = {"timeout": limits}
        fs, path = fsspec.core.url_to_fs(self.url, **options)
        if hasattr(fs, "retries"):
            fs.retries = 1
        return fs, f"{path.rstrip('/')}/{name}".rstrip("/")

    def _do(self, name: str, work: Callable[[Any, str], T]) -> T:
        """What `work` returns, tried again while it fails for reasons that may pass."""
        place = printable(f"{self.url}/{name}".rstrip("/"), 300)
        path, has_failed = "", False
        # None stands for the last attempt, whose error is raised.
        for wait_s in (*WAITS_S, None):
            try:
                fs, path = self._open(name, anew=has_failed)
                return work(fs, path)
            except ImportError as error:
                what = f"{printable(error)}; {install_line('storage')}"
                raise ConfigError(f"{place}: {what}") from None
            # Each protocol has a library with errors of its own, and all are told as lines.
            except Exception as error:
                if _is_absent(error, path):
                    raise FileNotFoundError(errno.ENOENT, f"no such object: {place}") from None
                reason = printable(f"{type(error).__name__}: {error}", 160)
                if isinstance(error, OSError) and error.errno in _FULL:
                    what = "this disk is full; SEGTRAIN_CACHE names another folder"
                    raise ExecutionError(f"{place}: {what}") from error
                # The second attempt reads the credentials anew: they may have been renewed in the
                # meantime.
                if _is_refusal(error) and (has_failed or wait_s is None):
                    way_out = "renew the credentials, or ask for the permission"
                    what = f"{place}: access is refused ({reason}); {way_out}"
                    raise ExecutionError(what) from error
                if "rotocol not known" in reason:
                    raise ConfigError(f"{place}: no library for this kind of address") from None
                if wait_s is None:
                    what = f"tried {len(WAITS_S) + 1} times; check the connection and the server"
                    again = "a training goes on with --resume"
                    raise ExecutionError(f"{place}: {reason}; {what}; {again}") from error
                has_failed = True
                time.sleep(wait_s)
        raise AssertionError


def _is_absent(error: Exception, path: str) -> bool:
    """Whether there is no object; not: no file of this machine, such as that of a token."""
    if not isinstance(error, FileNotFoundError | IsADirectoryError):
        return False
    return error.filename is None or str(error.filename).strip("/").endswith(path.strip("/"))


def _is_refusal(error: Exception) -> bool:
    """Whether the same credentials would be refused again: they or a permission are missing."""
    response = getattr(error.__cause__, "response", None)  # of botocore, below s3fs
    code = response["Error"].get("Code", "") if isinstance(response, dict) else ""
    name = "status" if hasattr(error, "status") else "code"  # of aiohttp, of gcsfs
    status = getattr(error, name, None)
    named = any(word in f"{type(error).__name__} {code}" for word in _REFUSALS)
    # "400" is what botocore makes of an answer without a word, as to HEAD.
    named |= code == "400" or isinstance(error, FileNotFoundError)
    return named or status in (401, 403) or isinstance(error, PermissionError)
