"""Folders in the cache of this machine that stand for the objects below an address.

An object that is not fetched is an empty file of its size, with a time that says so:
`segtrain.files.open_regular` fetches it. So whatever reads files reads objects. All processes of
the machine share the cache: a file takes its name when it is whole, and what was not used for
longest goes first.
"""

import fcntl
import hashlib
import json
import mmap
import os
import time
import zlib
from collections.abc import Iterable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from tqdm import tqdm

from segtrain import files
from segtrain.errors import ConfigError, DataError, ExecutionError
from segtrain.files.remote import THREADS, Store, Version
from segtrain.text import counted, printable, scheme_of

# Environment: where the cache lies, and how many GB of data it may hold.
FOLDER_VARIABLE, SIZE_VARIABLE = "SEGTRAIN_CACHE", "SEGTRAIN_CACHE_GB"
_DEFAULT_GB = "50"
_INDEX, _LOCK, _TALLY = ".objects.json", ".lock", ".bytes"
_RANGES = ".ranges"  # ends the name of a folder with ranges of an object
_ROOM = ".room"  # ends the name of a file as large as one that is being written
_KILLED_NS = 3600 * 10**9  # after that, what is being written is of a process that was killed
_KEPT = 0.9  # of the size, when something must go: it takes a look at all files


def cache_folder(*below: str) -> Path:
    """The folder of the cache, or one in it."""
    base = os.environ.get("XDG_CACHE_HOME") or os.path.expanduser("~/.cache")
    return Path(os.path.abspath(os.environ.get(FOLDER_VARIABLE) or f"{base}/segtrain"), *below)


def cache_bytes() -> int:
    """The bytes that fetched data may take; ConfigError: the environment says no number."""
    text = os.environ.get(SIZE_VARIABLE) or _DEFAULT_GB
    with suppress(ValueError, OverflowError):
        if (found := int(float(text) * 1e9)) > 0:
            return found
    raise ConfigError(f"environment: {SIZE_VARIABLE}: expected GB above 0, got {printable(text)}")


def cached_name(url: str) -> str:
    """The name of a folder in the cache that belongs to `url` alone."""
    url = url.rstrip("/")
    return f"{url.rpartition('/')[2][:60]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"


def local_path(text: str) -> Path:
    """`text` as a path of this machine; of an address its folder in the cache, fetched or not."""
    if scheme_of(text):
        return cache_folder("data", cached_name(text))
    return Path(os.path.expanduser(text))  # Path.expanduser raises for unknown users


def local_file(text: str) -> Path:
    """As `local_path`, of a file; that of an address is fetched when it is opened."""
    above, _, name = text.rpartition("/")
    if not (mirror := Mirror.of(above)):
        return local_path(text)
    mirror.look([name])
    if not (mirror.folder / name).exists():
        raise ConfigError(f"{text}: no such object")
    return mirror.folder / name


def fetch_absent(path: Path) -> bool:
    """Fetches the object that `path` stands for; False: it stands for none."""
    for folder in path.absolute().parents:
        if (folder / _INDEX).is_file():
            Mirror(json.loads(files.read_bytes(folder / _INDEX))["url"]).fetch([path])
            return True
    return False


class ObjectRange(NamedTuple):
    """A range of an object; its CRC-32 begins from `seed`."""

    name: str
    start: int
    num_bytes: int
    seed: int
    crc: int


