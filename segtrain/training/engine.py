"""The training step, and the loop of steps; the command logs, evaluates and saves."""

import time
from collections.abc import Collection, Iterable, Iterator, Sequence
from contextlib import nullcontext
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segtrain import seed
from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed.offload import saved_on_host
from segtrain.distributed.partition import partition
from segtrain.distributed.shares import Shares
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.models.normalize import Normalize
from segtrain.models.precision import dtype_of
from segtrain.norm import settle_statistics, untracked
from segtrain.training import sam
from segtrain.training.arithmetic import fingerprint
from segtrain.training.exact_sum import ExactGradientSum, replica
from segtrain.training.gradients import GradientSum
from segtrain.training.losses import SegLoss
from segtrain.training.optim import (
    Start,
    WeightAverage,
    build_optimizer,
    freeze_layers,
    learning_rate,
    make_start,
    momentum,
    set_learning_rate,
    set_momentum,
)
from segtrain.training.share_rules import refuse_layers, watch
from segtrain.training.step_sync import StepSync
from segtrain.training.wrap import share_weights, wrap
from segtrain.types import Batch, DropoutMasks


class StepResult(NamedTuple):
    """What a step leaves behind; tensors stay on the device until they are logged.

    loss, aux_loss: () float64, means over the valid pixels of all ranks; aux_loss is NaN without an
        auxiliary head. With SAM those of the first gradient; what follows is of the second.
    gradients: with train.shares, `ExactGradientSum.digest`; otherwise None.
    """

    step: int  # updates done so far, 1 .. train.steps
    loss: Tensor
    aux_loss: Tensor
    grad_norm: Tensor  # () of all gradients together, before clipping
    lr: float  # the backbone's
    data_s: float  # seconds the step waited for the loader
    gradients: Tensor | None = None


