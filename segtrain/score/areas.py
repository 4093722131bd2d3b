"""Areas that people measure: which classes are predicted too large or too small, and why."""

from collections.abc import Sequence

from segtrain.config import Config
from segtrain.metrics import FEW_PIXELS, Scores
from segtrain.text import MAX_NAME, first_of, printable

# A class of 1.25 times its area has at most IoU 0.8, however good its borders are.
_FAR = 1.25


def area_lines(scores: Scores, names: Sequence[str], config: Config) -> list[str]:
    """A line of classes with a larger area in predictions than in labels, and one of smaller ones.

    Each says what to do.
    """
    ratios = zip(names, scores.area_ratio, scores.labelled, strict=True)
    known = [
        (f"{printable(name, MAX_NAME)} {x:.0%}", x) for name, x, n in ratios if n >= FEW_PIXELS
    ]
    large = [text for text, x in known if x > _FAR]
    small = [text for text, x in known if x < 1 / _FAR]
    terms, biased = config.loss.terms, []
    # Of classes that overlap, which have an average precision, weights leave each as it is.
    if scores.ap is None and any(x.class_weights and x.logit_adjustment < 1 for x in terms):
        biased.append("loss.class_weights (loss.logit_adjustment=1 undoes it)")
    biased += ["loss.positive_weights"] if any(x.positive_weights for x in terms) else []
    biased += ["data.class_uniform"] if config.data.class_uniform else []
    repair = "take the threshold where precision equals recall (eval --curves FILE)"
    cause = f"{first_of(biased)} of its training shifts areas: train without, or " if biased else ""
    # Weights and sampling enlarge what is rare: they explain no area that is too small.
    weights = "loss.class_weights" if scores.ap is None else "loss.positive_weights"
    more = "" if biased else f"give it weight ({weights}), "
    missed = f"found on too little area: train longer, {more}or "
    each = (large, cause + repair), (small, f"{missed}{repair}, which is lower")
    what = "warning: predicted area over labelled area"
    return [f"{what}: {first_of(far)}; {said}" for far, said in each if far]
