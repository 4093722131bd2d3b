"""Options of the loss."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from segtrain.config.section import (
    Fraction,
    FractionBelow1,
    NonNegativeFloat,
    Positive,
    PositiveFloat,
    Section,
    option,
)

LossKind = Literal["cross_entropy", "ohem", "dice", "focal", "lovasz", "boundary_relaxation"]


def takes_class_weights(kind: str) -> bool:
    """Whether the loss `kind` uses its class_weights."""
    return kind not in ("dice", "lovasz")


class _Loss(Section):
    """What one loss is: loss itself, or a term of loss.also."""

    kind: LossKind = option(
        "cross_entropy",
        "ohem: cross entropy over the hardest pixels only; dice: soft Dice (V-Net), "
        "mean over the classes that the labels of a pass show; focal: cross entropy times "
        "(1 - p) ** focal_gamma; lovasz: Lovasz-Softmax, a surrogate of the IoU; "
        "boundary_relaxation: along boundaries any of the classes nearby is right",
    )
    weight: PositiveFloat = option(1.0, "factor of this loss in the sum with those of loss.also")
    class_weights: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None = option(
        None,
        "one weight a class, in the order of the class file; null: all 1; "
        "'segtrain data stats' prints some",
    )
    label_smoothing: FractionBelow1 = option(
        0.0, "cross_entropy: this part of each label is spread over all classes, as in torch"
    )
    focal_gamma: NonNegativeFloat = option(
        2.0, "focal: the larger, the less pixels count that are right already; 0: cross entropy"
    )
    ohem_threshold: Fraction = option(
        0.7, "keep pixels whose probability of the true class is below this"
    )
    ohem_min_kept: Positive = option(
        100_000,
        "keep at least this many of the hardest pixels, counted over all ranks; mmsegmentation "
        "counts for each image",
    )
    ohem_fraction: Annotated[float, Field(gt=0, le=1)] | None = option(
        None,
        "ohem: keep this part of the valid pixels, the hardest of all ranks, whatever their "
        "probability; detectron2's DeepLab uses 0.2; null: ohem_threshold and ohem_min_kept decide",
    )
    dice_squared: bool = option(
        True, "dice: squared probabilities, as V-Net; false: as MONAI and MosaicML's Composer"
    )
    lovasz_per_image: bool = option(
        True,
        "lovasz: the mean of the losses of the images (of passes: by their pixels); false: over "
        "the pixels of all ranks, which are all sent to every rank and sorted there, class by "
        "class",
    )
    boundary_px: Annotated[int, Field(gt=0, le=100)] = option(
        1, "boundary_relaxation: how far away other classes are right too"
    )

    def _mistakes(self) -> Iterator[str]:
        kind = self.kind
        reason = f"kind {kind}"
        yield from self._no_effect(
            ("class_weights", takes_class_weights(kind), reason),
            ("label_smoothing", kind == "cross_entropy", reason),
            ("focal_gamma", kind == "focal", reason),
            ("ohem_fraction ohem_threshold ohem_min_kept", kind == "ohem", reason),
            ("dice_squared", kind == "dice", reason),
            ("lovasz_per_image", kind == "lovasz", reason),
            ("boundary_px", kind == "boundary_relaxation", reason),
            ("ohem_threshold ohem_min_kept", self.ohem_fraction is None, "ohem_fraction"),
        )
        if self.class_weights is not None and not any(self.class_weights):
            yield "class_weights: all weights are 0"


class LossTerm(_Loss):
    """A further loss that is added to the first."""

    kind: LossKind = option(
        ..., "the loss to add, as loss.kind; the other keys too are those of the loss section"
    )


class LossConfig(_Loss):
    """What is minimized, over the valid pixels of all ranks together."""

    also: tuple[LossTerm, ...] = option(
        (),
        "further losses to add, each with options of its own, class_weights too: "
        "[{kind: dice, weight: 3.0}]; both heads have the sum",
    )
    aux_weight: NonNegativeFloat = option(0.4, "weight of the auxiliary head's loss")

    @property
    def terms(self) -> tuple["LossConfig | LossTerm", ...]:
        """This loss and those of `also`."""
        return (self, *self.also)
