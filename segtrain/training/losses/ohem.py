"""Online hard example mining."""

import math

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.models.enlarged import Enlarged
from segtrain.training.losses.cross_entropy import CrossEntropy
from segtrain.types import IGNORE_INDEX

# In units in the last place; two interpolations of logits up to 64.
_ROUNDING = 256
# A loss of 31 bits in three digits, of 63 bits (float64) in six.
_DIGIT_BITS = 11


class OHEM(CrossEntropy):
    """Cross entropy of the hard pixels: those whose true class has a probability below
    `ohem_threshold`, and at least the `ohem_min_kept` hardest of all ranks; or only the hardest
    part `ohem_fraction` of the valid pixels of all ranks.

    Online hard example mining (arXiv:1604.03540) by pixel. mmsegmentation's OHEMPixelSampler counts
    `min_kept` for each image: multiply it by the batch size, and write 0 for its threshold of None.
    It drops pixels as hard as the last one kept. Here these are kept. It divides by all pixels,
    here the mean is over those kept. detectron2's DeepLab keeps a fraction of all pixels, ignored
    ones too. Class weights weigh the pixels kept but do not decide which.
    """

    takes_enlarged = True  # see `Loss`

    def sums(self, logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
        """(2, 1): the weighted losses and the weights of the hard pixels (collective)."""
        config = self.options.config
        losses = self.pixel_losses(logits, labels)
        with torch.no_grad():
            # The loss is -log(probability), so the hardest pixels have the largest.
            hardness = losses.masked_fill(labels == IGNORE_INDEX, -math.inf)
            threshold, fraction = config.ohem_threshold, config.ohem_fraction
            kept = math.ceil(config.ohem_min_kept / self.options.microbatches)
            if fraction is not None:
                threshold, kept = 0.0, fraction
            limit = _limit_of_largest(hardness.flatten(), kept)
            # Enlarged logits repeat along the border of an image. Which of them come out a bit
            # larger depends on the last bits of the features, and these on the split over ranks.
            limit -= _ROUNDING * torch.finfo(limit.dtype).eps * limit.abs().clamp(min=1)
            easy_loss = -math.log(threshold) if threshold > 0 else math.inf
            easy = (hardness <= easy_loss) & (hardness < limit)
            hard = labels.masked_fill(easy, IGNORE_INDEX)
        return self._weighted(losses, hard)


def _limit_of_largest(values: Tensor, kept: float) -> Tensor:
    """The smallest of the `kept` largest of all ranks' `values`; 0 if there are fewer (collective).

    The limit is found digit by digit, as in a radix sort, from counts of 16 KB a digit, so that
    ranks exchange no values. Counts add up alike in any order.

    values: (n,), at least 0, or -inf for those that do not count.
    kept: how many (int), or which part of those that count, at least one (float).
    """
    # The bits of numbers that are not negative have the order of the numbers.
    integer, bits = (torch.int32, 31) if values.dtype == torch.float32 else (torch.int64, 63)
    keys = values.abs().view(integer).masked_fill(values == -math.inf, -1).sort().values
    limit, wanted = keys.new_zeros(()), kept
    # The same number of rounds, and of sums, on all ranks, whatever their values.
    for shift in reversed(range(0, bits, _DIGIT_BITS)):
        num_digits = 1 << min(_DIGIT_BITS, bits - shift)
        digits = torch.arange(num_digits, dtype=integer, device=keys.device)
        edges = limit + (digits << shift)
        at_least = dist.all_reduce_sum((len(keys) - torch.searchsorted(keys, edges)).double())
        if isinstance(wanted, float):
            # In the first round `at_least[0]` counts all values but those of -inf.
            wanted = (kept * at_least[0]).floor().clamp(min=1)
        digit = ((at_least >= wanted).sum(dtype=integer) - 1).clamp(min=0)
        limit = limit + (digit << shift)
    return limit.view(values.dtype)
