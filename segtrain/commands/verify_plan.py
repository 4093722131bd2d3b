"""Which steps `segtrain verify` computes again, and from which checkpoint on."""

import os
from pathlib import Path
from typing import NamedTuple

from segtrain.checkpoint.format import Checkpoint, load
from segtrain.checkpoint.manager import kept_checkpoints
from segtrain.errors import CheckpointError, ConfigError
from segtrain.run import directory as run_directory
from segtrain.run.receipts import Receipt, read_receipts


class Plan(NamedTuple):
    """What is computed again; JSON can hold it."""

    first: int  # the steps to verify, counted from 1
    last: int
    start: str | None  # the checkpoint to start from; None: the beginning
    start_step: int
    kept: list[tuple[int, str]]  # step and name of checkpoints of the replayed steps
    notes: list[str]


def read_run_receipts(run: Path, steps: int) -> dict[int, Receipt]:
    """The receipts of a run of so many steps, by step.

    Raises:
        ConfigError: there are none.
        CheckpointError: one is of a step that the run does not have.
    """
    path = run / run_directory.RECEIPTS
    try:
        receipts = read_receipts(path)
    except FileNotFoundError:
        raise ConfigError(
            f"{path}: not there: the run was trained by an older version, or has not logged yet "
            "(log.every_steps); nothing can be verified"
        ) from None
    except OSError as error:
        raise ConfigError(f"{path}: cannot be read: {error.strerror}") from None
    if not receipts:
        what = "holds no whole receipt; the run writes them every log.every_steps"
        raise ConfigError(f"{path}: {what}")
    if foreign := [step for step in receipts if not 1 <= step <= steps]:
        raise CheckpointError(
            f"{path}: has a receipt of step {foreign[0]}, the run has the steps 1 to {steps} "
            "(train.steps): it did not write this line; remove it to verify the others"
        )
    return receipts


def make_plan(
    run: Path, steps: tuple[int | None, int | None], receipts: dict[int, Receipt]
) -> Plan:
    """The plan for the first and last of `steps`; writes nothing, loads the checkpoints on the way.

    Without a last step, it is that of the newest receipt; without a first one, that after the
    newest checkpoint before the last step.

    Raises:
        ConfigError: some of the steps have no receipt.
        CheckpointError: a checkpoint, or the manifest, is damaged.
    """
    first, last = steps
    newest = max(receipts)
    last = last or max(newest, first or 0)
    kept = kept_checkpoints(run / run_directory.CHECKPOINTS)
    # Where receipts begin later than the run, its config was changed: what came before was another.
    beginning = min(receipts) - 1
    kept = [(step, path) for step, path in kept if step >= beginning]
    start_step, start = _start(kept, before=first or last)
    if start is None and beginning > 0:
        raise ConfigError(
            f"{run}: its receipts begin with step {beginning + 1}, because its config was changed "
            "there or it had no train.shares before, and no checkpoint between that step and the "
            "steps to verify is kept; checkpoint.keep_every_steps keeps some"
        )
    first = first or start_step + 1
    # Not a list: there may be no end to the steps that are asked for.
    missing = next((step for step in range(first, last + 1) if step not in receipts), None)
    if missing is not None:
        raise ConfigError(
            f"--steps: {run} has receipts of {len(receipts)} steps, {min(receipts)} to {newest}, "
            f"but none of step {missing} (not done yet, or its line in "
            f"{run_directory.RECEIPTS} is missing or damaged); choose other steps by --steps A:B"
        )
    notes = []
    if start is None and steps[0] != 1:
        notes.append(
            f"note: no checkpoint from before step {first} is kept, so the replay starts at the "
            "beginning; checkpoint.keep_every_steps keeps some"
        )
    between = [(step, path) for step, path in kept if start_step < step <= last]
    # Now rather than hours later, when the replay comes to their step.
    found = [(step, path.name) for step, path in between if _load(path) is not None]
    return Plan(first, last, start, start_step, found, notes)


def _start(kept: list[tuple[int, Path]], *, before: int) -> tuple[int, str | None]:
    """Step and name of the newest checkpoint before a step that holds training state."""
    # The sort is stable: step_N.pt comes first, which a run that still trains does not replace.
    for step, path in sorted(kept, key=lambda pair: -pair[0]):
        if step >= before:
            continue
        checkpoint = _load(path)
        if checkpoint is None or checkpoint.optimizer is None or checkpoint.step >= before:
            continue
        return checkpoint.step, path.name
    return 0, None


def _load(path: Path) -> Checkpoint | None:
    """A checkpoint of the run; None if the run, which may still train, has removed it."""
    try:
        return load(path)
    except CheckpointError as error:
        if not os.path.lexists(path):
            return None
        raise CheckpointError(f"{error}; move it away to verify the run without it") from None
