"""Options of the loss."""

from collections.abc import Iterator
from typing import Annotated, Literal

from pydantic import Field

from segtrain.config.options.section import (
    Fraction,
    NonNegativeFloat,
    Positive,
    Section,
    option,
)


def takes_class_weights(kind: str) -> bool:
    """Whether the loss `kind` uses loss.class_weights."""
    return kind != "dice"


class LossConfig(Section):
    """What is minimized, over the valid pixels of all ranks together."""

    kind: Literal["cross_entropy", "ohem", "dice"] = option(
        "cross_entropy",
        "ohem: cross entropy over the hardest pixels only; dice: soft Dice (V-Net), "
        "mean over the classes that the labels of a pass show",
    )
    aux_weight: NonNegativeFloat = option(0.4, "weight of the auxiliary head's loss")
    class_weights: Annotated[tuple[NonNegativeFloat, ...], Field(min_length=1)] | None = option(
        None, "one weight a class, in the order of the class file; null: all 1"
    )
    ohem_threshold: Fraction = option(
        0.7, "keep pixels whose probability of the true class is below this"
    )
    ohem_min_kept: Positive = option(
        100_000, "keep at least this many of the hardest pixels, counted over all ranks"
    )

    def _mistakes(self) -> Iterator[str]:
        yield from self._no_effect(
            ("class_weights", takes_class_weights(self.kind), f"kind {self.kind}")
        )
        if self.class_weights is not None and not any(self.class_weights):
            yield "class_weights: all weights are 0"
