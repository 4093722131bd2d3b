"""The decision whether labels lie on the right images, and upright: what edges and rims say."""

import math
from collections.abc import Sequence
from dataclasses import replace

import numpy as np

from segtrain.desk.survey.compared_pairs import ComparedPair
from segtrain.desk.survey.contents import word
from segtrain.desk.survey.edges import EdgeScores, edge_scores
from segtrain.desk.survey.label_set import LabelSet, shares_of
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError, ignore_option
from segtrain.desk.survey.survey import Survey
from segtrain.errors import DataError, refuse_unused
from segtrain.text import first_of

# How much stronger edges are along the borders of labels one way than the other.
_TURNED = 0.3
# Standard deviations above chance: labels fit their own images from the first on (of 12 to 60
# images CamVid and drawn folders have 2.3 to 34, but faint ones less; mixed ones -2.3 to 2, seldom
# more); others fit better by the second, and fit from the third on.
_OWN, _BETTER, _FITS = 2.0, 3.0, 4.5
_BLACK = 0.95
# One or two pairs prove nothing; of so few labels none can be told to fit by chance, or to be
# unlike the others.
_TELLING, _FEWEST = 3, 10
# Masks of which a value has most of the rim, or little of it, and the part of all that is inverted
# at least; where colours of both kinds of masks agree so much, none is.
_RIM, _INVERTED, _AGREE = 0.3, 0.2, 0.3
_ALL_OF_RIM = 0.95
_BESIDE = "the next image", "the previous image"
_GO_ON = "--pairs named"


def choose_orientation(labels: LabelSet, scores: tuple[float, float], answers: Answers) -> LabelSet:
    """`labels` with `upright`, where EXIF turns images and the sizes of labels do not tell.

    scores: of `edges.turned_scores`.

    Raises:
        ConfigError: an answer where nothing is in question.
        UndecidedError: the edges of the images do not tell either.
    """
    if not labels.unclear:
        refuse_unused(vars(answers), "exif", "images that EXIF leaves, and labels whose sizes tell")
        return labels
    answer, (stored, turned) = answers.exif, scores
    # NaN, where no edges could be compared, is never larger: then it is asked.
    if answer is None and abs(stored - turned) > _TURNED:
        answer = "stored" if stored > turned else "turned"
    # Masks of several files are painted on the pixels as stored, and cannot be turned.
    if answer == "stored" or (answer == "turned" and not labels.classes):
        return replace(labels, upright=answer == "turned")
    upright = "; else store the pixels upright, and masks for them" if labels.classes else ""
    shown = replace(labels, labels={path: labels.labels[path] for path in sorted(labels.unclear)})
    ways = [Reading("the pixels as stored", "--exif stored", labels=shown)]
    if not labels.classes:
        shown = replace(shown, upright=True)
        ways.append(Reading("the pixels as viewers show them", "--exif turned", labels=shown))
    raise UndecidedError(
        f"{labels.pattern}: EXIF turns {first_of(shown.labels, 3)}: labels may lie on such images "
        f"or on their pixels as stored{upright}",
        ways,
    )


def check_pairs(
    survey: Survey, labels: LabelSet, pairs: Sequence[ComparedPair], answers: Answers
) -> Survey:
    """The survey, with a note if masks may be inverted; stops where images contradict labels.

    pairs: of `compared_pairs.read_pairs`.

    Raises:
        DataError: labels fit other images, or turned ones, better than their own.
        UndecidedError: they fit none, or some fit others; masks are uniform or inverted; or 0 lies
            where images are black.
    """
    if len(pairs) < _TELLING:
        return survey
    if answers.pairs != "named":
        _check_areas(labels, pairs)
        _check_edges(labels, edge_scores(pairs))
    # A list of classes that names 0 has answered the question.
    is_named = any(entry.value == 0 for legend in survey.legends for entry in legend.classes)
    zeros = sum(pair.zeros for pair in pairs)
    is_black = sum(pair.black for pair in pairs) > _BLACK * zeros
    is_open = answers.ignore is None and not (is_named or labels.numbered)
    if is_black and 0 in labels.values and is_open:
        # Beside it 255 means no data anyway, and the answers say all that is ignored.
        also = [255] if 255 in labels.values and len(labels.values) > 2 else []
        raise UndecidedError(
            f"{labels.pattern}: 0 lies where images are black ({shares_of(labels, [0])}): no data, "
            "or a class?",
            [
                Reading("no data", ignore_option([0, *also]), (0,), leaves_out=True),
                Reading("a class", ignore_option(also), (0,)),
            ],
        )
    rims = [rim for pair in pairs if (rim := pair.rim_share) is not None]
    is_named = survey.legends or answers.names is not None or labels.classes
    if is_named or len(labels.values) != 2 or len(rims) < _FEWEST or min(rims) < _ALL_OF_RIM:
        return survey
    low, high = map(word, labels.values)
    doubt = f"{high} has the rim of all images, and {low} lies inside: if {low} is the object, say"
    return replace(survey, notes=(*survey.notes, f"{doubt} so: --names object,background"))