class RankBatch(NamedTuple):
    """This rank's part of one pass."""

    images: Tensor  # (n, 3, H, W) uint8
    labels: Tensor  # (n, H, W) uint8
    dropout: DropoutMasks  # of these n images
    partner_labels: Tensor | None = None  # as `labels`, of the images that MixUp has mixed in

    @property
    def label_sets(self) -> list[Tensor]:
        """The labels, and those of the images mixed in."""
        return [self.labels] if self.partner_labels is None else [self.labels, self.partner_labels]

    def split(self, sizes: Sequence[int]) -> list["RankBatch"]:
        """The images in contiguous parts of these sizes."""

        def cut(images: range) -> RankBatch:
            part = slice(images.start, images.stop)
            masks = (None if mask is None else mask[part] for mask in self.dropout)
            labels, *partners = (labels[part] for labels in self.label_sets)
            return RankBatch(self.images[part], labels, DropoutMasks(*masks), *partners)

        ends = list(accumulate(sizes))
        return [cut(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


@dataclass
class TrainState:
    """Everything that an update changes: the contents of a checkpoint."""

    model: nn.Module
    normalize: nn.Module
    memory_format: torch.memory_format  # of images in the model
    criterion: SegLoss
    wrapped: nn.Module  # both as one module, compiled if the config says so
    shares: Shares | None  # train.shares
    arithmetic: str | None  # `arithmetic.fingerprint` of this rank, with shares
    replicas: list[nn.Module]  # of `wrapped`, one for each share of this rank
    gradients: GradientSum | ExactGradientSum
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: WeightAverage | None
    start: Start  # what updates need of the weights that training started from
    step: int = 0  # updates done

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and deploy: the average of the weights where one is kept."""
        return self.model if self.average is None else self.average.model


def make_state(
    model: nn.Module,
    config: Config,
    device: torch.device,
    *,
    loaded: Collection[str] | None = None,
    resumed: bool = False,
) -> TrainState:
    """The state before the first step, with `model` moved to `device` (collective).

    loaded: the names of the weights that come from a file; None: all. The others are new layers.
    resumed: a checkpoint is going to be restored, with what depends on the weights at the start.

    Raises:
        ConfigError: train.layers or train.hold_mask do not fit the model.
    """
    train = config.train
    freeze_layers(model, train, None if resumed else loaded)
    # Also where channels_last is off: the loader's images have that layout, and convolutions would
    # follow it.
    layout = torch.channels_last if train.channels_last else torch.contiguous_format
    model.to(device, dtype_of(train))
    if train.channels_last:
        model.to(memory_format=layout)
    share_weights(model)
    start = make_start(model, train, loaded, resumed=resumed)
    if train.sam_rho is not None:
        sam.refuse_layers(model)
    normalize = Normalize(config.data.mean, config.data.std).to(device, dtype_of(train))
    sizes = {"passes": train.accumulate_steps, "batch_size": train.batch_size}
    criterion = SegLoss(config.loss, device, **sizes)
    wrapped = wrap(model, criterion, train)
    # Virtual ranks have a backward pass each, so their gradients wait for the end.
    gradients = GradientSum(model.named_parameters(), overlap=train.virtual_ranks == 1)
    shares, replicas, digits = None, [], None
    if train.shares is not None:
        refuse_layers(model)
        shares = Shares.of_this_rank(train.shares, device)
        digits = fingerprint(device, train)
        replicas = [replica(wrapped).train() for _ in range(shares.counts[dist.rank()])]
        gradients = ExactGradientSum(
            model,
            replicas,
            shares=shares.counts,
            passes=train.accumulate_steps,
            num_threads=shares.at_once,
        )
    scaler = torch.amp.GradScaler(device.type, enabled=train.precision == "float16")
    scaler.scale(torch.zeros((), device=device))  # makes its tensors; shares would do it at once
    return TrainState(
        model=model,
        normalize=normalize,
        memory_format=layout,
        criterion=criterion,
        wrapped=wrapped,
        shares=shares,
        arithmetic=digits,
        replicas=replicas,
        gradients=gradients,
        optimizer=build_optimizer(model, train, start=start, loaded=loaded),
        scaler=scaler,
        average=WeightAverage(model, train.ema_decay) if train.ema_decay else None,
        start=start,
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

    Ends early, after the same step on all ranks, if `step_sync` was asked to stop or end.

    Args:
        batches: this rank's Batch of every pass of every step, in order.
        indices: of each pass, the positions in the whole batch that this rank trains on.

    Raises:
        NonFiniteError: the loss or the gradient of the step before was not finite.
    """
    train = config.train
    batches = iter(batches)
    state.model.train()
    first_with_shares = state.shares is not None

    while state.step < train.steps and not (step_sync.stopped or step_sync.ended):
        began = time.perf_counter()
        passes = list(islice(batches, train.accumulate_steps))
        data_s = time.perf_counter() - began

        parts = []
        for batch, positions in zip(passes, indices, strict=True):
            images, labels = (t.to(device, non_blocking=True) for t in batch[:2])
            partners = batch.partner_labels
            if partners is not None:
                partners = partners.to(device, non_blocking=True)
            masks = _dropout_masks(state, config, positions, device)
            parts.append(RankBatch(images, labels, masks, partners))
        with watch(state.model) if first_with_shares else nullcontext():
            losses = _run_passes(state, parts, config, step_sync)
        first_with_shares = False
        while not state.gradients.finish():
            with untracked():
                losses = _run_passes(state, parts, config, step_sync)

        if sam.is_due(train, state.step):
            with sam.climbed(state.model.parameters(), train.sam_rho):
                _run_passes(state, parts, config, step_sync)
                while not state.gradients.finish():
                    _run_passes(state, parts, config, step_sync)

        digest = state.gradients.digest()
        lr = learning_rate(train, state.step)
        set_momentum(state.optimizer, momentum(train, state.step))
        grad_norm = _update(state, lr, train.clip_grad_norm)
        step_sync.record(state.step, grad_norm, [name for batch in passes for name in batch.names])
        yield StepResult(state.step, losses[0], losses[1], grad_norm, lr, data_s, digest)


def _run_passes(
    state: TrainState, parts: list[RankBatch], config: Config, step_sync: StepSync
) -> Tensor:
    """Runs the passes of a step; returns the mean losses (2,) of all ranks (collective)."""
    cut = [_sizes(state, config, i, len(part.images)) for i, part in enumerate(parts)]
    weights = _loss_weights(state, parts, cut, config)
    losses = torch.zeros(2, dtype=torch.float64, device=parts[0].images.device)
    for i, (part, sizes) in enumerate(zip(parts, cut, strict=True)):
        # All ranks add their gradients once a step, during the last backward pass.
        with state.gradients.collected(last=i + 1 == len(parts)):
            if len(sizes) == 1 and state.shares is None:
                means = _forward_backward(
                    state, state.wrapped, part, weights[i], step_sync=step_sync
                )
            else:
                means = _in_threads(state, part.split(sizes), weights[i], step_sync=step_sync)
        losses += means * weights[i] if part.partner_labels is None else weights[i] @ means
        settle_statistics(state.model)
    return losses


def _forward_backward(
    state: TrainState,
    module: nn.Module,
    part: RankBatch,
    weight: Tensor | float,
    *,
    step_sync: StepSync,
) -> Tensor:
    """Adds the gradient of a part of a pass; returns the mean losses (2,) of the whole pass.

    module: `state.wrapped` or a replica.
    weight: that of the pass, from `_loss_weights`. With MixUp there is one for each set of labels,
        and so are mean losses, (2, 2).
    """
    images = state.normalize(part.images.contiguous(memory_format=state.memory_format))
    labels, *partners = (labels.long() for labels in part.label_sets)
    sums = module(images, labels, part.dropout, *partners)
    totals = step_sync.reduce(sums)
    criterion = state.criterion
    if not partners:
        state.scaler.scale(criterion.objective(sums, totals) * weight).backward()
        return criterion.means(totals)
    pairs = zip(sums, totals, strict=True)
    objectives = torch.stack([criterion.objective(*pair) for pair in pairs])
    state.scaler.scale((objectives * weight).sum()).backward()
    return torch.stack([criterion.means(total) for total in totals])


def _in_threads(
    state: TrainState, parts: list[RankBatch], weight: Tensor | float, *, step_sync: StepSync
) -> Tensor:
    """As `_forward_backward`, for parts that are computed apart: shares, or virtual ranks."""
    device = parts[0].images.device

    def work(module: nn.Module, part: RankBatch) -> Tensor:
        if device.type == "cuda":
            torch.cuda.set_device(device)  # a new thread begins with device 0
        # Virtual ranks save memory: what their backward passes need waits on the host.
        on_host = nullcontext()
        if state.shares is None:
            on_host = saved_on_host(device, state.model.parameters())
        # In the middle of its backward pass this thread waits for the others: autograd must run in
        # it, and not in the one thread that it has for each device.
        with torch.autograd.set_multithreading_enabled(False), on_host:
            return _forward_backward(state, module, part, weight, step_sync=step_sync)

    run, modules = VirtualRanks(len(parts)).run, [state.wrapped] * len(parts)
    if state.shares is not None:
        run, modules = state.shares.run, state.replicas
    return run([partial(work, *pair) for pair in zip(modules, parts, strict=True)])[0]


def _update(state: TrainState, lr: float, clip_grad_norm: float | None) -> Tensor:
    """Moves the weights by the gradients, which it frees; returns the gradients' norm ()."""
    set_learning_rate(state.optimizer, lr)
    state.scaler.unscale_(state.optimizer)
    state.start.hold_gradients()
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


def _sizes(state: TrainState, config: Config, index: int, num_images: int) -> list[int]:
    """The sizes of the parts in which this rank computes its `num_images` of a pass."""
    train = config.train
    if state.shares is not None:
        whole = partition(train.batch_size, train.accumulate_steps, index)
        return state.shares.sizes(len(whole))
    parts = train.virtual_ranks
    return [len(partition(num_images, parts, i)) for i in range(parts)]


def _loss_weights(
    state: TrainState, parts: list[RankBatch], cut: list[list[int]], config: Config
) -> list[Tensor | float]:
    """What the mean losses of each pass count in the loss of the step (collective).

    With MixUp (2,) float64: that of the labels and that of the partners' labels. The loss of a step
    is (1 - m) loss(labels) + m loss(partners' labels), as in the paper (arXiv:1710.09412) and in
    MosaicML's composer, and each of both weighs the passes by its own valid pixels.

    cut: for each pass, the sizes of the parts that are computed apart.
    """
    if parts[0].partner_labels is None:
        return _pass_weights(state, [part.labels for part in parts], cut)
    mixed = seed.mixup_weight(config.seed, state.step, config.augment.mixup_alpha) / 256
    sets = zip(*(part.label_sets for part in parts), strict=True)
    whole = parts[0].images.new_ones((), dtype=torch.float64)
    own, partners = (
        [factor * whole * weight for weight in _pass_weights(state, labels, cut)]
        for factor, labels in zip((1 - mixed, mixed), sets, strict=True)
    )
    return [torch.stack(pair) for pair in zip(own, partners, strict=True)]


def _pass_weights(
    state: TrainState, labels: Sequence[Tensor], cut: list[list[int]]
) -> list[Tensor | float]:
    """The fraction of the step's valid pixels, over all ranks, that lies in each pass.

    labels: of this rank, in each pass.
    cut: for each pass, the sizes of the parts that are computed apart.
    """
    if len(labels) == 1:
        return [1.0]
    weight = state.criterion.label_weight
    if state.shares is None:
        weights = [weight(one.long()) for one in labels]
        weights = dist.all_reduce_sum(torch.stack(weights))
    else:
        passes = [one.split(sizes) for one, sizes in zip(labels, cut, strict=True)]
        shares = zip(*passes, strict=True)  # the labels of each in all passes
        weights = [torch.stack([weight(label.long()) for label in share]) for share in shares]
        weights = state.shares.sum(torch.stack(weights))
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
