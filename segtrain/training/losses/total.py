"""The training loss of a config: a weighted sum of losses, for the head and the auxiliary head."""

from collections.abc import Callable

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain import plugins
from segtrain.config import LossConfig
from segtrain.models.blocks import at_least_float32
from segtrain.models.enlarged import Enlarged
from segtrain.task.targets import Targets, targets_of
from segtrain.training.losses.base import Loss, LossOptions
from segtrain.training.losses.cross_entropy import BoundaryRelaxation, CrossEntropy, Focal
from segtrain.types import Choices, Imported, SegLogits

LOSSES: Choices[Callable[[LossOptions], Loss]] = Choices(
    {
        "cross_entropy": CrossEntropy,
        "ohem": Imported("training.losses.ohem:OHEM"),
        "dice": Imported("training.losses.dice:Dice"),
        "dice_linear": Imported("training.losses.dice:Dice"),
        "focal": Focal,
        "lovasz": Imported("training.losses.lovasz:LovaszImages"),
        "lovasz_batch": Imported("training.losses.lovasz:LovaszBatch"),
        "boundary_relaxation": BoundaryRelaxation,
    }
)
"""`loss.kind`: what is called with `LossOptions`, as those of plugins."""

_OVERLAP = Imported("training.losses.multilabel:Overlap")
MULTILABEL_LOSSES: Choices[Callable[[LossOptions], Loss]] = Choices(
    {
        "cross_entropy": Imported("training.losses.multilabel:BinaryCrossEntropy"),
        "focal": Imported("training.losses.multilabel:BinaryFocal"),
        "dice": _OVERLAP,
        "dice_linear": _OVERLAP,
        "tversky": _OVERLAP,
        "lovasz": Imported("training.losses.multilabel:LovaszHinge"),
    }
)
"""`loss.kind` with task multilabel."""

_LOSSES_OF = {"semantic": LOSSES, "multilabel": MULTILABEL_LOSSES}
"""Those of each task; a task of a plugin has losses of plugins."""


class WeightedSum:
    """The sum of weight * loss over several losses; a loss in two halves itself."""

    takes_enlarged = True  # see `Loss`

    def __init__(self, losses: list[Loss], weights: list[float]) -> None:
        self._losses, self._weights = losses, weights
        self.num_sums = sum(loss.num_sums for loss in losses)

    def sums(self, logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
        """(num_sums, K): the sums of all losses, with zeros beside those of all classes."""
        rows = [_sums(loss, logits, labels) for loss in self._losses]
        return torch.cat([F.pad(part, (0, logits.shape[1] - part.shape[1])) for part in rows])

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The weighted sum of the losses."""
        parts = totals.split([loss.num_sums for loss in self._losses])
        terms = zip(self._losses, self._weights, parts, strict=True)
        return torch.stack([w * loss.loss_from_sums(part) for loss, w, part in terms]).sum()


class Adjusted:
    """The loss of scores z + t log(w), of class weights w and t = `logit_adjustment`.

    Weighted cross entropy is least where softmax(z) is in proportion to w p, the weight times the
    probability of a class. Here that is softmax(z + t log(w)), so softmax(z) is in proportion to
    w^(1 - t) p, while every pixel still trains with its weight. Menon et al. (arXiv:2007.07314,
    section 4.2) adjust by the frequencies of classes instead. A weight of 0 adjusts nothing.
    """

    takes_enlarged = True  # see `Loss`

    def __init__(self, loss: Loss, class_weights: Tensor, power: float) -> None:
        self._loss, self.num_sums = loss, loss.num_sums
        logs = class_weights.double().log().nan_to_num(neginf=0.0)
        self._offsets = power * logs.view(-1, 1, 1)

    def sums(self, logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
        """The sums of the loss, of adjusted scores."""
        if isinstance(logits, Enlarged):
            return _sums(self._loss, logits.plus(self._offsets), labels)
        wide = at_least_float32(logits)
        return self._loss.sums(wide + self._offsets.to(wide.dtype), labels)

    def loss_from_sums(self, totals: Tensor) -> Tensor:
        """The loss, of sums of adjusted scores."""
        return self._loss.loss_from_sums(totals)


def _sums(loss: Loss, logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
    """The sums of `loss`; one that needs logits at full size, or may need them, gets these."""
    # Of the class itself: what derives from one of them may do anything with its logits.
    if isinstance(logits, Enlarged) and not vars(type(loss)).get("takes_enlarged", False):
        logits = logits.full
    return loss.sums(logits, labels)


class SegLoss:
    """The training loss of a config: the same loss for the head and the auxiliary head.

    microbatches: train.accumulate_steps. targets: None: those of task semantic.
    """

    def __init__(
        self,
        config: LossConfig,
        device: torch.device,
        *,
        microbatches: int = 1,
        targets: Targets | None = None,
    ) -> None:
        self.aux_weight = config.aux_weight
        self._targets = targets or targets_of("semantic")
        losses, self._class_weights = [], None
        for term in config.terms:
            weights, positive = (
                None if numbers is None else torch.tensor(numbers, device=device)
                for numbers in (term.class_weights, term.positive_weights)
            )
            chosen = plugins.choose("loss", term.kind, _LOSSES_OF.get(self._targets.name, {}))
            loss = chosen(LossOptions(term, weights, microbatches, positive))
            if weights is not None and term.logit_adjustment:
                loss = Adjusted(loss, weights, term.logit_adjustment)
            losses.append(loss)
            if self._class_weights is None:  # `Config` sees to it that microbatches have no others
                self._class_weights = weights
        self._loss = losses[0]
        if len(losses) > 1 or config.weight != 1:
            self._loss = WeightedSum(losses, [term.weight for term in config.terms])

    def labels(self, stored: Tensor) -> Tensor:
        """Labels as losses get them, of those of a batch: see `Targets.for_loss`."""
        return self._targets.for_loss(stored)

    def __call__(self, logits: SegLogits, labels: Tensor) -> Tensor:
        """The sums of this rank, (heads, ...), for logits (N, K, H, W) and what `labels` gives.

        logits: tensors, or `Enlarged`, of which most losses never make these.
        heads: 2, or 1 without an auxiliary head.
        """
        return torch.stack([self.sums(x, labels) for x in logits if x is not None])

    def sums(self, logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
        """The sums of one head."""
        return _sums(self._loss, logits, labels)

    def means(self, totals: Tensor) -> Tensor:
        """(2,) float64: the loss of the head and of the auxiliary head, NaN without one."""
        means = torch.stack([self._loss.loss_from_sums(total) for total in totals])
        return F.pad(means, (0, 2 - len(means)), value=torch.nan)

    def objective(self, sums: Tensor, totals: Tensor) -> Tensor:
        """(): its gradient is this rank's part of the gradient of `out + aux_weight * aux`.

        sums: of this rank; totals: of all ranks. For the value of the loss use `means`.
        """
        parts = []
        # Without an auxiliary head there is a weight too many.
        for weight, local, total in zip((1.0, self.aux_weight), sums, totals, strict=False):
            # The value is that of the total; the gradient goes to this rank's sums.
            part = weight * local
            parts.append(self._loss.loss_from_sums(total + (part - part.detach())))
        return torch.stack(parts).sum()

    def label_weight(self, labels: Tensor) -> Tensor:
        """The weight of what `labels` gives, before any mining, () float64."""
        return self._targets.loss_weight(labels, self._class_weights)
