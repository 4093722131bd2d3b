"""Checkpoints of a run. Nothing is saved before the weights and the data are known to be good."""

from typing import Any

import torch

from segtrain.checkpoint.format import Checkpoint
from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness
from segtrain.errors import NonFiniteError
from segtrain.trainer.setup import DATA_PATIENCE_S, TrainRun
from segtrain.training.state import TrainState

# How long a run that was asked to stop waits for the hashes of the labels before it saves.
STOP_PATIENCE_S = 15.0


def save(run: TrainRun, *, keep: bool = False) -> None:
    """Replaces last.pt; with `keep` writes step_N.pt before (collective)."""
    liveness.beat("checkpoint", run.state.step)
    settle(run)
    if dist.is_main():
        run.log.begin()
        checkpoint = checkpoint_of(run)
        if keep:  # after last.pt, a death in between would leave it out for ever
            run.checkpoints.keep(checkpoint)
        run.checkpoints.save_last(checkpoint)


def settle(run: TrainRun) -> None:
    """Returns when the newest step is known to be finite and the labels were compared (collective).

    Raises:
        NonFiniteError: a loss, a gradient or a weight is not finite.
        ConfigError, DataError: as `DatasetGuard.wait_for_hashes`.
    """
    run.flush_receipts()
    # The flags of the newest step are read a step later otherwise; here the host waits for them.
    run.step_sync.check_finite()
    _check_weights(run.state)

    def stopping(seconds: float) -> bool:
        # A run that was asked to stop may be killed soon: it saves without the rest of the hashes.
        asked = run.step_sync.stopped or run.signal_flags.stop_requested()
        return asked and seconds > STOP_PATIENCE_S

    if not run.data.wait_for_hashes(lambda seconds: seconds > DATA_PATIENCE_S):
        run.log.lines(["the labels are still being hashed; training goes on when that is done"])
        if not run.data.wait_for_hashes(stopping):
            run.log.lines(["warning: stopped before all labels were hashed; they may have changed"])
    run.log.lines(run.data.pop_log_lines())


def _check_weights(state: TrainState) -> None:
    """Raises NonFiniteError, on all ranks, for an update that finite gradients made infinite."""
    # All ranks have the same weights, so all raise, or none.
    values = [x for x in state.model.state_dict().values() if x.is_floating_point()]
    if not torch.stack([x.isfinite().all() for x in values]).all():
        raise NonFiniteError(
            f"step {state.step}: the weights are not finite, though loss and gradient are; they "
            "are not saved; a lower optim.lr or schedule.warmup_steps usually help"
        )


def checkpoint_of(run: TrainRun) -> Checkpoint:
    """The run as it is now; holds references to the weights, not copies."""
    fields: dict[str, Any] = {}
    for keeper in (run, run.state, run.data, run.class_uniform):
        if keeper is not None:
            fields |= keeper.fields()
    return Checkpoint(**fields)
