"""Batch norm as several ranks have it without synchronization, in one process."""

from collections.abc import Sequence
from typing import get_args

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.distributed.partition import partition
from segtrain.norm import PartialBatchNorm2d
from segtrain.norm.functional import Moments
from segtrain.norm.partial import Running

RUNNING: tuple[Running, ...] = get_args(Running)


class GhostBatchNorm2d(nn.BatchNorm2d):
    """PartialBatchNorm2d as `num_ranks` ranks have it, in one process.

    Each contiguous share of the batch is normalized by its own statistics. All kinds of running
    statistics are tracked side by side; `take_running` chooses what evaluation uses.

    Args:
        whole_if_pooled: where an image has one value a channel, as in a globally pooled branch, the
            ranks share their statistics; of one image there would be none.
    """

    def __init__(
        self,
        num_features: int,
        *,
        num_ranks: int,
        whole_if_pooled: bool = False,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
    ) -> None:
        super().__init__(num_features, eps, momentum)
        self.num_ranks = num_ranks
        self.whole_if_pooled = whole_if_pooled
        self.trackers = nn.ModuleDict(
            {
                kind: PartialBatchNorm2d(num_features, eps, momentum, affine=False, running=kind)
                for kind in RUNNING
            }
        )

    def forward(self, input: Tensor) -> Tensor:
        """`input` (N, C, H, W) normalized, its rows shared as ranks share a batch."""
        if not self.training:
            return super().forward(input)
        pooled = self.whole_if_pooled and input.shape[2:].numel() == 1
        num_ranks = 1 if pooled else self.num_ranks
        shares = [partition(len(input), num_ranks, rank) for rank in range(num_ranks)]
        parts = [self._normalize(input[share.start : share.stop]) for share in shares]
        self._track([moments for _, moments in parts])
        return torch.cat([y for y, _ in parts])

    def _normalize(self, x: Tensor) -> tuple[Tensor, Moments]:
        mean, var = torch.zeros(
            2, self.num_features, dtype=torch.promote_types(x.dtype, torch.float32), device=x.device
        )
        # A momentum of 1 makes the kernel leave the statistics of the batch in the buffers.
        y = F.batch_norm(x, mean, var, self.weight, self.bias, True, 1.0, self.eps)
        count = x.numel() // self.num_features
        biased = var * ((count - 1) / count)
        return y, Moments(mean, biased, mean.new_tensor(count, dtype=torch.float64))

    def _track(self, moments: Sequence[Moments]) -> None:
        for kind, tracker in self.trackers.items():
            # The product's own merging; only its all_reduce is a sum within this process.
            tracker._seen = list(moments[:1] if kind == "rank0" else moments)
            tracker._merge(torch.stack(list(tracker._contributions())).sum(0))
            tracker._seen.clear()


def take_running(model: nn.Module, kind: Running) -> None:
    """Puts this kind of running statistics into the places that evaluation reads."""
    for layer in model.modules():
        if isinstance(layer, GhostBatchNorm2d):
            layer.running_mean.copy_(layer.trackers[kind].running_mean)
            layer.running_var.copy_(layer.trackers[kind].running_var)


def compare_running(model: nn.Module) -> dict[str, list[float]]:
    """How far the kinds of running statistics lie apart in `model`, empty without the layers.

    Quantiles 0.05, 0.5 and 0.95 over all channels of all layers: the variances over the pooled one,
    and the distance of rank 0's mean from the pooled one in pooled standard deviations. (The mean
    of equal shares' means is the pooled one.)
    """
    layers = [layer.trackers for layer in model.modules() if isinstance(layer, GhostBatchNorm2d)]
    if not layers:
        return {}
    mean, var = (
        {kind: torch.cat([getattr(layer[kind], name) for layer in layers]) for kind in RUNNING}
        for name in ("running_mean", "running_var")
    )
    values = {
        "var_rank0": var["rank0"] / var["pooled"],
        "var_mean": var["mean"] / var["pooled"],
        "distance_rank0": (mean["rank0"] - mean["pooled"]).abs() / var["pooled"].sqrt(),
    }
    quantiles = torch.tensor([0.05, 0.5, 0.95], dtype=torch.float64)
    return {key: value.double().quantile(quantiles).tolist() for key, value in values.items()}
