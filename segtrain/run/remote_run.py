"""A run that is kept behind an address: fetched before it is read or goes on, put as it trains.

In between it lies in a folder of the cache. previous.pt stays there. The manifest is put last;
before a file is replaced there, it also lists what was there, so that a reader never finds half.
"""

import fcntl
import hashlib
import json
import os
import shlex
import shutil
from collections.abc import Iterator, Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import contextmanager, suppress
from pathlib import Path
from threading import Lock
from typing import Self

from segtrain import files
from segtrain.errors import ConfigError, ExecutionError, UserError
from segtrain.files import manifest
from segtrain.files.manifest import MANIFEST
from segtrain.files.remote import Store
from segtrain.run.console import say
from segtrain.run.directory import CHECKPOINTS, LOG, ORIGIN, is_locked, origin_of

_OUTBOX = ".outbox"
_LISTED = f"{CHECKPOINTS}/{MANIFEST}"
_PREVIOUS = "previous.pt"
_ATTEMPTS = 5
# A launcher kills ranks 120 s after a signal.
_STOPPED_S, _ENDED_S, _QUIET_S = 100, 3600, 2


class TakenError(ConfigError):
    """Another run is at the address, or the same one has gone on elsewhere."""


def run_folder(url: str, *, begins: bool = False, one_of: Sequence[str] = ()) -> Path:
    """The folder of the run at `url`, fetched unless a run here uses it, or has gone on since.

    begins: a new run, so that none may be at the address.
    one_of: the first of these checkpoints that there is; empty: all.

    Raises:
        TakenError: there is another run. ExecutionError: it cannot be read.
    """
    store, directory = Store(url), cached_run(url)
    with files.cache_failures(), _locked(directory):
        # Again, if the run is put there while it is fetched.
        for _ in range(_ATTEMPTS):
            if is_locked(directory):
                return directory
            theirs, ours = _manifest_at(store), manifest.read_raw(directory / CHECKPOINTS)
            known = origin_of(directory).get("manifests", [])
            # It has saved since it was fetched or put. Then it is used as it is here, if what is at
            # the address comes from here; otherwise the run has gone on elsewhere, too.
            has_gone_on = ours not in (None, theirs) and _hash(ours) not in known[:1]
            if theirs is None or begins or has_gone_on:
                own = [] if begins else [*known, _hash(ours or b"")]
                _check_own(store, theirs, own, directory)
                if not known:
                    _write_origin(directory, url, known)
                return directory
            if _fetch(store, theirs, directory, one_of, anew=ours != theirs):
                _write_origin(directory, url, [_hash(theirs)])
                return directory
    raise ExecutionError(f"{url}: changes while it is read; try again")


def cached_run(url: str) -> Path:
    """The folder of the cache in which the run at `url` lies on this machine."""
    url = url.rstrip("/")
    name = f"{url.rpartition('/')[2][:60]}-{hashlib.sha256(url.encode()).hexdigest()[:12]}"
    return files.cache_folder("runs", name)


@contextmanager
def _locked(directory: Path) -> Iterator[None]:
    """Makes the folder; no other process fetches into it meanwhile. A process that dies lets go."""
    directory.mkdir(parents=True, exist_ok=True)
    with directory.with_suffix(".lock").open("ab") as file:
        fcntl.flock(file, fcntl.LOCK_EX)
        yield


