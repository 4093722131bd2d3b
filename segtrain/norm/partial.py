"""Batch norm over groups of ranks, with running statistics of all ranks."""

from collections.abc import Iterator
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.norm.functional import Moments
from segtrain.norm.kernels import packed, unbiased, unpacked_moments
from segtrain.norm.sync import SyncBatchNorm2d, is_tracked

Running = Literal["rank0", "mean", "pooled"]


class PartialBatchNorm2d(SyncBatchNorm2d):
    """Batch norm whose training statistics are those of a group of ranks.

    Each group normalizes by its own values, so the result depends on the number of ranks. The
    running statistics are the same on all ranks: call `sync_running_stats` after every backward
    pass, which merges the groups' batches into them. Evaluation before that is a RuntimeError.

    Args:
        extent: the ranks of a group: this many neighbours (1: each rank alone), or "node" for the
            ranks of one machine.
        running: what the running statistics track. "rank0": rank 0's group, as the broadcast of
            buffers by DistributedDataParallel does; "mean": the average of means and of variances
            over the groups; "pooled": mean and variance of all values together, as full
            synchronization does.

    All else is as in SyncBatchNorm, but there is no `process_group`, and a group of one rank
    refuses one value per channel, as nn.BatchNorm2d does.
    """

    def __init__(
        self,
        num_features: int,
        *args: Any,
        extent: int | Literal["node"] = 1,
        running: Running = "pooled",
        **kwargs: Any,
    ) -> None:
        super().__init__(num_features, *args, **kwargs)
        if self.process_group is not None:
            raise TypeError("PartialBatchNorm2d has no process_group: its groups follow `extent`")
        self.extent = extent
        self.running = running
        self._seen: list[Moments] = []

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, H, W) normalized (collective over the group in training)."""
        if not self.training or dist.world_size() == 1 or len(self.sharing_ranks()) > 1:
            return super().forward(input)
        self._check_input_dim(input)
        dtype = torch.promote_types(input.dtype, torch.float32)
        mean, var = torch.zeros(2, self.num_features, dtype=dtype, device=input.device)
        count = input.numel() // self.num_features
        # With a momentum of 1 the kernel writes the statistics of the batch into the buffers. In
        # training it refuses a batch without values.
        y = F.batch_norm(input, mean, var, self.weight, self.bias, count > 0, 1.0, self.eps)
        biased = var * (max(count - 1, 0) / max(count, 1))
        # Not from a list, for whose copy the host would wait for the device.
        counted = torch.full((), count, dtype=torch.float64, device=mean.device)
        # Also without values: when statistics are merged all ranks must have as many batches.
        self._track(Moments(mean, biased, counted))
        return y

    def _evaluate(self, input: Tensor) -> Tensor:
        if self._seen:
            raise RuntimeError(
                f"{len(self._seen)} batches have not reached the running statistics: call "
                "sync_running_stats(model) on all ranks after every backward pass"
            )
        return super()._evaluate(input)

    def _track(self, moments: Moments) -> None:
        if dist.world_size() == 1:
            super()._track(moments)
        elif self.running_mean is not None and is_tracked():
            self._seen.append(moments)

    def sharing_ranks(self) -> tuple[int, ...]:
        """The ranks that share statistics with this one."""
        if self.extent == "node":
            return dist.node_ranks()
        first = dist.rank() // self.extent * self.extent
        return tuple(range(first, min(first + self.extent, dist.world_size())))

    def _contributions(self) -> Iterator[Tensor]:
        """For each batch, what this rank adds to the sum over all ranks, (2 C + 1,)."""
        # The first rank of a group speaks for it.
        leads = self.sharing_ranks()[0] == dist.rank()
        counts_in = leads and (self.running != "rank0" or dist.rank() == 0)
        for mean, var, count in self._seen:
            if self.running == "pooled":
                part = packed(mean, var, 1) * count
            else:
                # A group without values does not count.
                ones = mean.new_ones(1)
                part = torch.cat([mean, unbiased(var, count), ones]).double() * (count >= 1)
            yield part if counts_in else torch.zeros_like(part)

    def _merge(self, total: Tensor) -> None:
        """Takes in one batch, given the sum of all ranks' contributions."""
        if self.running == "pooled":
            mean, var, count = unpacked_moments(total)
            var = unbiased(var, count)
        else:
            count = total[-1]  # the number of groups with values
            mean, var = (total[:-1] / count.clamp(min=1)).view(2, -1)
        self._update(mean, var, seen=count >= 1)


@torch.no_grad()
def sync_running_stats(module: nn.Module) -> None:
    """Updates the running statistics of partial batch norms (collective).

    One all_reduce for all layers and all batches since the last call; none if there is no such
    layer. All ranks end with the same bits.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, PartialBatchNorm2d)]
    layers = [layer for layer in layers if layer._seen]
    parts = [(layer, part) for layer in layers for part in layer._contributions()]
    if not parts:
        return
    totals = dist.all_reduce_sum(torch.cat([part for _, part in parts]))
    sizes = [part.numel() for _, part in parts]
    for (layer, _), total in zip(parts, totals.split(sizes), strict=True):
        layer._merge(total)
    for layer in layers:
        layer._seen.clear()
