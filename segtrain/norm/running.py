"""Running statistics of groups of images (`norm.images`): all layers of a model in one sum.

A layer with `images` remembers the batches that it has seen. `sync_running_stats` adds up what all
ranks have seen of them, and the layers follow.
"""

import torch
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.passes import current
from segtrain.distributed.shares import Shares
from segtrain.norm.groups import groups_here
from segtrain.norm.sync import SeenBatch, SyncBatchNorm


def make_groups(module: nn.Module) -> None:
    """Makes the process groups of all norm layers of `module` (collective over all ranks).

    Call it before training if layers have a `process_group`. Those with `images` need it inside of
    `placed`, and again where images lie elsewhere.
    """
    layers = [layer for layer in module.modules() if isinstance(layer, SyncBatchNorm)]
    wanted = {layer.sharing_ranks() for layer in layers if layer.images is None}
    wanted |= {groups_here(layer.images).ranks for layer in layers if layer.images is not None}
    dist.make_groups(sorted(wanted - {None}))


@torch.no_grad()
def sync_running_stats(module: nn.Module, *others: nn.Module, shares: Shares | None = None) -> None:
    """Lets the running statistics of groups of images follow the last batches (collective).

    One all_reduce for all layers and all batches since the last call; none if there is no such
    layer, or inside `untracked`. All ranks end with the same bits. A rank may have left out a layer
    that shares nothing with others; if it is called several times, then by all equally often.

    others: replicas of `module`, which share its buffers.
    shares: those of the run, if each slot of this rank computes one share; then the sums are the
        same bits on any number of ranks.
    """
    layers_of_all = zip(module.modules(), *(other.modules() for other in others), strict=True)
    # Of each layer that has anything to follow: itself, then its replicas.
    replicas = [
        layers
        for layers in layers_of_all
        if isinstance(layers[0], SyncBatchNorm)
        and layers[0].images is not None
        and layers[0].running_mean is not None
    ]
    if not replicas or not current().tracked:
        return
    # Of each layer, by slot: the batches that it has seen. A slot calls one replica only.
    seen = [
        {slot: batches for layer in layers for slot, batches in layer._seen.items()}
        for layers in replicas
    ]
    if shares is None:
        num_slots = 1 + max((slot for of_slot in seen for slot in of_slot), default=0)
    else:
        num_slots = shares.counts[dist.rank()]
    # All slots on all ranks send equally much: for each layer, one contribution per batch. Slots
    # that have not called a layer send zeros.
    rows: list[list[Tensor]] = [[] for _ in range(num_slots)]
    owners: list[SyncBatchNorm] = []  # of each contribution in a row
    for (layer, *_), of_slot in zip(replicas, seen, strict=True):
        # Of a layer that no slot here has called: one batch of zeros, as other ranks send one.
        num_batches = max(map(len, of_slot.values()), default=1)
        owners += [layer] * num_batches
        for slot, row in enumerate(rows):
            batches: list[SeenBatch | None] = [*of_slot.get(slot, [])]
            batches += [None] * (num_batches - len(batches))
            row += [layer._contribution(batch) for batch in batches]
    parts = [torch.cat(row) for row in rows]
    total = dist.all_reduce_sum(sum(parts)) if shares is None else shares.sum(torch.stack(parts))
    sizes = [2 * layer.num_features + 2 for layer in owners]
    for layer, part in zip(owners, total.split(sizes), strict=True):
        layer._follow_groups(part)
    for layers in replicas:
        for layer in layers:
            layer._seen.clear()


def forget_batches(module: nn.Module) -> None:
    """Drops the batches that running statistics have not followed yet: their pass has failed."""
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm):
            layer._seen.clear()
