"""Which checkpoints a run keeps on disk, and which one it is resumed from.

The directory may also hold the user's own files. A file is the run's if its SHA-256 is the one in
the manifest; no other file is ever counted, removed or overwritten.
"""

import errno
import os
import re
import shutil
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from torch import Tensor

from segtrain import files
from segtrain.checkpoint.format import BEST, LAST, Checkpoint, load, num_bytes, write_temporary
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.files import manifest
from segtrain.files.manifest import MANIFEST, Entry
from segtrain.run.console import say
from segtrain.text import counted, first_of

PREVIOUS = "previous.pt"

_KEPT = re.compile(r"step_(\d{7,})\.pt")
_NO_LINKS = (errno.EPERM, errno.EOPNOTSUPP, errno.ENOSYS, errno.EMLINK, errno.EXDEV)
# As `files.temporary` names them: those of other programs are left alone.
_TEMPORARY = re.compile(r"\.((last|previous|best|step_\d{7,})\.pt|manifest\.json)\.\d+\.tmp")


# How many step_N.pt are kept.
_KEEP_LIMIT = 5


class CheckpointManager:
    """Writes last.pt, previous.pt, best.pt and some step_N.pt, and finds the newest good one.

    Only one process writes; it calls `clean_up` first. `keep_limit` step_N.pt are kept.
    `check_lock` is called before each file is written, and raises if another run has taken over.
    `saved` is called when a file and the manifest are written.
    """

    def __init__(
        self,
        directory: Path,
        *,
        keep_limit: int = _KEEP_LIMIT,
        check_lock: Callable[[], None] = lambda: None,
        saved: Callable[[], None] = lambda: None,
    ) -> None:
        self.directory = directory
        self._check_lock, self._saved = check_lock, saved
        self.last = directory / LAST
        self.keep_limit = keep_limit
        self._entries: dict[str, Entry] = {}  # what each file should be
        self._verified: dict[str, tuple[int, ...]] = {}  # the `_stat` of files that match
        self._manifest: bytes | None = None  # as this process last saw or wrote it

    def save_last(self, checkpoint: Checkpoint) -> None:
        """Replaces last.pt, which a reader finds at any moment; the old one becomes previous.pt."""
        self._save(LAST, checkpoint, keep_as=PREVIOUS)

    def save_best(self, checkpoint: Checkpoint) -> None:
        """Replaces best.pt, for inference: it holds no training state."""
        self._save(BEST, _for_inference(checkpoint))

    def keep(self, checkpoint: Checkpoint) -> None:
        """Writes step_N.pt and removes this run's oldest ones beyond the limit."""
        self._save(f"step_{checkpoint.step:07d}.pt", checkpoint)
        # The user may have put a file of such a name here: it is not removed.
        own = [name for name in self._entries if _KEPT.fullmatch(name) and self._is_own(name)]
        for name in sorted(own, key=_step)[: -self.keep_limit]:
            try:
                (self.directory / name).unlink()
            except OSError as error:
                say(f"warning: {self.directory / name} cannot be removed: {error.strerror}")
            del self._entries[name]

    def clean_up(self) -> None:
        """Removes temporary files of a killed process, then reads the manifest.

        CheckpointError if the manifest is damaged, ExecutionError if the disk fails.
        """
        with files.os_errors_as(ExecutionError, what="cannot be cleaned up"):
            for path in list(self.directory.glob(".*.tmp")):
                if _TEMPORARY.fullmatch(path.name):
                    path.unlink(missing_ok=True)
        self._manifest = manifest.read_raw(self.directory)
        for name, entries in manifest.read_entries(self.directory).items():
            path = self.directory / name
            if not entries or not os.path.lexists(path):
                continue
            stat, sha256 = _stat(path), None
            with suppress(OSError):  # unreadable, or a folder
                sha256 = manifest.sha256_of(path)
            matching = [entry for entry in entries if entry.sha256 == sha256]
            # A damaged file keeps its entry, so that it counts as damaged, not as unknown.
            self._entries[name] = (matching or entries)[-1]
            if matching:
                self._verified[name] = stat

    def newest(self) -> tuple[Path | None, list[str]]:
        """The newest checkpoint that loads, if any, and what is wrong with newer ones.

        By the step in the manifest. CheckpointError if none loads, or if all have been removed.
        """
        problems = []
        for path in self._newest_first():
            try:
                _check_finite(load(path), path)
                return path, problems
            except CheckpointError as error:
                problems.append(str(error))
        if self.is_cleared():
            cleared = (
                f"{self.directory}: {BEST} alone is left (segtrain runs --clear), and it holds no "
                "training state; to begin a new run with its weights: train.init_from"
            )
            problems.insert(0, cleared)
        if problems:
            raise CheckpointError("\n  ".join(problems))
        # If the very first save was killed, the manifest lists last.pt only.
        if manifest.read_entries(self.directory).keys() - {LAST}:
            what = f"{LAST} and others have been removed; put one back, or start anew by --output"
            raise CheckpointError(f"{self.directory}: {what}")
        return None, []

    def is_cleared(self) -> bool:
        """Whether `clear` has removed what a run is resumed from."""
        return manifest.read_entries(self.directory).keys() == {BEST}

    def clear(self) -> int:
        """Removes what only training needs: all but a good best.pt. Returns the bytes of it.

        Without best.pt only previous.pt goes. Call `clean_up` before.

        Raises:
            ExecutionError: a file cannot be removed.
        """
        own, freed = self._entries.keys(), 0
        unneeded = own - {BEST} if self._is_own(BEST) else own & {PREVIOUS}
        # last.pt goes last: until then the run can be resumed, or cleared again.
        for name in sorted(unneeded, key=lambda name: name == LAST):
            # A file that was replaced since is not the run's any more, and stays.
            if self._is_own(name):
                with files.os_errors_as(ExecutionError, what="cannot be removed"):
                    freed += (self.directory / name).stat().st_size
                    (self.directory / name).unlink()
            del self._entries[name]
        with files.os_errors_as(ExecutionError, self.directory, "the manifest cannot be written"):
            entries = {name: [entry] for name, entry in self._entries.items()}
            self._manifest = manifest.write(self.directory, entries)
        return freed

    def check_space(self, checkpoint: Checkpoint, *, later_bytes: int = 0) -> None:
        """Raises ExecutionError if the disk has no room for the checkpoints of a run.

        These are three of this size, since the old ones stay until the new one is whole, or those
        of them that are not there yet; and best.pt. later_bytes: what a checkpoint will hold
        besides, as an optimizer after its first step.
        """
        with files.os_errors_as(ExecutionError, self.directory, "cannot be used"):
            self.directory.mkdir(parents=True, exist_ok=True)
            free = shutil.disk_usage(self.directory).free / 1e6
        number = 3 - self._is_own(LAST) - self._is_own(PREVIOUS)
        needed = number * (num_bytes(checkpoint) + later_bytes)
        needed += 0 if self._is_own(BEST) else num_bytes(_for_inference(checkpoint))
        needed /= 1e6
        if free < needed:
            what = counted(number, "checkpoint takes", "checkpoints take")
            what = f"{what}, with {BEST}, {needed:.1f} MB and the disk has {free:.1f} MB left"
            repair = "free some, or choose another disk by --output"
            raise ExecutionError(f"{self.directory}: {what}; {repair}")

    def _save(self, name: str, checkpoint: Checkpoint, *, keep_as: str | None = None) -> None:
        """Writes the file `name`; the old one, if it is the run's, stays as `keep_as`."""
        path = self.directory / name
        self._check_lock()  # before a folder is made there
        with write_temporary(path, checkpoint) as (temporary, entry):
            # Once more: the write may have taken minutes.
            self._check_sole_writer()
            # Until the files are renamed, old and new content are valid under both names.
            pending = {other: [known] for other, known in self._entries.items()}
            pending[name] = [entry]
            if self._is_own(name):
                old = self._entries[name]
                pending[name].insert(0, old)
            else:
                _set_aside(path)
                keep_as = None
            if keep_as is not None:
                pending[keep_as] = [*pending.get(keep_as, []), old]
                if not self._is_own(keep_as):
                    _set_aside(self.directory / keep_as)
            self._manifest = manifest.write(self.directory, pending)
            # The old file gets its second name first, so that with links the name is never missing.
            if keep_as is not None:
                _also_call(path, self.directory / keep_as)
                self._set_entry(keep_as, old)
            temporary.replace(path)
            self._set_entry(name, entry)
            # Without this a power cut could undo the renames.
            files.sync_directory(self.directory)
        self._saved()

    def _check_sole_writer(self) -> None:
        """Refuses to write after another run has begun, or written, in the directory."""
        self._check_lock()
        # A manifest that somebody has removed is no sign of another run.
        now = manifest.read_raw(self.directory)
        if now is not None and now != self._manifest:
            what = "another run has written checkpoints; this run stops before it replaces them"
            raise ExecutionError(f"{self.directory / MANIFEST}: {what}")

    def _set_entry(self, name: str, entry: Entry) -> None:
        self._entries[name] = entry
        self._verified[name] = _stat(self.directory / name)

    def _is_own(self, name: str) -> bool:
        """Whether the file is what this run wrote; hashes it only if its `_stat` has changed."""
        path = self.directory / name
        if name not in self._entries:
            return False
        with suppress(OSError):
            stat = _stat(path)
            if stat == self._verified.get(name):
                return True
            if manifest.sha256_of(path) == self._entries[name].sha256:
                self._verified[name] = stat
                return True
        return False

    def _newest_first(self) -> list[Path]:
        """The checkpoints that a run can be resumed from."""
        entries = manifest.read_entries(self.directory)
        # Without a manifest nothing tells the run's own files from the user's.
        listed = entries or [path.name for path in self.directory.glob("step_*.pt")]
        kept = sorted(filter(_KEPT.fullmatch, listed), key=_step, reverse=True)
        steps = {name: max((e.step for e in known), default=-1) for name, known in entries.items()}
        # The sort is stable: last.pt comes first among equal steps.
        names = sorted((LAST, PREVIOUS, *kept), key=lambda name: steps.get(name, -1), reverse=True)
        return [path for name in names if os.path.lexists(path := self.directory / name)]