def _fetch(
    store: Store, listed: bytes, directory: Path, one_of: Sequence[str], *, anew: bool
) -> bool:
    """Fetches a run; False: a checkpoint is not what the manifest lists. anew: all other files."""
    for draft in directory.rglob(".*.tmp"):  # of a process that was killed
        draft.unlink()
    entries = manifest.parse(listed, store.url)
    names = [name for name in store.find() if not name.startswith((f"{CHECKPOINTS}/", "."))]
    names = [name for name in names if anew or not (directory / name).exists()]
    chosen = [name for name in one_of if name in entries][:1] or entries
    for name in (*names, *(f"{CHECKPOINTS}/{name}" for name in chosen)):
        path = directory / name
        hashes = {entry.sha256 for entry in entries.get(path.name, ())}
        path.parent.mkdir(parents=True, exist_ok=True)
        if hashes and path.is_file():
            if manifest.sha256_of(path) in hashes:
                continue
            path.unlink()
        # A checkpoint is listed before it is there.
        with suppress(FileNotFoundError), files.temporary(path) as draft:
            store.get(name, draft)
            if hashes and manifest.sha256_of(draft) not in hashes:
                return False
            draft.replace(path)
    files.write_atomic(directory / _LISTED, listed)
    return True


def upload_of(directory: Path) -> "RunUpload | None":
    """What puts the run to its address; None: it has none, or another rank does."""
    url = origin_of(directory).get("url")
    return RunUpload(url, directory) if url and os.environ.get("RANK", "0") == "0" else None


