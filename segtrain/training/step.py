"""The training step: forward pass, loss and backward pass over the images of all ranks, update.

A step has `train.accumulate_steps` microbatches. A rank computes its part of a microbatch at once,
or in parts that are computed apart: shares, or virtual ranks. `Layout` says who has which image.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed.copies import CopyStream
from segtrain.norm import placed, sync_running_stats, tracked_together, untracked
from segtrain.training.local import LocalMicrobatch, LocalStep, StepNumbers, local_step
from segtrain.training.measure import BACKWARD, FORWARD, UPDATE, span
from segtrain.training.optim.optimizer import set_learning_rate
from segtrain.training.state import TrainState
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch


class StepTensors(NamedTuple):
    """What a step leaves on the device.

    losses: (2,) float64, of the main and the auxiliary head, means over the valid pixels of all
        ranks; NaN without an auxiliary head.
    grad_norm: () of all gradients together, before clipping.
    flags: what the ranks told each other (`StepSync.take_flags`), in all passes.
    digest: with train.shares, `ExactGradientSum.digest`; otherwise None.
    """

    losses: Tensor
    grad_norm: Tensor
    flags: Tensor
    digest: Tensor | None


class StepResult(NamedTuple):
    """What is known after a step; tensors stay on the device until they are logged.

    loss, aux_loss, grad_norm, digest: as in `StepTensors`; they may be kept, and reading one waits
        for the device.
    pixels: the sum of `Batch.pixels` on this rank; None: not taken.
    """

    step: int  # updates done so far, 1 .. train.steps
    loss: Tensor
    aux_loss: Tensor
    grad_norm: Tensor
    lr: float  # the backbone's
    data_s: float  # seconds the step waited for the loader
    digest: Tensor | None = None
    pixels: int | None = None


class TrainStep:
    """Moves the weights once (collective).

    A function of tensors, but for the first call: it changes nothing on the host, which `done` does
    after it, and with `state.capturable` all its operations have the same numbers in every call.
    """

    def __init__(
        self, state: TrainState, config: Config, device: torch.device, step_sync: StepSync
    ) -> None:
        self._state, self._config, self._device = state, config, device
        self.step_sync = step_sync
        self._copies = CopyStream(device)
        self._is_first = True

    def local(self, batches: Sequence[Batch], data_s: float = 0.0) -> LocalStep:
        """The next step, from this rank's batch of each microbatch."""
        about = {"requests": self.step_sync.requests(), "data_s": data_s}
        # The copies run beside the step before, which the device may still be computing.
        with self._copies.copying() as arrived:
            local = local_step(self._state, batches, self._config, self._device, **about)
            arrived += local.tensors()
        return local

    def __call__(self, local: LocalStep) -> StepTensors:
        """One update."""
        state, config, sync = self._state, self._config, self.step_sync
        is_first, self._is_first = self._is_first, False
        # The first call is always one of plain kernels: a CUDA graph records a later one.
        if is_first:
            state.model.train()
        with state.passes.first_step() if is_first else nullcontext():
            losses = gradient(state, local.microbatches, local.numbers, sync)
        with span(UPDATE):
            grad_norm = update(state, local.numbers, config.optim.clip_grad_norm)
        digest = state.passes.gradients.digest()
        return StepTensors(losses, grad_norm, sync.take_flags(grad_norm), digest)

    def done(self, local: LocalStep, left: StepTensors) -> StepResult:
        """Counts the step, and acts on the flags of the one before (collective).

        Raises:
            NonFiniteError: the loss or the gradient of the step before was not finite.
        """
        state = self._state
        state.step += 1
        # The flags of this step are on their way; what is read now is from the step before.
        self.step_sync.record(state.step, left.flags, local.names)
        about = local.lr, local.data_s, left.digest, local.pixels
        return StepResult(state.step, *left.losses, left.grad_norm, *about)


def gradient(
    state: TrainState,
    parts: Sequence[LocalMicrobatch],
    numbers: StepNumbers,
    step_sync: StepSync,
) -> Tensor:
    """Gives the parameters the gradient of a step; returns its mean losses, (2,) (collective).

    Both are over the valid pixels of all ranks. With train.shares, exact sums may have to be taken
    a second time; running statistics then stay.
    """
    passes, weights, again = state.passes, _loss_weights(state, parts), False
    # Exact sums decide alike on all ranks whether to go round again, so the collectives match.
    while True:
        losses = torch.zeros(2, dtype=torch.float64, device=parts[0].images.device)
        with untracked() if again else nullcontext():
            for i, (part, weight) in enumerate(zip(parts, weights, strict=True)):
                sizes = state.layout.sizes(i, dist.rank())
                # All ranks add their gradients once a step, during the last backward pass.
                collected = passes.gradients.collected(last=i == len(parts) - 1)
                with placed(state.layout.everywhere), collected, tracked_together():
                    about = weight, numbers, step_sync
                    # Parts in threads of their own meet in every sum; a whole one needs none.
                    if passes.runs_inline(len(sizes)):
                        objective, means = forward(state, state.wrapped, part, *about)
                        with span(BACKWARD):
                            objective.backward()
                    else:
                        means = _in_threads(state, part.split(sizes), *about)
                losses += means * weight
            # One sum for all microbatches, after the last backward pass.
            sync_running_stats(*passes.modules, parts=passes.sums)
        if passes.gradients.finish():
            state.initial_weights.hold_gradients(state.model)
            return losses
        again = True