def kept_checkpoints(directory: Path) -> list[tuple[int, Path]]:
    """(step, path) of the run's checkpoints in `directory`, in the order of steps; writes nothing.

    Among equal steps step_N.pt comes first: a run that still trains replaces the others. Without a
    manifest the files are opened. CheckpointError if the manifest or such a file is damaged.
    """
    entries = manifest.read_entries(directory)
    names = entries or {path.name: [] for path in directory.glob("*.pt")}
    own = [name for name in names if name in (LAST, PREVIOUS, BEST) or _KEPT.fullmatch(name)]
    checkpoints = []
    for path in (directory / name for name in own):
        if os.path.lexists(path):
            known = entries.get(path.name)
            checkpoints.append((known[-1].step if known else load(path).step, path))
    return sorted(
        checkpoints, key=lambda pair: (pair[0], not _KEPT.fullmatch(pair[1].name), pair[1])
    )


def _check_finite(checkpoint: Checkpoint, path: Path) -> None:
    """CheckpointError: no run can go on with these weights."""
    known = {key: x for key, x in checkpoint.model.items() if isinstance(x, Tensor)}
    if odd := [key for key, x in known.items() if not x.isfinite().all()]:
        raise CheckpointError(f"{path}: damaged: numbers that are not finite in {first_of(odd, 3)}")


