"""The training step, and the loop of steps; the command logs, evaluates and saves."""

import time
from collections.abc import Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segtrain import seed
from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed.offload import saved_on_host
from segtrain.distributed.partition import partition
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.models.normalize import Normalize
from segtrain.models.precision import dtype_of
from segtrain.norm import settle_statistics
from segtrain.training.gradients import GradientSum
from segtrain.training.losses import SegLoss
from segtrain.training.optim import WeightAverage, build_optimizer, learning_rate, set_learning_rate
from segtrain.training.step_sync import StepSync
from segtrain.training.wrap import share_weights, wrap
from segtrain.types import Batch, DropoutMasks


class StepResult(NamedTuple):
    """What a step leaves behind; tensors stay on the device until they are logged.

    loss, aux_loss: () float64, means over the valid pixels of all ranks; aux_loss is NaN without an
        auxiliary head.
    """

    step: int  # updates done so far, 1 .. train.steps
    loss: Tensor
    aux_loss: Tensor
    grad_norm: Tensor  # () of all gradients together, before clipping
    lr: float  # the backbone's
    data_s: float  # seconds the step waited for the loader


class RankBatch(NamedTuple):
    """This rank's part of one pass."""

    images: Tensor  # (n, 3, H, W) normalized
    labels: Tensor  # (n, H, W) int64
    dropout: DropoutMasks  # of these n images

    def split(self, parts: int) -> list["RankBatch"]:
        """The images in contiguous parts; the first parts hold one more where they are unequal."""

        def cut(i: int) -> RankBatch:
            indices = partition(len(self.images), parts, i)
            part = slice(indices.start, indices.stop)
            masks = (None if mask is None else mask[part] for mask in self.dropout)
            return RankBatch(self.images[part], self.labels[part], DropoutMasks(*masks))

        return [cut(i) for i in range(parts)]


@dataclass
class TrainState:
    """Everything that an update changes: the contents of a checkpoint."""

    model: nn.Module
    criterion: SegLoss
    wrapped: nn.Module  # both as one module, compiled if the config says so
    gradients: GradientSum
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: WeightAverage | None
    step: int = 0  # updates done

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and deploy: the average of the weights where one is kept."""
        return self.model if self.average is None else self.average.model


def make_state(model: nn.Module, config: Config, device: torch.device) -> TrainState:
    """The state before the first step, with `model` moved to `device` (collective)."""
    train = config.train
    model.to(device, dtype_of(train))
    if train.channels_last:
        model.to(memory_format=torch.channels_last)
    share_weights(model)
    criterion = SegLoss(config.loss, device, passes=train.accumulate_steps)
    return TrainState(
        model=model,
        criterion=criterion,
        wrapped=wrap(model, criterion, train),
        gradients=GradientSum(model.named_parameters()),
        optimizer=build_optimizer(model, train),
        scaler=torch.amp.GradScaler(device.type, enabled=train.precision == "float16"),
        average=WeightAverage(model, train.ema_decay) if train.ema_decay else None,
    )


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

    Ends early, after the same step on all ranks, if `step_sync` was asked to stop.

    Args:
        batches: this rank's Batch of every pass of every step, in order.
        indices: of each pass, the positions in the whole batch that this rank trains on.

    Raises:
        NonFiniteError: the loss or the gradient of the step before was not finite.
    """
    train = config.train
    normalize = Normalize(config.data.mean, config.data.std).to(device, dtype_of(train))
    # Also where channels_last is off: the loader's images have that layout, and convolutions would
    # follow it.
    layout = torch.channels_last if train.channels_last else torch.contiguous_format
    forward_backward = partial(_forward_backward, state, step_sync=step_sync)
    if train.virtual_ranks > 1:
        forward_backward = partial(_as_virtual_ranks, state, config, step_sync=step_sync)
    batches = iter(batches)
    state.model.train()

    while state.step < train.steps and not step_sync.stopped:
        began = time.perf_counter()
        passes = list(islice(batches, train.accumulate_steps))
        data_s = time.perf_counter() - began

        # Widened on the device: asked for both at once, `to` would convert on the host and wait.
        labels = [batch.labels.to(device, non_blocking=True).long() for batch in passes]
        weights = _pass_weights(labels, state.criterion)
        losses = torch.zeros(2, dtype=torch.float64, device=device)  # head, auxiliary head
        for i, batch in enumerate(passes):
            images = batch.images.to(device, non_blocking=True)
            images = normalize(images.contiguous(memory_format=layout))
            part = RankBatch(images, labels[i], _dropout_masks(state, config, indices[i], device))
            # All ranks add their gradients once a step, during the last backward pass. Virtual
            # ranks have a backward pass each, so their gradients wait for the end.
            last = i + 1 == len(passes)
            overlap = train.virtual_ranks == 1
            with state.gradients.summed(overlap=overlap) if last else nullcontext():
                losses += forward_backward(part, weights[i]) * weights[i]
            settle_statistics(state.model)

        lr = learning_rate(train, state.step)
        grad_norm = _update(state, lr, train.clip_grad_norm)
        step_sync.record(state.step, grad_norm, [name for batch in passes for name in batch.names])
        yield StepResult(state.step, losses[0], losses[1], grad_norm, lr, data_s)


