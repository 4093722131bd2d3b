"""Several models as one, whose probabilities are the mean of theirs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segtrain.types import SegLogits


class Ensemble(nn.Module):
    """The mean of the members' probabilities, for evaluation, prediction and export.

    members: each returns SegLogits of the same classes, in the same order, for the same images.
    """

    def __init__(self, members: Sequence[nn.Module]) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)

    def forward(self, images: Tensor) -> SegLogits:
        """The logarithms of the mean probabilities (N, K, H, W); `softmax` gives these.

        log(sum_m p_m / M) is computed from the logarithms of p_m, so that small ones do not become
        minus infinity.
        """
        total: Tensor | None = None
        for member in self.members:
            log_p = member(images).out.log_softmax(dim=1)
            # One sum and one member in memory, whatever their number.
            total = log_p if total is None else torch.logaddexp(total, log_p)
        return SegLogits(total - math.log(len(self.members)))