def _also_call(path: Path, other: Path) -> None:
    """Gives a file a second name, in place of what had it; moves it where links are unsupported."""
    # `os.link` does not replace a file, so the link first gets a temporary name.
    with files.temporary(other) as draft:
        try:
            os.link(path, draft)
        except OSError as error:
            if error.errno not in _NO_LINKS:
                raise
            path.replace(other)
        else:
            draft.replace(other)


def _set_aside(path: Path) -> None:
    """Renames a file or folder that this run did not write, so that it is not overwritten."""
    if not os.path.lexists(path):
        return
    number = 1
    while os.path.lexists(aside := path.with_name(f"{path.name}.old-{number}")):
        number += 1
    path.rename(aside)
    say(f"warning: {path} was not as this run wrote it; it is kept as {aside.name}")


def _step(kept: str) -> int:
    return int(_KEPT.fullmatch(kept)[1])


def _stat(path: Path) -> tuple[int, ...]:
    """Numbers that change when the file is written or replaced."""
    status = path.lstat()
    return status.st_dev, status.st_ino, status.st_size, status.st_mtime_ns


def _for_inference(checkpoint: Checkpoint) -> Checkpoint:
    """Without what only training needs."""
    return checkpoint._replace(**dict.fromkeys(("optimizer", "scaler", "start")))
