"""Running statistics of groups of images (`norm.images`): all layers of a model in one sum.

A layer with `images` remembers the batches that it has seen. `sync_running_stats` adds up what all
ranks have seen of them, and the layers follow. `make_groups` makes the process groups that layers
need, once.

A virtual rank is a thread that computes as one of several ranks would; a slot is its number in this
process, 0 without virtual ranks. They use one model, or each a replica of it whose layers have the
same buffers. A share is a part of the batch with a size of its own on any number of ranks
(`train.shares`); where there are shares, a slot computes one.
"""

from collections.abc import Sequence
from typing import NamedTuple, Self

import torch
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.passes import current
from segtrain.distributed.rank_sums import RANKS, RankSums
from segtrain.norm.group_sums import SeenBatch, contribution, move_from
from segtrain.norm.groups import groups_here
from segtrain.norm.sync import SyncBatchNorm


def make_groups(module: nn.Module) -> None:
    """Makes the process groups of all norm layers of `module` (collective over all ranks).

    Call it before training if layers have a `process_group`. Those with `images` need it inside of
    `placed`, and again whenever the positions of a rank change.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    # `dist.make_groups` joins what the ranks ask for.
    wanted = {layer.sharing_ranks() for layer in layers if layer.images is None}
    wanted |= {groups_here(layer.images).ranks for layer in layers if layer.images is not None}
    dist.make_groups(sorted(wanted - {None}))


class _LayerBatches(NamedTuple):
    """A layer, and what this rank has seen of its batches since they were followed last.

    by_slot: the batches of each slot (one, or one of each virtual rank) that has called the layer.
    """

    layer: SyncBatchNorm
    by_slot: dict[int, list[SeenBatch]]

    @classmethod
    def of(cls, replicas: Sequence[SyncBatchNorm]) -> Self:
        """Of a layer, the first, and its replicas, of which each slot has called one at most."""
        by_slot = {slot: seen for replica in replicas for slot, seen in replica._seen.items()}
        return cls(replicas[0], by_slot)

    @property
    def num_batches(self) -> int:
        """How many batches are summed; it must be the same number on all ranks.

        1 if no slot here has called the layer: zeros are sent, in case that other ranks have.
        """
        return max(map(len, self.by_slot.values()), default=1)

    def contributions(self, slot: int) -> list[Tensor]:
        """What a slot sends for each batch; zeros if it has not called the layer.

        (2 C + 2,) each: sums for mean and variance of C channels, their weight, and the number of
        groups (group_sums.py).

        Raises:
            RuntimeError: the momentum has changed since the forward pass.
        """
        layer, seen = self.layer, self.by_slot.get(slot, [])
        if any(batch.momentum != layer.momentum for batch in seen):
            raise RuntimeError(
                "the momentum has changed since the forward pass (torch.optim.swa_utils.update_bn "
                "does so); for statistics of many batches use segtrain.norm.precise_statistics"
            )
        zeros = layer.running_mean.new_zeros(2 * layer.num_features + 2, dtype=torch.float64)
        sent = [contribution(batch, layer.running, zeros) for batch in seen]
        # All slots must send equally many numbers.
        return sent + [zeros] * (self.num_batches - len(seen))


@torch.no_grad()
def sync_running_stats(module: nn.Module, *others: nn.Module, parts: RankSums = RANKS) -> None:
    """Lets the running statistics of groups of images follow the last batches (collective).

    One all_reduce for all layers and all batches since the last call (with shares, a gather); none
    if there is no such layer, or inside `untracked`. All ranks end with the same bits.

    A layer that is called several times must be called equally often on all ranks. One that is
    called once may be left out on some ranks, if its groups lie inside of single ranks.

    Two layers of 3 and 5 channels, called once each: a rank sends 2 * 3 + 2 and 2 * 5 + 2 numbers,
    20 together.

    others: replicas of `module`, which share its buffers.
    parts: what is added up. Those of `Shares` are gathered and added in the order of the shares,
        so the sums are the same bits on any number of ranks.
    """
    of_all = zip(module.modules(), *(other.modules() for other in others), strict=True)
    with_replicas = [layers for layers in of_all if _has_groups(layers[0])]
    if not with_replicas or not current().tracked:
        return
    of_layers = [_LayerBatches.of(layers) for layers in with_replicas]
    num_slots = 1 + max((slot for seen in of_layers for slot in seen.by_slot), default=0)
    # Every slot sends the same numbers of values: layer after layer, and of each batch after batch.
    rows = [
        torch.cat([part for seen in of_layers for part in seen.contributions(slot)])
        for slot in range(parts.slots(num_slots))
    ]
    total = parts.sum(rows)

    # In the order of the numbers in a row; a layer that was called twice is here twice.
    layers = [seen.layer for seen in of_layers for _ in range(seen.num_batches)]
    sizes = [2 * layer.num_features + 2 for layer in layers]
    for layer, part in zip(layers, total.split(sizes), strict=True):
        move = move_from(part, layer.running)
        layer.move_running(move.mean, move.unbiased_var, move.batches, move.weight)
    for replicas in with_replicas:
        for layer in replicas:
            layer._seen.clear()


def _has_groups(layer: nn.Module) -> bool:
    """Whether running statistics of groups of images are to follow."""
    is_grouped = isinstance(layer, SyncBatchNorm) and layer.images is not None
    return is_grouped and layer.running_mean is not None


def forget_batches(module: nn.Module) -> None:
    """Drops the batches that running statistics have not followed yet: their pass has failed."""
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            layer._seen.clear()
