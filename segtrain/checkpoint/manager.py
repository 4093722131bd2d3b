"""The checkpoints of one run on its disk: which are kept, and which one training goes on from.

The folder may also hold files of the user's own. A file is the run's if it has the bytes that the
manifest tells of under its name; no other file is ever counted, removed or written over.
"""

import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from segtrain import files
from segtrain.checkpoint.contents import BEST, LAST, Checkpoint, load, num_bytes, unnamed
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.files import manifest
from segtrain.files.manifest import MANIFEST, Entry
from segtrain.run.log import say

PREVIOUS = "previous.pt"

_KEPT = re.compile(r"step_(\d{7,})\.pt")
_WRITTEN = re.compile(rf"(last|previous|best|step_\d{{7,}})\.pt|{re.escape(MANIFEST)}")


class CheckpointManager:
    """last.pt, the one before it, best.pt, and now and then one that is kept.

    One process writes; `tidy` comes before its first write.

    Args:
        keep_limit: how many step_N.pt are kept.
        before_write: called before anything is written; raises if this process must not.
    """

    def __init__(
        self, directory: Path, *, keep_limit: int, before_write: Callable[[], None] = lambda: None
    ) -> None:
        self.directory = directory
        self.keep_limit = keep_limit
        self._before_write = before_write
        self._entries: dict[str, Entry] = {}  # of every file, as it is or should be
        self._checked: dict[str, tuple[int, ...]] = {}  # how the files looked that are as entered
        self._manifest: bytes | None = None  # as this process knows it
        self.warnings: list[str] = []  # what `tidy` has found

    @property
    def last(self) -> Path:
        """Where training goes on from."""
        return self.directory / LAST

    def save_last(self, record: Checkpoint) -> None:
        """Replaces last.pt, which becomes previous.pt."""
        self._put(LAST, record, keep_as=PREVIOUS)

    def save_best(self, record: Checkpoint) -> None:
        """Replaces best.pt, which holds no optimizer: it is for use, not for going on."""
        self._put(BEST, record._replace(optimizer=None, scaler=None))

    def keep(self, record: Checkpoint) -> None:
        """Writes step_N.pt and removes the oldest that this run wrote beyond the limit."""
        self._put(f"step_{record.step:07d}.pt", record)
        for name in [name for name in self._entries if _KEPT.fullmatch(name)]:
            if not os.path.lexists(self.directory / name):
                del self._entries[name]
        kept = sorted((name for name in self._entries if self._is_kept(name)), key=_step)
        for name in kept[: -self.keep_limit]:
            try:
                (self.directory / name).unlink()
            except OSError as error:
                say(f"warning: {self.directory / name} cannot be removed: {error.strerror}")
            del self._entries[name]

    def tidy(self) -> None:
        """Removes what a process that was killed while saving has left behind.

        Raises:
            CheckpointError: the manifest is damaged.
            ExecutionError: the directory cannot be read or written.
        """
        try:
            left = [path for path in _listed(self.directory) if files.is_temporary(path, _WRITTEN)]
            for path in left:
                path.unlink(missing_ok=True)
        except OSError as error:
            raise ExecutionError(
                f"{error.filename or self.directory}: cannot be tidied up: {error.strerror}"
            ) from None
        self._manifest = manifest.read_raw(self.directory)
        for name, listed in manifest.read_entries(self.directory).items():
            path = self.directory / name
            if not listed or not os.path.lexists(path):
                continue
            look, digest = _look(path), None
            with suppress(OSError):  # it cannot be read, or is a folder
                digest = manifest.sha256_of(path)
            found = [entry for entry in listed if entry.sha256 == digest]
            # A damaged file keeps an entry: it is to be found damaged, not unknown.
            self._entries[name] = (found or listed)[-1]
            if found:
                self._checked[name] = look
            elif name == BEST:  # the others are looked at where training goes on from
                self.warnings.append(
                    f"warning: {path} is damaged or not what this run wrote; the next better model "
                    "takes its name"
                )

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that can be loaded, if there is any; what is wrong with newer ones.

        By the steps in the manifest, never by the clock.

        Raises:
            CheckpointError: there are checkpoints, and none can be loaded; or there were.
        """
        problems = []
        for path in self._candidates():
            try:
                load(path)
            except CheckpointError as error:
                problems.append(str(error))
            else:
                return path, problems
        if problems:
            raise CheckpointError("\n  ".join(problems))
        # A process that was killed in its first saving has announced last.pt; others come later.
        lost = manifest.read_entries(self.directory).keys() - {LAST}
        if lost:
            raise CheckpointError(
                f"{self.directory}: no {LAST}, though {MANIFEST} tells of {', '.join(sorted(lost))}"
                ": checkpoints have been removed; put one back, or begin a new run by --output, "
                f"from {BEST} by train.init_from if that is still there"
            )
        return None, []

    def check_space(self, record: Checkpoint) -> None:
        """Refuses to begin what could not be saved.

        Raises:
            ExecutionError: the disk has no room for two checkpoints like `record`.
        """
        try:
            self.directory.mkdir(parents=True, exist_ok=True)
            free, needed = shutil.disk_usage(self.directory).free, 2 * num_bytes(record)
        except OSError as error:
            raise ExecutionError(f"{self.directory}: cannot be used: {error.strerror}") from None
        if free < needed:
            raise ExecutionError(
                f"{self.directory}: two checkpoints take {needed / 1e6:.1f} MB and the disk has "
                f"{free / 1e6:.1f} MB left; make room, or choose another disk by --output"
            )

    def _put(self, name: str, record: Checkpoint, *, keep_as: str | None = None) -> None:
        path = self.directory / name
        self._check_alone()
        with unnamed(path, record) as (temporary, entry):
            # Once more: writing a large checkpoint takes a while.
            self._check_alone()
            before = self._entries[name] if self._is_own(name) else None
            if before is None:
                keep_as = None
            for one in (name, keep_as):
                if one is not None and not self._is_own(one):
                    self._put_aside(self.directory / one)
            pending = {other: [one] for other, one in self._entries.items()}
            pending[name] = [entry] if before is None else [before, entry]
            if keep_as is not None:
                pending[keep_as] = [*pending.get(keep_as, []), before]
            self._manifest = manifest.write(self.directory, pending)
            if keep_as is not None:
                self._copy_name(path, self.directory / keep_as)
                self._enter(keep_as, before)
            temporary.replace(path)
            self._enter(name, entry)
            files.sync_directory(self.directory)

    def _check_alone(self) -> None:
        """Refuses to write where another run has written since this one looked."""
        self._before_write()
        now = manifest.read_raw(self.directory)
        if now is not None and now != self._manifest:
            raise ExecutionError(
                f"{self.directory / MANIFEST}: another run has written checkpoints into this "
                "directory meanwhile; this run stops before it replaces them"
            )

    def _enter(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry
        self._checked[name] = _look(self.directory / name)

    def _is_own(self, name: str) -> bool:
        """Whether the file of this name is the one that was saved, whole."""
        path = self.directory / name
        if name not in self._entries:
            return False
        try:
            look = _look(path)
            if look != self._checked.get(name):
                if manifest.sha256_of(path) != self._entries[name].sha256:
                    return False
                self._checked[name] = look
        except OSError:
            return False
        return True

    def _is_kept(self, name: str) -> bool:
        return _KEPT.fullmatch(name) is not None and self._is_own(name)

    @staticmethod
    def _put_aside(path: Path) -> None:
        """Gives what lies at `path`, which this run did not write, another name for good."""
        if not os.path.lexists(path):
            return
        number = 1
        while os.path.lexists(aside := path.with_name(f"{path.name}.old-{number}")):
            if aside.exists() and path.exists() and aside.samefile(path):
                return  # the saving that put it aside has failed
            number += 1
        try:
            # Until the new file takes its place it stays there under its name as well.
            aside.hardlink_to(path)
        except OSError:  # a folder, or a disk without links
            path.rename(aside)
        say(f"warning: {path} was not as this run wrote it; it is kept as {aside.name}")

    @staticmethod
    def _copy_name(path: Path, other: Path) -> None:
        """Calls the file at `path` `other` too, or, where a file has one name only, instead."""
        with files.temporary(other) as draft:
            try:
                draft.hardlink_to(path)
            except OSError:
                path.replace(other)
            else:
                draft.replace(other)

    def _candidates(self) -> list[Path]:
        """What training may go on from, newest first."""
        recorded = manifest.read_entries(self.directory)
        named = [self.last, self.directory / PREVIOUS]
        # Without a manifest nothing tells the run's own from others of their name.
        kept = recorded or [path.name for path in _listed(self.directory)]
        kept = sorted((name for name in kept if _KEPT.fullmatch(name)), key=_step, reverse=True)
        named += [self.directory / name for name in kept]
        existing = [path for path in named if os.path.lexists(path)]

        def step(path: Path) -> int:
            listed = recorded.get(path.name)
            return max(entry.step for entry in listed) if listed else -1

        # Stable: of equal steps the first named.
        return sorted(existing, key=step, reverse=True)


def _step(kept: str) -> int:
    return int(_KEPT.fullmatch(kept)[1])


def _look(path: Path) -> tuple[int, ...]:
    """What changes when a file is written or replaced."""
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _listed(directory: Path) -> list[Path]:
    return sorted(directory.iterdir()) if directory.is_dir() else []
