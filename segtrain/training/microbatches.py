"""The gradient of a step: forward and backward passes over the images of all ranks.

A step has `train.accumulate_steps` microbatches. A rank computes its part of a microbatch at once,
or cuts it again: into shares, or for virtual ranks.
"""

from collections.abc import Sequence
from contextlib import nullcontext
from functools import partial
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor, nn

from segtrain import seed
from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed.offload import saved_on_host
from segtrain.distributed.partition import microbatch_parts, partition
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.norm import placed, sync_running_stats, tracked_together, untracked
from segtrain.training.measure import BACKWARD, FORWARD, span
from segtrain.training.state import TrainState
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch, DropoutMasks


class LocalMicrobatch(NamedTuple):
    """This rank's part of one microbatch."""

    images: Tensor  # (n, C, H, W) as stored
    labels: Tensor  # (S, n, H, W) uint8; S is 2 if MixUp has mixed in images with labels, else 1
    dropout: DropoutMasks  # of these n images
    shown: Tensor | None = None  # (n,) int64, as in `Batch`

    def split(self, sizes: Sequence[int]) -> list["LocalMicrobatch"]:
        """The images in contiguous parts of these sizes."""

        def cut(images: range) -> LocalMicrobatch:
            part = slice(images.start, images.stop)
            masks = (None if mask is None else mask[part] for mask in self.dropout)
            shown = None if self.shown is None else self.shown[part]
            tensors = self.images[part], self.labels[:, part]
            return LocalMicrobatch(*tensors, DropoutMasks(*masks), shown)

        ends = list(accumulate(sizes))
        return [cut(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


def local_microbatches(
    state: TrainState,
    batches: Sequence[Batch],
    indices: Sequence[Sequence[int]],
    config: Config,
    device: torch.device,
) -> list[LocalMicrobatch]:
    """This rank's parts of a step's microbatches on `device`, with their dropout masks.

    indices: of each microbatch, the positions in the whole batch that this rank trains on.
    """
    parts = []
    for batch, positions in zip(batches, indices, strict=True):
        label_sets = [batch.labels]
        if batch.partner_labels is not None:
            label_sets.append(batch.partner_labels)
        images, *label_sets = (t.to(device, non_blocking=True) for t in (batch.images, *label_sets))
        masks = _dropout_masks(state, config, positions, device)
        shown = None
        if state.sample_losses is not None and batch.shown is not None:
            shown = batch.shown.to(device, non_blocking=True)
        parts.append(LocalMicrobatch(images, torch.stack(label_sets), masks, shown))
    return parts


def accumulate_gradients(
    state: TrainState, parts: list[LocalMicrobatch], config: Config, step_sync: StepSync
) -> Tensor:
    """Adds up the gradient of a step; returns the mean losses (2,) of all ranks (collective)."""
    cut = [_sizes(state, config, i, len(part.images)) for i, part in enumerate(parts)]
    weights = _loss_weights(state, parts, cut, config)
    losses = torch.zeros(2, dtype=torch.float64, device=parts[0].images.device)
    everywhere = microbatch_parts(config.train, state.split)
    for part, sizes, weight in zip(parts, cut, weights, strict=True):
        # All ranks add their gradients once a step, during the last backward pass.
        collected = state.gradients.collected(last=part is parts[-1])
        with placed(everywhere), collected, tracked_together():
            means = _cut_and_computed(state, state.wrapped, part, sizes, weight, step_sync)
        losses += (means * weight.unsqueeze(1)).sum(0)
        sync_running_stats(*(state.replicas or [state.model]), shares=state.shares)
    return losses


def compute_alone(state: TrainState, part: LocalMicrobatch, sizes: list[int]) -> None:
    """Forward and backward pass of a microbatch of this rank only, as a step computes it.

    Nothing is exchanged and nothing stays: no gradient, no statistic. For measurements.

    sizes: of the parts that are computed apart; with groups of images, each has whole ones.
    """
    # What is compiled waits for all ranks.
    module = getattr(state.wrapped, "_orig_mod", state.wrapped)
    weight = torch.ones(len(part.labels), dtype=torch.float64, device=part.images.device)
    step_sync = StepSync(lambda: False)
    with dist.alone(), untracked(), placed([sizes] * dist.world_size()):
        _cut_and_computed(state, module, part, sizes, weight, step_sync)
    for one in (state.model, *state.replicas):
        one.zero_grad(set_to_none=True)


def _cut_and_computed(
    state: TrainState,
    module: nn.Module,
    part: LocalMicrobatch,
    sizes: list[int],
    weight: Tensor,
    step_sync: StepSync,
) -> Tensor:
    """As `_forward_backward`, in parts of these sizes."""
    if len(sizes) == 1 and state.shares is None:
        return _forward_backward(state, module, part, weight, step_sync=step_sync)
    return _in_threads(state, part.split(sizes), weight, step_sync=step_sync)


def _forward_backward(
    state: TrainState,
    module: nn.Module,
    part: LocalMicrobatch,
    weight: Tensor,
    *,
    step_sync: StepSync,
) -> Tensor:
    """Adds the gradient of a part of a microbatch; returns the mean losses (S, 2) of all parts.

    module: `state.wrapped` or a replica.
    weight: that of the microbatch, (S,), from `_loss_weights`.
    """
    criterion = state.criterion
    with span(FORWARD):
        images = state.normalize(part.images.contiguous(memory_format=state.memory_format))
        on_logits = None
        if part.shown is not None:
            on_logits = partial(state.sample_losses.add, state.step, part.shown)
        sums = module(images, part.labels.long(), part.dropout, on_logits)
        totals = step_sync.reduce(sums)
        pairs = zip(sums, totals, strict=True)
        objectives = torch.stack([criterion.objective(*pair) for pair in pairs])
        means = torch.stack([criterion.means(total) for total in totals])
    with span(BACKWARD):
        state.scaler.scale((objectives * weight).sum()).backward()
    return means


def _in_threads(
    state: TrainState, parts: list[LocalMicrobatch], weight: Tensor, *, step_sync: StepSync
) -> Tensor:
    """As `_forward_backward`, for parts that are computed apart: shares, or virtual ranks."""
    device = parts[0].images.device

    def work(module: nn.Module, part: LocalMicrobatch) -> Tensor:
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


def _sizes(state: TrainState, config: Config, index: int, num_images: int) -> list[int]:
    """The sizes of the parts in which this rank computes its `num_images` of a microbatch."""
    train = config.train
    if state.shares is not None:
        whole = partition(train.batch_size, train.accumulate_steps, index)
        return state.shares.sizes(len(whole))
    parts = train.virtual_ranks
    return [len(partition(num_images, parts, i)) for i in range(parts)]


def _loss_weights(
    state: TrainState, parts: list[LocalMicrobatch], cut: list[list[int]], config: Config
) -> list[Tensor]:
    """What the mean losses of each microbatch count in the loss of the step, (S,) (collective).

    With MixUp the loss of a step is (1 - m) loss(labels) + m loss(partners' labels), as in the
    paper (arXiv:1710.09412) and in MosaicML's composer, and each of both weighs the microbatches by
    its own valid pixels.

    cut: for each microbatch, the sizes of the parts that are computed apart.
    """
    factors = [1.0]
    if len(parts[0].labels) == 2:
        mixed = seed.mixup_weight(config.seed, state.step, config.augment.mixup_alpha) / 256
        factors = [1 - mixed, mixed]
    weights = [
        factor * _microbatch_weights(state, labels, cut)
        for factor, *labels in zip(factors, *(part.labels for part in parts), strict=True)
    ]
    return list(torch.stack(weights, 1))


def _microbatch_weights(
    state: TrainState, labels: Sequence[Tensor], cut: list[list[int]]
) -> Tensor:
    """The fraction of the step's valid pixels, over all ranks, that lies in each microbatch, (M,).

    labels: of this rank, in each microbatch; cut: as in `_loss_weights`.
    """
    if len(labels) == 1:
        return torch.ones(1, dtype=torch.float64, device=labels[0].device)
    weight = state.criterion.label_weight
    if state.shares is None:
        weights = dist.all_reduce_sum(torch.stack([weight(one.long()) for one in labels]))
    else:
        parts = [one.split(sizes) for one, sizes in zip(labels, cut, strict=True)]
        shares = zip(*parts, strict=True)  # the labels of each in all microbatches
        weights = [torch.stack([weight(label.long()) for label in share]) for share in shares]
        weights = state.shares.sum(torch.stack(weights))
    whole = weights.sum()
    return weights / torch.where(whole == 0, 1.0, whole)


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
