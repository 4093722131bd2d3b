"""Which steps `segtrain verify` computes again, and from which checkpoint on."""

from pathlib import Path
from typing import NamedTuple

from segtrain.checkpoint.format import load
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


def read_run_receipts(run: Path) -> dict[int, Receipt]:
    """The receipts of a run by step; ConfigError if there are none."""
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
    return receipts


def make_plan(
    run: Path, steps: tuple[int | None, int | None], receipts: dict[int, Receipt]
) -> Plan:
    """The plan for the first and last of `steps`; writes nothing.

    Without a last step, it is that of the newest receipt; without a first one, that after the
    newest checkpoint before the last step.

    Raises:
        ConfigError: some of the steps have no receipt.
        CheckpointError: the manifest of the checkpoints is damaged.
    """
    first, last = steps
    newest = max(receipts)
    last = last or max(newest, first or 0)
    kept = kept_checkpoints(run / run_directory.CHECKPOINTS)
    # Where receipts begin later than the run, its config was changed: what came before was another.
    beginning = min(receipts) - 1
    kept = [(step, path) for step, path in kept if step >= beginning]
    start_step, start, notes = _start(kept, before=first or last)
    if start is None and beginning > 0:
        raise ConfigError(
            f"{run}: its receipts begin with step {beginning + 1}, because its config was changed "
            "there or it had no train.shares before, and no checkpoint between that step and the "
            "steps to verify is kept; checkpoint.keep_every_steps keeps some"
        )
    first = first or start_step + 1
    missing = [step for step in range(first, last + 1) if step not in receipts]
    if missing:
        raise ConfigError(
            f"--steps: {run} has receipts of {len(receipts)} steps, {min(receipts)} to {newest}, "
            f"but none of step {missing[0]} (not done yet, or its line in "
            f"{run_directory.RECEIPTS} is missing or damaged); choose other steps by --steps A:B"
        )
    if start is None and steps[0] != 1:
        notes.append(
            f"note: no checkpoint from before step {first} is kept, so the replay starts at the "
            "beginning; checkpoint.keep_every_steps keeps some"
        )
    between = [(step, path.name) for step, path in kept if start_step < step <= last]
    return Plan(first, last, start, start_step, between, notes)


def _start(kept: list[tuple[int, Path]], *, before: int) -> tuple[int, str | None, list[str]]:
    """Step and name of the newest checkpoint before a step that holds training state; warnings."""
    warnings = []
    # The sort is stable: step_N.pt comes first, which a run that still trains does not replace.
    for step, path in sorted(kept, key=lambda pair: -pair[0]):
        if step >= before:
            continue
        try:
            checkpoint = load(path)
        except CheckpointError as error:
            warnings.append(f"warning: {error}; the replay starts earlier instead")
            continue
        if checkpoint.optimizer is not None and checkpoint.step < before:
            return checkpoint.step, path.name, warnings
    return 0, None, warnings
