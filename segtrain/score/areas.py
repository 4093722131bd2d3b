"""Areas that people measure: which classes are predicted too large or too small, and why."""

from collections.abc import Sequence

from segtrain.config import Config
from segtrain.metrics import FEW_PIXELS, Scores
from segtrain.text import MAX_NAME, first_of, printable

# A class of 1.25 times its area has at most IoU 0.8, however good its borders are.
_FAR = 1.25


def area_lines(scores: Scores, names: Sequence[str], config: Config) -> list[str]:
    """A line if classes have another area in predictions than in labels, and what to do."""
    each = zip(names, scores.area_ratio, scores.labelled, strict=True)
    far = [(name, x) for name, x, n in each if n >= FEW_PIXELS and not 1 / _FAR <= x <= _FAR]
    terms, biased = config.loss.terms, []
    # Of classes that overlap, which have an average precision, weights leave each as it is.
    if scores.ap is None and any(x.class_weights and x.logit_adjustment < 1 for x in terms):
        biased.append("loss.class_weights (loss.logit_adjustment=1 undoes it)")
    biased += ["loss.positive_weights"] if any(x.positive_weights for x in terms) else []
    biased += ["data.class_uniform"] if config.data.class_uniform else []
    cause = f"{first_of(biased)} of its training shifts areas: train without, or " if biased else ""
    shown = first_of(f"{printable(name, MAX_NAME)} {area:.2f}" for name, area in far)
    repair = "take the threshold where precision equals recall (eval --curves FILE)"
    return [f"warning: predicted area over labelled area: {shown}; {cause}{repair}"] if far else []
