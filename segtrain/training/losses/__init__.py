"""The losses, exact over any number of ranks.

A mean over each rank's pixels, averaged over the ranks, is not the mean over all pixels: a rank
whose crops are mostly ignored would weigh as much as a full one. So every loss has two halves:

    sums(logits, labels)     what the pixels of this rank add up to: float64, differentiable
    loss_from_sums(totals)   the loss, computed from the sums of all ranks

Between the two, only `StepSync.reduce` adds up the sums of all ranks. A mean over pixels has two
sums, losses and weights, and is their quotient; Dice has three sums for each class. For
the backward pass a rank computes d loss / d totals from the totals, without another exchange: the
gradients of the parameters, added up over the ranks, are those of the whole batch.

With train.shares the same happens once for each share instead of each rank. `sums` may look at
other shares only through `segtrain.distributed.collectives`, and must not depend on their order:
OHEM takes the k-th largest of all losses, which is the same in any order.

On CUDA the logits of a step are `Enlarged`: cross entropy, focal loss and OHEM are computed from
those of the head by a kernel, all others get tensors at full size (`_sums` in total.py).

To add a loss: a class with these two methods, one line in LOSSES (total.py), its name in `LossKind`
(config/experiment.py), and which options serve it in NEEDS (config/section.py).

With train.accumulate_steps, the sums are those of one microbatch, like batch statistics. The step
weighs the microbatches by their valid pixels (by their class weights, if there are any). That is
exact for means over pixels: cross entropy, focal, boundary_relaxation. It is not for dice and
lovasz, which are no means over pixels, nor for ohem, which mines each microbatch for itself.
"""

from segtrain.training.losses.base import LossOptions, PixelMean
from segtrain.training.losses.cross_entropy import CrossEntropy
from segtrain.training.losses.total import LOSSES, SegLoss

__all__ = ["LOSSES", "CrossEntropy", "LossOptions", "PixelMean", "SegLoss"]
