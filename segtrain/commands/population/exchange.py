"""The exchange between two runs of a population: checkpoints are copied, options replaced."""

import os
import shutil
from contextlib import ExitStack
from datetime import datetime
from pathlib import Path

from segtrain import files
from segtrain.checkpoint.format import LAST
from segtrain.config import Config
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.files import manifest
from segtrain.files.manifest import Entry
from segtrain.run import directory as run_directory
from segtrain.run.claim import Claim


def take_over(loser: Path, winner: Path, config: Config, *, step: int) -> None:
    """Gives the run in `loser` the checkpoints of the run in `winner`, and `config`.

    The winner is only read, so after an interruption the same call completes the exchange. Files
    in `loser` that no run has written stay. config.yaml is replaced, rather than given by
    --accept-changes, because the run must still refuse data that have changed.

    step: that of the winner's last.pt.

    Raises:
        CheckpointError: a checkpoint of the winner is not as it was written, or of another step.
        ConfigError: one of both is in use.
        ExecutionError: the files cannot be written.
    """
    source, target = (run / run_directory.CHECKPOINTS for run in (winner, loser))
    with ExitStack() as stack:
        for run in (loser, winner):
            stack.enter_context(Claim(run))
        known = manifest.read_entries(source)
        if step not in [entry.step for entry in known.get(LAST, ())]:
            raise CheckpointError(f"{source / LAST}: expected the checkpoint of step {step}")
        try:
            target.mkdir(exist_ok=True)
            # Before the manifest is replaced, which says which files are the run's own.
            for name in manifest.read_entries(target).keys() - known.keys():
                (target / name).unlink(missing_ok=True)
            copied = {
                name: [_copy(source / name, target / name, entries)]
                for name, entries in known.items()
                if os.path.lexists(source / name)
            }
            manifest.write(target, copied)
            run_directory.write_config(loser, config)
            _log(loser, f"changed    all weights: those of {winner.name} at step {step}")
        except OSError as error:
            where = error.filename2 or error.filename or loser
            what = f"cannot take over from {winner.name}: {error.strerror}"
            raise ExecutionError(f"{where}: {what}") from None


def _copy(source: Path, target: Path, entries: list[Entry]) -> Entry:
    """Copies a checkpoint; returns the one of `entries` that it is."""
    with files.temporary(target) as draft:
        shutil.copyfile(source, draft)
        with draft.open("rb") as file:
            os.fsync(file.fileno())
        sha256 = manifest.sha256_of(draft)
        matching = [entry for entry in entries if entry.sha256 == sha256]
        if not matching:
            raise CheckpointError(f"{source}: damaged: these are not the bytes that were saved")
        draft.replace(target)
    return matching[-1]


def _log(run: Path, line: str) -> None:
    time = datetime.now().isoformat(" ", "milliseconds").replace(".", ",")
    with files.open_regular(run / run_directory.LOG, "a", encoding="utf-8") as file:
        file.write(f"{time} INFO {line}\n")
