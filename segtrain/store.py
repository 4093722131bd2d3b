"""The checkpoints of one run on its disk: which are kept, and which one training goes on from."""

import os
import shutil
from contextlib import suppress
from pathlib import Path

from segtrain import files, manifest
from segtrain.checkpoint import BEST, LAST, Record, load, num_bytes, unnamed
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.manifest import MANIFEST, Entry

PREVIOUS = "previous.pt"


class CheckpointStore:
    """last.pt, the one before it, best.pt, and now and then one that is kept.

    One process writes; `tidy` comes before its first write.
    """

    def __init__(self, directory: Path, *, keep_limit: int) -> None:
        self.directory = directory
        self.keep_limit = keep_limit
        self._entries: dict[str, Entry] = {}  # of every file, as it is or should be
        self._damaged: set[str] = set()

    @property
    def last(self) -> Path:
        """Where training goes on from."""
        return self.directory / LAST

    def save_last(self, record: Record) -> None:
        """Replaces last.pt, which becomes previous.pt."""
        self._put(LAST, record, keep_as=PREVIOUS)

    def save_best(self, record: Record) -> None:
        """Replaces best.pt, which holds no optimizer: it is for use, not for going on."""
        self._put(BEST, record._replace(optimizer=None, scaler=None))

    def keep(self, record: Record) -> None:
        """Writes step_N.pt and removes the oldest of its kind beyond the limit."""
        self._put(f"step_{record.step:07d}.pt", record)
        for old in self._kept()[: -self.keep_limit]:
            old.unlink()
            self._entries.pop(old.name, None)

    def tidy(self) -> None:
        """Removes what a process that was killed while saving has left behind.

        Raises:
            CheckpointError: the manifest is damaged.
        """
        for path in self.directory.glob(".*.tmp"):
            path.unlink(missing_ok=True)
        for name, listed in manifest.read(self.directory).items():
            digest = None
            with suppress(FileNotFoundError):
                digest = manifest.digest_of(self.directory / name)
            if digest is None or not listed:
                continue
            found = [entry for entry in listed if entry.sha256 == digest]
            # A damaged file keeps an entry: it is to be found damaged, not unknown.
            self._entries[name] = (found or listed)[-1]
            if not found:
                self._damaged.add(name)

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
        lost = manifest.read(self.directory).keys() - {LAST}
        if lost:
            raise CheckpointError(
                f"{self.directory}: no {LAST}, though {MANIFEST} tells of {', '.join(sorted(lost))}"
                ": checkpoints have been removed; put one back, or begin a new run by --output, "
                f"from {BEST} by train.init_from if that is still there"
            )
        return None, []

    def check_space(self, record: Record) -> None:
        """Refuses to begin what could not be saved.

        Raises:
            ExecutionError: the disk has no room for two checkpoints like `record`.
        """
        self.directory.mkdir(parents=True, exist_ok=True)
        free, needed = shutil.disk_usage(self.directory).free, 2 * num_bytes(record)
        if free < needed:
            raise ExecutionError(
                f"{self.directory}: two checkpoints take {needed / 1e6:.1f} MB and the disk has "
                f"{free / 1e6:.1f} MB left; make room, or choose another disk by --output"
            )

    def _put(self, name: str, record: Record, *, keep_as: str | None = None) -> None:
        path = self.directory / name
        with unnamed(path, record) as (temporary, entry):
            is_good = path.exists() and name not in self._damaged
            before = self._entries.get(name) if is_good else None
            pending = {other: [one] for other, one in self._entries.items()}
            pending[name] = [entry] if before is None else [before, entry]
            if keep_as is not None and before is not None:
                pending[keep_as] = [*pending.get(keep_as, []), before]
            manifest.write(self.directory, pending)
            if keep_as is not None and before is not None:
                self._copy_name(path, self.directory / keep_as)
                self._entries[keep_as] = before
                self._damaged.discard(keep_as)
            temporary.replace(path)
            self._entries[name] = entry
            self._damaged.discard(name)
            files.sync_directory(self.directory)

    @staticmethod
    def _copy_name(path: Path, other: Path) -> None:
        """Calls the file at `path` `other` too, or, where a file has one name only, instead."""
        temporary = other.with_name(f".{other.name}.{os.getpid()}.tmp")
        try:
            temporary.unlink(missing_ok=True)
            temporary.hardlink_to(path)
        except OSError:
            path.replace(other)
        else:
            temporary.replace(other)

    def _candidates(self) -> list[Path]:
        """What training may go on from, newest first."""
        recorded = manifest.read(self.directory)
        named = [self.last, self.directory / PREVIOUS, *reversed(self._kept())]
        existing = [path for path in named if path.exists()]

        def step(path: Path) -> int:
            listed = recorded.get(path.name)
            return max(entry.step for entry in listed) if listed else -1

        # Stable: of equal steps the first named.
        return sorted(existing, key=step, reverse=True)

    def _kept(self) -> list[Path]:
        """The checkpoints that are kept, oldest first."""
        return sorted(self.directory.glob("step_*.pt"), key=lambda path: (len(path.name), path))
