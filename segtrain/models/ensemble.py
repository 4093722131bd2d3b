"""Several models as one, whose probabilities are the mean of theirs."""

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from segtrain.types import SegLogits


class Ensemble(nn.Module):
    """The mean of the members' probabilities, for evaluation, prediction and export.

    members: each returns SegLogits of the same classes, in the same order, for the same images.
    multilabel: whether their classes overlap.
    """

    def __init__(self, members: Sequence[nn.Module], *, multilabel: bool = False) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self.multilabel = multilabel

    def forward(self, images: Tensor) -> SegLogits:
        """The logarithms of the mean probabilities (N, K, H, W); `softmax` gives these.

        log(sum_m p_m / M) is computed from the logarithms of p_m, so that small ones do not become
        minus infinity. Where classes overlap, log(p / (1 - p)) of the mean p, for `sigmoid`.
        """
        total: Tensor | None = None
        for member in self.members:
            logits = member(images).out
            if self.multilabel:  # a class and all else, of which each is a member's softmax
                logits = torch.stack([logits, torch.zeros_like(logits)])
            log_p = logits.log_softmax(dim=0 if self.multilabel else 1)
            # One sum and one member in memory, whatever their number.
            total = log_p if total is None else torch.logaddexp(total, log_p)
        if self.multilabel:
            return SegLogits(total[0] - total[1])
        return SegLogits(total - math.log(len(self.members)))
