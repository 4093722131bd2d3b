"""How long NCCL takes for the small messages of batch norm: a model, nothing here is measured.

The constants and formulas are those by which NCCL itself chooses an algorithm: NVIDIA/nccl, commit
5067397c, src/graph/tuning.cc, protocol LL, NVLink within a node, without the latency that it adds
for particular networks. Left out are kernel launches and ranks that come late; bytes count for
gathers only, whose results grow with the number of ranks.
"""

from typing import NamedTuple

# Microseconds of any collective, by algorithm.
_TREE_BASE_US = 6.8
_RING_BASE_US = 6.6
# Microseconds a step: over NVLink, and the same in a ring that also crosses the network, whose
# overhead bounds it below (that of Intel hosts; NCCL takes 2 on AMD's).
_NVLINK_US = 0.6
_NVLINK_BESIDE_NETWORK_US = 1.0
# Microseconds a step between nodes.
_TREE_NETWORK_US = 5.0
_RING_NETWORK_US = 2.7

# Assumed for what a rank receives of a gather: 25 GB/s.
GATHER_BYTES_PER_US = 25e3

# PSPNet-R50 with the deep stem: batch norms, the sum of their channels, and the collectives left
# each way when layers that run side by side share theirs (tests/test_collectives.py).
NUM_LAYERS = 61
NUM_CHANNELS = 29_568
NUM_SHARED = 53


def all_reduce_us(gpus: int, *, gpus_per_node: int = 8) -> float:
    """Microseconds of an all_reduce of a few kilobytes: the faster of tree and ring."""
    nodes = _num_nodes(gpus, gpus_per_node)
    within = gpus // nodes - 1
    depth = nodes.bit_length() - 1
    tree = _TREE_BASE_US + 2 * (within * _NVLINK_US + depth * _TREE_NETWORK_US)
    return min(tree, _ring_us(gpus, nodes, rounds=2))


def all_gather_us(gpus: int, *, gpus_per_node: int = 8) -> float:
    """Microseconds of an all_gather, bytes apart: a ring.

    NCCL has no other algorithm for it where several GPUs share a node, unless the network helps.
    """
    return _ring_us(gpus, _num_nodes(gpus, gpus_per_node), rounds=1)


def _ring_us(gpus: int, nodes: int, *, rounds: int) -> float:
    within_us = _NVLINK_US if nodes == 1 else _NVLINK_BESIDE_NETWORK_US
    one_round = (gpus - nodes) * within_us + (nodes - 1) * _RING_NETWORK_US
    return _RING_BASE_US + rounds * one_round


def _num_nodes(gpus: int, gpus_per_node: int) -> int:
    if gpus > gpus_per_node and gpus % gpus_per_node:
        raise ValueError(f"gpus: {gpus} do not fill nodes of {gpus_per_node}")
    return max(1, gpus // gpus_per_node)


class IterationCost(NamedTuple):
    """Communication for the statistics of one training iteration of PSPNet-R50.

    gathered: torch.nn.SyncBatchNorm, an all_gather forward and an all_reduce backward; reduced: one
    all_reduce each way; shared: likewise with one collective for layers that run side by side;
    groups_of_8: `reduced` within each node. All in milliseconds.
    gathered_mb: megabytes that each rank receives in the forward pass of `gathered`.
    """

    gathered: float
    reduced: float
    shared: float
    groups_of_8: float
    gathered_mb: float


def iteration_cost(gpus: int) -> IterationCost:
    """The model for `gpus`, eight to a node."""
    reduce_us, gather_us = all_reduce_us(gpus), all_gather_us(gpus)
    # Mean, inverse deviation and count of every rank, in float32.
    gathered_bytes = (2 * NUM_CHANNELS + NUM_LAYERS) * 4 * gpus
    gathered_us = NUM_LAYERS * (gather_us + reduce_us) + gathered_bytes / GATHER_BYTES_PER_US
    return IterationCost(
        gathered=gathered_us / 1e3,
        reduced=2 * NUM_LAYERS * reduce_us / 1e3,
        shared=2 * NUM_SHARED * reduce_us / 1e3,
        groups_of_8=2 * NUM_LAYERS * all_reduce_us(min(gpus, 8)) / 1e3,
        gathered_mb=gathered_bytes / 1e6,
    )