def _check_edges(labels: LabelSet, found: EdgeScores) -> None:
    words = max(found.others, key=found.others.__getitem__, default="")
    best = found.others.get(words, 0.0)
    if best > _FITS and not found.own > best - _BETTER:
        which = words if words.startswith("the ") else f"their image {words}"
        if min(found.others.get(x, 0.0) for x in _BESIDE) > best / 2 and words in _BESIDE:
            which = "the next or the previous image, in turn,"
        here = "" if math.isnan(found.own) else f", {found.own:.1f} here"
        raise DataError(
            f"{labels.pattern}: labels fit {which} better than their own: edges and colours agree "
            f"{best:.1f} standard deviations above chance there{here}; names, order or orientation "
            f"were mixed up; if they are right, as faint areas may be, {_GO_ON} goes on"
        )
    shown = [f"{label} fits {image}" for label, image in found.strangers]
    if found.number < _FEWEST:
        return
    if found.own < _OWN:
        example = f"; {first_of(shown, 3)}" if shown else ""
        raise UndecidedError(
            f"{labels.pattern}: labels do not fit their images better than other images: edges and "
            f"colours of {found.number} agree {found.own:.1f} standard deviations above chance"
            f"{example}; are they of other pictures, or in another order?",
            [Reading("right, as faint areas and coarse outlines may be", _GO_ON)],
        )
    if shown:
        raise UndecidedError(
            f"{labels.pattern}: {len(shown)} of {found.number} labels fit another image better: "
            f"{first_of(shown, 5)}; replace or exchange them",
            [Reading("all are right", _GO_ON)],
        )


def _check_areas(labels: LabelSet, pairs: Sequence[ComparedPair]) -> None:
    """Stops at masks that are uniform, or inverted in some files."""
    # One file each: all values have the numbers of their files.
    are_uniform = sum(facts.files for facts in labels.values.values()) == len(labels.labels)
    if are_uniform and len(labels.values) > 1 and len(labels.labels) >= _FEWEST:
        raise UndecidedError(
            f"{labels.pattern}: each label has one value on all of its pixels: classes of whole "
            "images, which segmentation cannot learn, or areas that fill their images?",
            [Reading("areas that fill their images", _GO_ON)],
        )
    rims = [(pair, rim) for pair in pairs if (rim := pair.rim_share) is not None]
    outside = [pair for pair, rim in rims if rim > 1 - _RIM]
    inside = [pair for pair, rim in rims if rim < _RIM]
    number = len(inside) + len(outside)
    are_binary = len(labels.values) == 2 and not labels.classes
    fewer = min(inside, outside, key=len)
    if not are_binary or number < max(_FEWEST, (1 - _INVERTED / 2) * len(rims)):
        return
    if len(fewer) >= _INVERTED * number and _contrasts_agree(inside, outside) < _AGREE:
        raise UndecidedError(
            f"{labels.pattern}: {len(fewer)} of {len(pairs)} masks look inverted: what lies inside "
            f"of others has the rim of the image in {first_of((x.label for x in fewer), 3)}",
            [Reading("all are right", _GO_ON)],
        )


def _contrasts_agree(*groups: Sequence[ComparedPair]) -> float:
    """The cosine between the mean colours of the larger value in two groups, against all colours.

    About 1 if that value shows the same in both, and -1 if the values were exchanged.
    """
    channels = min(pair.colors.shape[1] for group in groups for pair in group)
    means = []
    for group in groups:
        shown = [pair.colors[(pair.few_values == pair.values.max()).ravel()] for pair in group]
        means.append(np.mean([x[:, -channels:].sum(axis=0) for x in shown], axis=0))
    one, other = means
    return float(one @ other / max(np.linalg.norm(one) * np.linalg.norm(other), 1e-9))