class RunUpload:
    """Puts a run to its address, in a thread: only the newest state, if the thread lags behind.

    A context, at whose end all is put. Set `stopped` if a signal has ended the run.

    Raises:
        ConfigError: another run is there, or nothing can be written.
        ExecutionError: at the end, something is not there.
    """

    stopped = False

    def __init__(self, url: str, directory: Path) -> None:
        self._store, self._directory = Store(url), directory
        self._known = origin_of(directory)["manifests"]
        theirs = _manifest_at(self._store)
        _check_own(self._store, theirs, self._known, directory)
        self._listed = {} if theirs is None else manifest.parse(theirs, url)
        try:
            if theirs is None:  # may it be written there?
                self._store.put(Path(os.devnull), LOG)
        except FileNotFoundError:
            raise ConfigError(f"{url}: no such bucket") from None
        self._there: dict[str, object] = {}  # what this process has put
        self._pool, self._lock = ThreadPoolExecutor(1, thread_name_prefix="upload"), Lock()
        self._waiting: Path | None = None
        self._future: Future[None] | None = None
        self._failure: UserError | None = None
        shutil.rmtree(directory / _OUTBOX, ignore_errors=True)  # of a run that was killed

    def __enter__(self) -> Self:
        return self

    def __exit__(self, _kind: object, error: BaseException | None, _trace: object) -> None:
        with suppress(ExecutionError):  # what it is about is said below
            self.put()
        limit_s = _STOPPED_S if self.stopped or error is not None else _ENDED_S
        if self._future is not None and not wait([self._future], _QUIET_S).done:
            say(f"putting the run to {self._store.url}; waits at most {limit_s} s")
            if not wait([self._future], limit_s).done:
                self._failure = ExecutionError(f"it takes longer than {limit_s} s")
        self._pool.shutdown(wait=False, cancel_futures=True)
        if self._failure is None:
            return
        again = f"segtrain train {shlex.quote(str(self._directory))} --resume"
        what = f"{self._store.url}: the newest state of the run is not there: {self._failure}"
        what += f"; it is whole in {self._directory}; to put it: {again}"
        if error is None:
            raise ExecutionError(what)
        say(f"warning: {what}")

    def put(self) -> None:
        """Puts the run as it is now; ExecutionError: another run has written at the address."""
        if isinstance(self._failure, TakenError):
            raise ExecutionError(f"{self._failure}; this one stops before it replaces that")
        with suppress(FileNotFoundError):  # nothing is saved yet
            shot = self._links()
            # The thread takes what waits; a shot that it has not taken is out of date now.
            with self._lock:
                left, self._waiting = self._waiting, shot
            if left is not None:
                shutil.rmtree(left)
            self._future = self._pool.submit(self._put_newest)

    def _links(self) -> Path:
        """A folder with what the checkpoints are now: a later save changes other files."""
        source = self._directory / CHECKPOINTS
        content = files.read_bytes(source / MANIFEST)
        shot = self._directory / _OUTBOX / os.urandom(4).hex()
        shot.mkdir(parents=True)
        (shot / MANIFEST).write_bytes(content)
        for name in manifest.read_entries(shot).keys() - {_PREVIOUS}:
            with suppress(FileNotFoundError):
                try:
                    os.link(source / name, shot / name)
                except OSError:  # the file system has no links
                    shutil.copyfile(source / name, shot / name)
        return shot

    def _put_newest(self) -> None:
        with self._lock:
            shot, self._waiting = self._waiting, None
        if shot is None:
            return
        try:
            with files.os_errors_as(ExecutionError, self._store.url, "cannot be written"):
                self._put(shot)
            self._failure = None
        except UserError as error:
            self._failure = error
            say(f"warning: {error}; it is tried again with the next checkpoint")
        finally:
            shutil.rmtree(shot, ignore_errors=True)

    def _put(self, shot: Path) -> None:
        store, new = self._store, manifest.read_entries(shot)
        _check_own(store, _manifest_at(store), self._known, self._directory)
        for folder, names in files.walk(self._directory, hidden=False):
            for path in [] if folder.name == CHECKPOINTS else [folder / name for name in names]:
                name, now = path.relative_to(self._directory).as_posix(), path.stat()
                self._put_file(path, name, (now.st_size, now.st_mtime_ns))
        # 1. A manifest that lists old files and new ones: whichever a reader finds is listed.
        both = {
            name: list(dict.fromkeys([*self._listed.get(name, ()), *new.get(name, ())]))
            for name in {*self._listed, *new}
        }
        (shot / "both").mkdir()
        between, last = manifest.write(shot / "both", both), files.read_bytes(shot / MANIFEST)
        self._known = list(dict.fromkeys([*self._known, _hash(between), _hash(last)]))
        # Written down before it is put: after a death in between, what is there must not look like
        # that of another run.
        _write_origin(self._directory, store.url, self._known)
        store.put(shot / "both" / MANIFEST, _LISTED)
        self._listed = both
        # 2. The checkpoints. 3. The manifest of these alone; then old ones may go.
        for name in sorted(path.name for path in shot.glob("*.pt")):
            self._put_file(shot / name, f"{CHECKPOINTS}/{name}", new[name][-1])
        _check_own(store, _manifest_at(store), self._known, self._directory)
        store.put(shot / MANIFEST, _LISTED)
        self._known, self._listed = [_hash(last)], new
        _write_origin(self._directory, store.url, self._known)
        for name in [name for name in self._there if name.startswith(CHECKPOINTS)]:
            if Path(name).name not in new:
                store.remove(name)
                del self._there[name]

    def _put_file(self, path: Path, name: str, state: object) -> None:
        """Puts a file, unless this process has put what has the same `state`."""
        if self._there.get(name) != state:
            self._there.pop(name, None)
            self._store.put(path, name)
            self._there[name] = state


def _check_own(store: Store, theirs: bytes | None, known: Sequence[str], directory: Path) -> None:
    """Raises ConfigError if the manifest at the address is none that was put from here."""
    if theirs is not None and _hash(theirs) not in known:
        raise TakenError(
            f"{store.url}: another run is there, or this one has gone on elsewhere; go on with it "
            f"by --resume (after moving {directory} away, if that holds a run), or choose another "
            "address by --output"
        )


def _manifest_at(store: Store) -> bytes | None:
    """The manifest at the address; None: there is none."""
    try:
        return store.read(_LISTED)
    except FileNotFoundError:
        return None


def _write_origin(directory: Path, url: str, manifests: Sequence[str]) -> None:
    files.write_atomic(directory / ORIGIN, json.dumps({"url": url, "manifests": [*manifests]}))


def _hash(content: bytes) -> str:
    return hashlib.sha256(content).hexdigest()
