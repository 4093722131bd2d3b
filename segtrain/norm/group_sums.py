"""What the running statistics of groups of images follow: a sum over all ranks.

The config key `norm.running` chooses one of four rules. Each part of a batch (a rank, or a virtual
rank) adds a `contribution`; `move_from` tells from the sum where the running statistics go.
"""

from typing import Literal, NamedTuple

import torch
from torch import Tensor

from segtrain.norm.functional import Moments
from segtrain.norm.kernels import packed, unbiased, unpacked_moments

Running = Literal["pooled", "mean", "first", "sequential"]


class SeenBatch(NamedTuple):
    """A batch in groups, as one part of it has seen it."""

    num_groups: int  # in the whole batch
    led: dict[int, Moments]  # of the groups that begin in this part, by their number in the batch
    momentum: float | None  # of the layer in that forward pass


class Move(NamedTuple):
    """How running statistics follow a batch; see SyncBatchNorm.move_running."""

    mean: Tensor
    unbiased_var: Tensor
    batches: Tensor
    weight: Tensor | None = None


def contribution(batch: SeenBatch, running: Running, zeros: Tensor) -> Tensor:
    """What a part adds to the sum, (2 C + 2,) float64.

    Only groups whose first image is in this part count here. A group with mean m (C,), biased
    variance v, unbiased variance u, and n values per channel adds

        pooled:      [n m, n (v + m^2), n, 1]
        mean:        [m, u, 1, 1]
        first:       the same if it is the first group of all, else [0, 0, 0, 1]
        sequential:  [w m, w u, w, 1] with w = (1 - momentum)^(number of groups after it),
                     1 without momentum

    and zeros if it has no values; sequential still counts it among the groups after others. So the
    last element is the number of groups with values.

    Two groups of one channel in one part: values 1 and 3, then 5 and 9.

    >>> led = {0: (2.0, 1.0, 2.0), 1: (7.0, 4.0, 2.0)}  # mean, biased variance, count
    >>> led = {i: Moments(*map(torch.tensor, ([m], [v], n))) for i, (m, v, n) in led.items()}
    >>> batch, zeros = SeenBatch(2, led, momentum=0.1), torch.zeros(4, dtype=torch.float64)
    >>> contribution(batch, "pooled", zeros).tolist()
    [18.0, 116.0, 4.0, 2.0]
    >>> contribution(batch, "mean", zeros).tolist()
    [9.0, 10.0, 2.0, 2.0]

    zeros: (2 C + 2,) float64 on the device of the layer, which many calls start from.
    """
    total = zeros.clone()
    for number, (mean, var, count) in batch.led.items():
        has_values = (count >= 1).double()
        if running == "pooled":
            # The count is a tensor here, which the host must not read.
            total[:-1] += packed(mean, var, 1) * count
        elif running != "first" or number == 0:
            later = batch.num_groups - 1 - number if running == "sequential" else 0
            weight = (1 - (batch.momentum or 0.0)) ** later * has_values
            statistics = torch.cat([mean, unbiased(var, count), mean.new_ones(1)])
            total[:-1] += statistics.double() * weight
        total[-1] += has_values
    return total


def move_from(total: Tensor, running: Running) -> Move:
    """How running statistics follow the sum of all contributions, (2 C + 2,) float64."""
    statistics, num_groups = total[:-1], total[-1]
    if running == "pooled":
        mean, var, count = unpacked_moments(statistics)
        return Move(mean, unbiased(var, count), count >= 1)
    weight = statistics[-1]
    mean, var = (statistics[:-1] / torch.where(weight > 0, weight, 1.0)).view(2, -1)  # (C,)
    if running == "sequential":
        # With momentum p, k groups with values take r in turn to r (1 - p)^k + p sum(w m). As
        # p sum(w) is 1 - (1 - p)^k, one step of p sum(w) from r toward the weighted mean does that.
        return Move(mean, var, num_groups.long(), weight)
    return Move(mean, var, weight > 0)