class Mirror:
    """The folder in the cache that stands for the objects below `url`.

    Raises:
        DataError: there is nothing, or not what was listed, or it does not fit into the cache.
        ConfigError, ExecutionError: as `Store`.
    """

    def __init__(self, url: str) -> None:
        self.store, self.folder = Store(url), local_path(url)
        # Of one process: threads end at a fork.
        self._pool: tuple[int, ThreadPoolExecutor] | None = None
        self._coming: dict[ObjectRange, Future[None]] = {}

    @classmethod
    def of(cls, text: str) -> "Mirror | None":
        """That of an address; None for a path of this machine."""
        return cls(text) if scheme_of(text) else None

    def __getstate__(self) -> dict[str, Any]:
        return self.__dict__ | {"_pool": None, "_coming": {}}

    def look(self, names: list[str] | None = None) -> None:
        """Gives the folder the names and sizes of these objects, as far as they are there, or all.

        What was replaced is absent again.
        """
        with self._locked():
            old = self._index()
            others = {} if names is None else {n: old[n] for n in old if n not in names}
            self._update(old, others | self._found(names))

    def fetch(self, paths: Iterable[Path], what: str = "") -> None:
        """Fetches the objects for which `paths` stand, as far as they do and are not there.

        what: the title of a progress bar.
        """
        prefix = f"{self.folder}{os.sep}"
        with self._locked():
            index = self._index()
            names = (os.path.abspath(path).removeprefix(prefix) for path in paths)
            wanted = {name: index[name] for name in names if name in index}
            needed, limit = sum(one.num_bytes for one in wanted.values()), cache_bytes()
            if needed > limit:
                many = counted(len(wanted), "object takes", "objects take")
                raise DataError(
                    f"{self.store.url}: {many} {needed / 1e9:.3g} GB, and the cache "
                    f"{cache_folder()} may take {limit / 1e9:.3g}: give it more by "
                    f"{SIZE_VARIABLE}, or make a pack, which may be larger"
                )
            absent = [name for name in wanted if self._is_absent(name)]
            with ThreadPoolExecutor(THREADS) as pool:
                work = pool.map(partial(self._get, index), absent)
                bar = {"unit": "file", "leave": False, "disable": None if what else True}
                for _ in tqdm(work, printable(what), len(absent), **bar):
                    pass
            now = self._found(absent) if absent else {}
            if changed := [name for name in absent if now.get(name) != index[name]]:
                self._update(index, index | {name: now[name] for name in changed if name in now})
                what = f"{len(changed)} objects, such as {changed[0]}, were replaced meanwhile"
                raise DataError(f"{self.store.url}: {printable(what, 300)}; start again")

    def range(self, part: ObjectRange) -> mmap.mmap:
        """A range of an object, read-only; fetched unless it is there."""
        while True:
            self.begin(part)
            if coming := self._coming.get(part):
                coming.result()
            # Another process may have removed it meanwhile; what is mapped stays.
            with suppress(FileNotFoundError), self._place(part).open("rb") as file:
                os.utime(file.fileno())  # what was used last goes last
                return mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ)

    def begin(self, part: ObjectRange) -> None:
        """Begins to fetch a range unless it is there."""
        if self._pool is None or self._pool[0] != os.getpid():
            self._pool, self._coming = (os.getpid(), ThreadPoolExecutor(THREADS // 2)), {}
        if part not in self._coming and not self._place(part).exists():
            coming = self._coming[part] = self._pool[1].submit(self._get_range, part)
            coming.add_done_callback(lambda _: self._coming.pop(part, None))

    def _place(self, part: ObjectRange) -> Path:
        return self.folder / f"{part.name}{_RANGES}" / f"{part.start}-{part.seed}-{part.crc:08x}"

    def _get_range(self, part: ObjectRange) -> None:
        content, path = self.store.read(part.name, part.start, part.num_bytes), self._place(part)
        if zlib.crc32(content, part.seed) != part.crc:
            what = f"damaged: bytes {part.start} and on are not what was packed"
            raise DataError(f"{self.store.url}/{part.name}: {what}; copy it again")
        with _writing(path, part.num_bytes) as draft:
            draft.write_bytes(content)
            draft.replace(path)

    def _get(self, index: dict[str, Version], name: str) -> None:
        with _writing(self.folder / name, index[name].num_bytes) as draft:
            with suppress(FileNotFoundError):
                self.store.get(name, draft)
            if draft.exists() and draft.stat().st_size == index[name].num_bytes:
                draft.replace(self.folder / name)  # else it is not what was listed, see `fetch`

    def _found(self, names: list[str] | None) -> dict[str, Version]:
        """These objects and perhaps others; None: all."""
        try:
            if names is None or (len(names) > THREADS and not self.store.is_http):
                return self.store.find()
            return self.store.versions(names)
        except FileNotFoundError:
            raise DataError(f"{self.store.url}: no such bucket, or nothing in it") from None

    def _index(self) -> dict[str, Version]:
        """The objects for which the folder stands."""
        with suppress(FileNotFoundError):
            found = json.loads(files.read_bytes(self.folder / _INDEX))
            return {name: Version(*one) for name, one in found["objects"].items()}
        return {}

    def _update(self, old: dict[str, Version], new: dict[str, Version]) -> None:
        for name, version in new.items():
            if old.get(name) != version or not (self.folder / name).exists():
                _leave_absent(self.folder / name, version.num_bytes)
        for name in old.keys() - new.keys():
            (self.folder / name).unlink(missing_ok=True)
        content = json.dumps({"url": self.store.url, "objects": new})
        files.write_atomic(self.folder / _INDEX, content, durable=False)

    def _is_absent(self, name: str) -> bool:
        """Whether an object is not fetched; otherwise notes its use."""
        is_absent = (self.folder / name).stat().st_mtime_ns == files.ABSENT_NS
        if not is_absent:
            os.utime(self.folder / name)
        return is_absent

    @contextmanager
    def _locked(self) -> Iterator[None]:
        with cache_failures(), locked(self.folder / _LOCK):
            yield


@contextmanager
def cache_failures() -> Iterator[None]:
    """ExecutionError where the cache cannot be written."""
    what = f"the cache cannot be written ({FOLDER_VARIABLE} names another folder)"
    with files.os_errors_as(ExecutionError, what=what):
        yield


@contextmanager
def locked(path: Path) -> Iterator[None]:
    """No other process or thread is in such a block of the same file; makes its folder."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _leave_absent(path: Path, num_bytes: int) -> None:
    """Makes `path` a file that stands for an object which is not fetched."""
    path.parent.mkdir(parents=True, exist_ok=True)
    with files.temporary(path) as draft:
        with draft.open("xb") as file:
            file.truncate(num_bytes)
        os.utime(draft, ns=(files.ABSENT_NS, files.ABSENT_NS))
        draft.replace(path)


@contextmanager
def _writing(path: Path, num_bytes: int) -> Iterator[Path]:
    """As `files.temporary`, with room in the cache: what was not used for longest goes.

    Room that others have taken and not filled yet is waited for.
    """
    folder, limit = cache_folder("data"), cache_bytes()
    with cache_failures():
        path.parent.mkdir(parents=True, exist_ok=True)
        with files.temporary(path) as draft, files.temporary(path, _ROOM) as room:
            while not _take_room(folder, limit, num_bytes, room):
                time.sleep(0.01)
            yield draft


def _take_room(folder: Path, limit: int, num_bytes: int, room: Path) -> bool:
    """Makes `room` a file of so many bytes that others count; False: they are to finish first."""
    with locked(folder / _LOCK):
        tally, others = folder / _TALLY, 0
        taken = int(tally.read_text() or limit) if tally.exists() else limit
        if taken + num_bytes > limit:
            taken, others = _shrink(folder, limit, num_bytes)
        if taken + num_bytes > limit and others:
            return False
        with room.open("wb") as file:
            file.truncate(num_bytes)
        tally.write_text(str(taken + num_bytes))
    return True


def _shrink(folder: Path, limit: int, num_bytes: int) -> tuple[int, int]:
    """Removes files until `num_bytes` more fit; returns the bytes that are taken, and by whom.

    Those of files that are left and those of files on the way, and the latter alone.
    """
    found, coming, now_ns = [], 0, time.time_ns()
    for here, names in files.walk(folder, hidden=True):
        for path in (here / name for name in names if name not in (_INDEX, _LOCK, _TALLY)):
            with suppress(FileNotFoundError):
                status = path.stat()
                if path.name.endswith((_ROOM, ".tmp")):
                    if now_ns - status.st_mtime_ns > _KILLED_NS:
                        path.unlink()
                    elif path.name.endswith(_ROOM):
                        coming += status.st_size
                elif status.st_mtime_ns != files.ABSENT_NS:
                    found.append((status.st_mtime_ns, status.st_size, path))
    taken = coming + sum(size for _, size, _ in found)
    most = limit if taken + num_bytes <= limit else _KEPT * limit
    for _, size, path in sorted(found):
        if taken + num_bytes <= most:
            break
        if path.parent.name.endswith(_RANGES):
            path.unlink(missing_ok=True)
        else:
            _leave_absent(path, size)
        taken -= size
    return taken, coming
