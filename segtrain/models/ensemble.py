"""Several models as one, whose probabilities are the mean of theirs."""

from collections.abc import Callable, Iterable, Sequence

from torch import Tensor, nn

from segtrain.types import SegLogits


class Ensemble(nn.Module):
    """The mean of the members' probabilities, for evaluation, prediction and export.

    members: each returns SegLogits of the same classes, in the same order, for the same images.
    mean: the logits of their mean probabilities, as `Task.mean`.
    """

    def __init__(
        self, members: Sequence[nn.Module], mean: Callable[[Iterable[Tensor]], Tensor]
    ) -> None:
        super().__init__()
        self.members = nn.ModuleList(members)
        self._mean = mean

    def forward(self, images: Tensor) -> SegLogits:
        """Logits (N, K, H, W) of the mean probabilities."""
        return SegLogits(self._mean(member(images).out for member in self.members))