def forward(
    state: TrainState,
    module: nn.Module,
    part: LocalMicrobatch,
    weight: Tensor,
    numbers: StepNumbers,
    step_sync: StepSync,
) -> tuple[Tensor, Tensor]:
    """The objective (), whose gradient is that of a part, and the mean losses (2,) of all parts.

    Collective. The objective is in the scale of `state.scaler`.

    module: `state.wrapped` or a replica of it.
    weight: that of the microbatch, (), from `_loss_weights`.
    """
    criterion = state.criterion
    with span(FORWARD):
        images = state.normalize(part.images.contiguous(memory_format=torch.channels_last))
        sums = module(images, criterion.labels(part.labels), part.dropout)
        totals = step_sync.reduce(sums, numbers.requests)
        objective = criterion.objective(sums, totals) * weight
        return state.scaler.scale(objective), criterion.means(totals)


def update(state: TrainState, numbers: StepNumbers, clip_grad_norm: float | None) -> Tensor:
    """Moves the weights by the gradients, which it frees; returns the gradients' norm ()."""
    set_learning_rate(state.optimizer, numbers.lr)
    # Before the norm is taken: the limit of clipping is one of gradients without the loss scale.
    state.scaler.unscale_(state.optimizer)
    parameters = [p for group in state.optimizer.param_groups for p in group["params"]]
    grad_norm = nn.utils.get_total_norm([p.grad for p in parameters if p.grad is not None])
    if clip_grad_norm is not None:
        nn.utils.clip_grads_with_norm_(parameters, clip_grad_norm, grad_norm)
    state.scaler.step(state.optimizer)
    state.scaler.update()
    # None, not zeros: sums of gradients tell by it which parameters got one in a step.
    state.optimizer.zero_grad(set_to_none=True)
    if state.average is not None:
        state.average.update(state.model, numbers.toward)
    return grad_norm


def _in_threads(
    state: TrainState,
    parts: list[LocalMicrobatch],
    weight: Tensor,
    numbers: StepNumbers,
    step_sync: StepSync,
) -> Tensor:
    """Forward and backward pass of parts that are computed apart; the mean losses, (2,)."""
    device = parts[0].images.device

    def work(module: nn.Module, part: LocalMicrobatch) -> Tensor:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread begins with device 0
        # In the middle of its backward pass this thread waits for the others: autograd must run in
        # it, and not in the one thread that it has for each device.
        with torch.autograd.set_multithreading_enabled(False), state.passes.saved_tensors(device):
            objective, means = forward(state, module, part, weight, numbers, step_sync)
            with span(BACKWARD):
                objective.backward()
        return means

    # Each thread returns the means over all parts of all ranks, so one of them is enough.
    return state.passes.run(work, parts)[0]


def _loss_weights(state: TrainState, parts: Sequence[LocalMicrobatch]) -> list[Tensor]:
    """What the mean losses of each microbatch count in the loss of the step, () (collective)."""
    if len(parts) == 1:
        return [torch.ones((), dtype=torch.float64, device=parts[0].labels.device)]
    # Pixels, not microbatches, are the unit: the mean loss of a step is over all its valid pixels.
    sums = _valid_pixels(state, [part.labels for part in parts])
    whole = sums.sum()
    return list((sums / torch.where(whole == 0, 1.0, whole)).unbind())


def _valid_pixels(state: TrainState, labels: Sequence[Tensor]) -> Tensor:
    """The weights of the valid pixels of all ranks, (M,): by microbatch (collective).

    labels: of this rank, (n, H, W) in each microbatch.
    """
    criterion = state.criterion

    def weights(stored: Sequence[Tensor]) -> Tensor:
        return torch.stack([criterion.label_weight(criterion.labels(each)) for each in stored])

    passes = state.passes
    # By microbatch, then by part; zip gives each part its labels of all microbatches.
    cut = [passes.cut(each, i) for i, each in enumerate(labels)]
    return passes.sums.sum([weights(part) for part in zip(*cut, strict=True)])
