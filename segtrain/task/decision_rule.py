"""Which class a pixel has, where not the highest probability alone decides."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor

from segtrain.errors import ConfigError
from segtrain.text import first_of, printable
from segtrain.types import IGNORE_INDEX


@dataclass(frozen=True)
class DecisionRule:
    """Thresholds of some classes, and a probability below which no class is sure enough.

    A pixel has a class of `thresholds` (by train id) only where its probability is at least the
    threshold; of several the one with the highest quotient of both. All other pixels have the most
    probable of the other classes; where no class at all has a probability of `unknown_below`, none.
    """

    thresholds: Mapping[int, float]
    unknown_below: float = 0.0

    def label(self, probability: Tensor) -> Tensor:
        """(h, w) uint8 of the probabilities of all classes, (K, h, w); IGNORE_INDEX: no class."""
        is_sure = probability.amax(0) >= self.unknown_below
        if not self.thresholds:
            label = probability.argmax(0)
        else:
            chosen = list(self.thresholds)
            least = torch.tensor([self.thresholds[k] for k in chosen], dtype=probability.dtype)
            least = least.to(probability.device, non_blocking=True).view(-1, 1, 1)
            some = probability[chosen]
            # A class that reaches its threshold has a quotient of at least 1; all others get 0.
            quotient, place = (some / least).masked_fill_(some < least, 0).max(0)
            others = probability.clone()
            # Below every probability, so that `argmax` takes none of them.
            others[chosen] = -1
            named = torch.tensor(chosen, device=probability.device)[place]
            label = torch.where(quotient > 0, named, others.argmax(0))
            # Who reaches a threshold need not reach `unknown_below`, too.
            is_sure |= quotient > 0
        return label.masked_fill_(~is_sure, IGNORE_INDEX).to(torch.uint8)


def rule_of(
    thresholds: Sequence[tuple[str, float]],
    names: Sequence[str],
    unknown_below: float | None = None,
) -> DecisionRule | None:
    """The rule for thresholds by name; None: the highest probability decides.

    ConfigError: a class that does not exist or comes twice, no class is left for other pixels, or
        no probability is below `unknown_below`.
    """
    if unknown_below is not None and unknown_below <= 1 / len(names):
        what = f"of {len(names)} classes one always has {1 / len(names):.3g}"
        raise ConfigError(f"--unknown-below: no effect: {what}")
    if not thresholds and unknown_below is None:
        return None
    given = [name for name, _ in thresholds]
    if unknown := [name for name in given if name not in names]:
        there = first_of(names, 20)
        raise ConfigError(f"--threshold: no class {printable(unknown[0])}; there are {there}")
    if len(set(given)) < len(given):
        raise ConfigError("--threshold: once for each class")
    if len(given) == len(names):
        what = "one class needs to be without, for pixels that reach none"
        raise ConfigError(f"--threshold: {what}")
    by_id = {list(names).index(name): value for name, value in thresholds}
    return DecisionRule(by_id, unknown_below or 0.0)
