"""The training step, and the loop of steps; the command logs, evaluates and saves."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, nullcontext
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed.liveness import HostWatch
from segtrain.norm import untracked
from segtrain.training.measure import UPDATE, span
from segtrain.training.microbatches import LocalMicrobatch, accumulate_gradients, local_microbatches
from segtrain.training.optim.optimizer import set_learning_rate
from segtrain.training.optim.schedule import learning_rate
from segtrain.training.sam import sam_is_due, sam_perturbed
from segtrain.training.share_rules import watch
from segtrain.training.state import TrainState
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch


class StepResult(NamedTuple):
    """What a step leaves behind; tensors stay on the device until they are logged.

    loss, aux_loss: () float64, means over the valid pixels of all ranks; aux_loss is NaN without an
        auxiliary head. With SAM those of the first gradient; what follows is of the second.
    gradients: with train.shares, `ExactGradientSum.digest`; otherwise None.
    pixels: the sum of `Batch.pixels` on this rank; None: not taken.
    """

    step: int  # updates done so far, 1 .. train.steps
    loss: Tensor
    aux_loss: Tensor
    grad_norm: Tensor  # () of all gradients together, before clipping
    lr: float  # the backbone's
    data_s: float  # seconds the step waited for the loader
    gradients: Tensor | None = None
    pixels: int | None = None


def train_steps(
    state: TrainState,
    batches: Iterable[Batch],
    config: Config,
    *,
    device: torch.device,
    indices: Sequence[Sequence[int]],
    step_sync: StepSync,
) -> Iterator[StepResult]:
    """Trains from `state.step` to the last step, yielding after every update (collective).

    Ends early, after the same step on all ranks, if `step_sync` was asked to stop or end.

    Args:
        batches: this rank's Batch of every microbatch of every step, in order.
        indices: of each microbatch, the positions in the whole batch that this rank trains on.

    Raises:
        NonFiniteError: the loss or the gradient of the step before was not finite.
    """
    train = config.train
    batches = iter(batches)
    state.model.train()
    is_first = True

    with ExitStack() as stack:
        watched = nullcontext
        if device.type == "cuda" and dist.world_size() > 1:
            watched = stack.enter_context(HostWatch(train.timeout_s, dist.last_exchange)).step
        while state.step < train.steps and not (step_sync.stopped or step_sync.ended):
            began = time.perf_counter()
            microbatches = list(islice(batches, train.accumulate_steps))
            data_s = time.perf_counter() - began
            # Compiling, in the first step, may take longer than any exchange.
            with nullcontext() if is_first and train.compile else watched():
                local = local_microbatches(state, microbatches, indices, config, device)
                with watch(state.model) if is_first and state.shares is not None else nullcontext():
                    losses = _gradient(state, local, config, step_sync)
                lr = learning_rate(config, state.step)
                with span(UPDATE):
                    grad_norm = _update(state, lr, config.optim.clip_grad_norm)
                names = [name for batch in microbatches for name in batch.names]
                step_sync.record(state.step, grad_norm, names)
            is_first, digest = False, state.gradients.digest()
            hashes = [batch.pixels for batch in microbatches]
            pixels = None if None in hashes else sum(hashes)
            yield StepResult(state.step, *losses, grad_norm, lr, data_s, digest, pixels)


def _gradient(
    state: TrainState, microbatches: list[LocalMicrobatch], config: Config, step_sync: StepSync
) -> Tensor:
    """Gives the parameters their gradients; returns the mean losses (2,) (collective)."""

    # `state.sample_losses` counts each crop of a step once.
    counted = [part._replace(shown=None) for part in microbatches]

    def summed(parts: list[LocalMicrobatch]) -> Tensor:
        losses = accumulate_gradients(state, parts, config, step_sync)
        while not state.gradients.finish():
            with untracked():
                losses = accumulate_gradients(state, counted, config, step_sync)
        state.initial_weights.hold_gradients(state.model)
        return losses

    losses = summed(microbatches)
    if sam_is_due(config.optim, state.step):
        with sam_perturbed(state.model.parameters(), config.optim.sam_rho):
            summed(counted)
    return losses


def _update(state: TrainState, lr: float, clip_grad_norm: float | None) -> Tensor:
    """Moves the weights by the gradients, which it frees; returns the gradients' norm ()."""
    set_learning_rate(state.optimizer, lr)
    state.scaler.unscale_(state.optimizer)
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    grad_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_grad_norm, grad_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    state.optimizer.zero_grad(set_to_none=True)
    state.step += 1
    if state.average is not None:
        state.average.update(state.model, state.step)
    return grad_norm