def _forward_backward(
    state: TrainState, part: RankBatch, weight: Tensor | float, *, step_sync: StepSync
) -> Tensor:
    """Adds the gradient of this rank's part of a pass; returns the mean losses (2,) of all ranks.

    weight: that of the pass, from `_pass_weights`.
    """
    sums = state.wrapped(*part)
    totals = step_sync.reduce(sums)
    objective = state.criterion.objective(sums, totals)
    state.scaler.scale(objective * weight).backward()
    return state.criterion.means(totals)


def _as_virtual_ranks(
    state: TrainState,
    config: Config,
    part: RankBatch,
    weight: Tensor | float,
    *,
    step_sync: StepSync,
) -> Tensor:
    """As `_forward_backward`, with `part` cut among virtual ranks: one at a time computes."""
    device = part.images.device

    def work(smaller: RankBatch) -> Tensor:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread begins with device 0
        on_host = saved_on_host(device, state.model.parameters())
        # In the middle of its backward pass this thread waits for the others: autograd must run in
        # it, and not in the one thread that it has for each device.
        with torch.autograd.set_multithreading_enabled(False), on_host:
            return _forward_backward(state, smaller, weight, step_sync=step_sync)

    parts = part.split(config.train.virtual_ranks)
    return VirtualRanks(len(parts)).run([partial(work, smaller) for smaller in parts])[0]


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


def _pass_weights(labels: list[Tensor], criterion: SegLoss) -> list[Tensor | float]:
    """The fraction of the step's valid pixels, over all ranks, that lies in each pass."""
    if len(labels) == 1:
        return [1.0]
    weights = dist.all_reduce_sum(torch.stack([criterion.label_weight(label) for label in labels]))
    whole = weights.sum()
    return list(weights / torch.where(whole == 0, 1.0, whole))


def _dropout_masks(
    state: TrainState, config: Config, indices: Sequence[int], device: torch.device
) -> DropoutMasks:
    """The masks of the images at `indices`, out of those drawn for the whole batch of this step."""
    masks: list[Tensor | None] = []
    shape = {"batch_size": config.train.batch_size, "p": config.model.dropout}
    for layer, channels in enumerate(state.model.dropout_channels):
        mask = None
        if channels is not None:
            whole = seed.dropout_mask(config.seed, state.step, layer, channels=channels, **shape)
            mask = whole[list(indices)]
            if device.type == "cuda":
                # Only a copy from pinned memory lets the host run on.
                mask = mask.pin_memory().to(device, non_blocking=True)
        masks.append(mask)
    return DropoutMasks(*masks)
