"""One step of training, and the loop of steps.

The command owns logging, evaluation and checkpoints; what is here only moves the weights.
"""

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
from segtrain.norm import settle_statistics
from segtrain.training.gradients import GradientSum
from segtrain.training.losses import SegLoss
from segtrain.training.optim import WeightAverage, build_optimizer, learning_rate, set_learning_rate
from segtrain.training.step_sync import StepSync
from segtrain.training.wrap import dtype_of, share_weights, wrap
from segtrain.types import Batch, DropoutMasks


class StepResult(NamedTuple):
    """What a step leaves behind; tensors stay on the device until somebody logs them.

    step: updates done so far, 1 .. train.steps.
    loss, aux_loss: () float64, means over the valid pixels of all ranks; aux_loss is NaN without an
        auxiliary head.
    grad_norm: () norm of all gradients together, before clipping.
    lr: the backbone's learning rate of this update.
    data_s: seconds the step waited for the loader.
    """

    step: int
    loss: Tensor
    aux_loss: Tensor
    grad_norm: Tensor
    lr: float
    data_s: float


class RankBatch(NamedTuple):
    """What one rank trains on in one pass.

    images: (n, 3, H, W) normalized; labels: (n, H, W) int64; dropout: this rank's rows.
    """

    images: Tensor
    labels: Tensor
    dropout: DropoutMasks

    def split(self, parts: int) -> list["RankBatch"]:
        """Its rows in contiguous parts, the first ones larger by one where they are not equal."""
        rows = [partition(len(self.images), parts, i) for i in range(parts)]
        return [
            RankBatch(
                self.images[part.start : part.stop],
                self.labels[part.start : part.stop],
                DropoutMasks(
                    *(None if m is None else m[part.start : part.stop] for m in self.dropout)
                ),
            )
            for part in rows
        ]


@dataclass
class TrainState:
    """Everything an update changes, and thereby everything a checkpoint holds.

    `wrapped` is `model` with `criterion` as one module; `gradients` sums the gradients of `model`
    over the ranks; `step` counts the updates done.
    """

    model: nn.Module
    criterion: SegLoss
    wrapped: nn.Module
    gradients: GradientSum
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: WeightAverage | None
    step: int = 0

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
    rows: Sequence[Sequence[int]],
    step_sync: StepSync,
) -> Iterator[StepResult]:
    """Trains from `state.step` to the last step, yielding after every update (collective).

    Ends early, after the same step on all ranks, when `step_sync` has been asked to stop.

    Args:
        batches: this rank's Batch of every pass of every step, in order.
        rows: the positions in the whole batch that this rank's part of each pass takes.

    Raises:
        NonFiniteError: the loss or the gradient of the step before was not finite.
    """
    train = config.train
    normalize = Normalize(config.data.mean, config.data.std).to(device, dtype_of(train))
    # Also where it is off: the loader's images are channels-last, and convolutions follow them.
    layout = torch.channels_last if train.channels_last else torch.contiguous_format
    forward_backward = partial(_forward_backward, state, step_sync=step_sync)
    if train.virtual_ranks > 1:
        forward_backward = partial(
            _in_shares, state, parts=train.virtual_ranks, step_sync=step_sync
        )
    batches = iter(batches)
    state.model.train()

    while state.step < train.steps and not step_sync.stopped:
        began = time.perf_counter()
        passes = list(islice(batches, train.accumulate_steps))
        data_s = time.perf_counter() - began

        # Widened on the device: asked for both at once, `to` would convert on the host and wait.
        labels = [batch.labels.to(device, non_blocking=True).long() for batch in passes]
        weights = _pass_weights(labels, state.criterion)
        loss = torch.zeros(2, dtype=torch.float64, device=device)  # of both heads
        for i, batch in enumerate(passes):
            images = batch.images.to(device, non_blocking=True)
            images = normalize(images.contiguous(memory_format=layout))
            share = RankBatch(images, labels[i], _dropout_masks(state, config, rows[i], device))
            # Gradients are sent once a step, with the last pass. Each virtual rank has a backward
            # pass of its own, so theirs wait for the end.
            last = i + 1 == len(passes)
            overlap = train.virtual_ranks == 1
            with state.gradients.summed(overlap=overlap) if last else nullcontext():
                means = forward_backward(share, weights[i])
            loss += means * weights[i]
            settle_statistics(state.model)

        lr = learning_rate(train, state.step)
        grad_norm = _update(state, lr, train.clip_grad_norm)
        step_sync.record(state.step, grad_norm, [name for batch in passes for name in batch.names])
        yield StepResult(state.step, loss[0], loss[1], grad_norm, lr, data_s)


def _forward_backward(
    state: TrainState, share: RankBatch, weight: Tensor | float, *, step_sync: StepSync
) -> Tensor:
    """Adds the gradient of this rank's share of one pass; returns the means (2,) of all ranks.

    `weight` is the share of the step's valid pixels that lies in this pass, over all ranks.
    """
    sums = state.wrapped(*share)
    pixels, means = step_sync.reduce(sums)
    objective = sums.out.total / pixels[0]
    if sums.aux is not None:
        objective = objective + state.criterion.aux_weight * sums.aux.total / pixels[1]
    state.scaler.scale(objective * weight).backward()
    return means


def _in_shares(
    state: TrainState, share: RankBatch, weight: Tensor | float, *, parts: int, step_sync: StepSync
) -> Tensor:
    """`_forward_backward` by virtual ranks: in parts, one at work at a time, one result."""

    device = share.images.device

    def work(part: RankBatch) -> Tensor:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread begins with the first one
        # Its backward pass must run in this very thread, which waits for the others in its midst.
        host = saved_on_host(device, state.model.parameters())
        with torch.autograd.set_multithreading_enabled(False), host:
            return _forward_backward(state, part, weight, step_sync=step_sync)

    return VirtualRanks(parts).run([partial(work, part) for part in share.split(parts)])[0]


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
    """The share of the step's valid pixels that lies in each pass, over all ranks."""
    if len(labels) == 1:
        return [1.0]
    weights = dist.all_reduce_sum(torch.stack([criterion.label_weight(label) for label in labels]))
    whole = weights.sum()
    return list(weights / torch.where(whole == 0, 1.0, whole))


def _dropout_masks(
    state: TrainState, config: Config, rows: Sequence[int], device: torch.device
) -> DropoutMasks:
    """This rank's rows of the masks that belong to the whole batch of this step."""
    channels = state.model.dropout_channels

    def mask(layer: int, width: int | None) -> Tensor | None:
        if width is None or config.model.dropout == 0:
            return None
        whole = seed.dropout_mask(
            config.seed,
            state.step,
            layer,
            batch_size=config.train.batch_size,
            channels=width,
            p=config.model.dropout,
        )
        mine = whole[list(rows)]
        # Only a copy from pinned memory lets the host run on.
        return mine.pin_memory().to(device, non_blocking=True) if device.type == "cuda" else mine

    return DropoutMasks(out=mask(0, channels.out), aux=mask(1, channels.aux))
