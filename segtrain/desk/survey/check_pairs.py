"""The decision whether labels lie on the right images, and upright: what edges and rims say."""

import math
from collections.abc import Sequence
from dataclasses import replace
from statistics import median

import numpy as np

from segtrain.desk.survey.compared_pairs import ComparedPair
from segtrain.desk.survey.contents import word
from segtrain.desk.survey.edges import EdgeScores, edge_scores
from segtrain.desk.survey.label_set import LabelSet, shares_of
from segtrain.desk.survey.questions import Answers, Reading, UndecidedError, ignore_option
from segtrain.desk.survey.survey import Survey
from segtrain.errors import DataError, refuse_unused
from segtrain.text import first_of

# Edges along the borders of labels, where 1 is the mean of the image, are so much stronger one way
# than the other: then they tell how labels lie.
_CLEARLY_STRONGER = 0.3
# Standard deviations above chance from which on labels fit their own images. Of 12 to 60 images
# CamVid and drawn folders have 2.3 to 34, but faint ones less; mixed ones -2.3 to 2, seldom more.
_FITS_OWN = 2.0
# Standard deviations by which other images must fit better than their own.
_BETTER_THAN_OWN = 3.0
# Standard deviations above chance from which on other images fit at all.
_FITS_OTHERS = 4.5
# The share of pixels labelled 0 that are black, where 0 may mean no data.
_BLACK_SHARE = 0.95
# One or two pairs prove nothing.
_FEWEST_PAIRS = 3
# Fewer labels may fit none of their images by chance, and none can be told to be unlike the others.
_FEWEST_DOUBTED = 10
# A value has little of the rim of a mask below this share, and most of it above 1 minus this share.
_LITTLE_RIM = 0.3
# The share of masks that are inverted, if some are: fewer may be large objects.
_FEWEST_INVERTED = 0.2
# The cosine of mean colours from which on masks of both kinds show the same: none is inverted.
_SAME_COLORS = 0.3
# The share of the rim from which on a value has all of it.
_ALL_OF_RIM = 0.95
_BESIDE = "the next image", "the previous image"


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
    if answer is None and abs(stored - turned) > _CLEARLY_STRONGER:
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
    if len(pairs) < _FEWEST_PAIRS:
        return survey
    if not answers.trusts_pairs:
        # The option that goes on, beside what --pairs has answered already.
        go_on = f"--pairs {','.join(filter(None, (answers.pairs, 'named')))}"
        _check_uniform(labels, go_on)
        _check_inverted(labels, pairs, go_on)
        _check_edges(labels, edge_scores(pairs), go_on)
    _check_black_zeros(survey, labels, pairs, answers)
    return _note_rim(survey, labels, pairs, answers)


def check_drawn(labels: LabelSet, pairs: Sequence[ComparedPair], answers: Answers) -> None:
    """As `check_pairs`, of outlines that were drawn, whose values are asked about elsewhere."""
    if len(pairs) >= _FEWEST_PAIRS and not answers.trusts_pairs:
        _check_edges(labels, edge_scores(pairs), "--pairs named")


def _check_black_zeros(
    survey: Survey, labels: LabelSet, pairs: Sequence[ComparedPair], answers: Answers
) -> None:
    """Stops where 0 lies on black pixels alone, as beside a picture; UndecidedError."""
    # A list of classes that names 0 has answered the question.
    zero_is_named = any(entry.value == 0 for legend in survey.legends for entry in legend.classes)
    is_said = answers.ignore is not None or zero_is_named or labels.numbered
    are_black = sum(x.black for x in pairs) > _BLACK_SHARE * sum(x.zeros for x in pairs)
    if is_said or not are_black or 0 not in labels.values:
        return
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


def _note_rim(
    survey: Survey, labels: LabelSet, pairs: Sequence[ComparedPair], answers: Answers
) -> Survey:
    """The survey, with a note if one value has the rim of all masks, as a background has it."""
    classes_are_named = survey.legends or answers.names is not None or labels.classes
    rims = [rim for pair in pairs if (rim := pair.rim_share) is not None]
    is_telling = len(labels.values) == 2 and len(rims) >= _FEWEST_DOUBTED
    # Text may reach the rim of some images.
    lies_inside = is_telling and median(rims) >= _ALL_OF_RIM and min(rims) > 1 - _LITTLE_RIM
    if classes_are_named or not lies_inside:
        return survey
    low, high = map(word, labels.values)
    found = f"{high} has the rim of all images, and {low} lies inside, as text on paper"
    doubt = f"{found}: neither is called background; --names names them, first {low}"
    return replace(survey, notes=(*survey.notes, doubt), low_inside=True)


def _check_edges(labels: LabelSet, found: EdgeScores, go_on: str) -> None:
    """Stops where labels fit other images better, or do not fit their own.

    DataError: all fit other or turned images better. UndecidedError: they fit none, or some fit
    others.
    """
    _refuse_mixed(labels, found, go_on)
    if found.number < _FEWEST_DOUBTED:
        return
    strangers = [f"{label} fits {image}" for label, image in found.strangers]
    if found.own < _FITS_OWN:
        example = f"; {first_of(strangers, 3)}" if strangers else ""
        raise UndecidedError(
            f"{labels.pattern}: labels do not fit their images better than other images: edges and "
            f"colours of {found.number} agree {found.own:.1f} standard deviations above chance"
            f"{example}; are they of other pictures, or in another order?",
            [Reading("right, as faint areas and coarse outlines may be", go_on)],
        )
    if strangers:
        raise UndecidedError(
            f"{labels.pattern}: {len(strangers)} of {found.number} labels fit another image "
            f"better: {first_of(strangers, 5)}; replace or exchange them",
            [Reading("all are right", go_on)],
        )


def _refuse_mixed(labels: LabelSet, found: EdgeScores, go_on: str) -> None:
    """DataError: labels fit images farther on, or turned ones, better than their own."""
    best_shift = max(found.others, key=found.others.__getitem__, default="")
    best = found.others.get(best_shift, 0.0)
    # NaN where all labels are alike: nothing is known of their own images, and others count alone.
    own_is_unknown = math.isnan(found.own)
    is_better = own_is_unknown or found.own <= best - _BETTER_THAN_OWN
    if best <= _FITS_OTHERS or not is_better:
        return
    description = best_shift if best_shift.startswith("the ") else f"their image {best_shift}"
    # Labels exchanged two by two, 1 with 2 and 3 with 4, fit the next and the previous image.
    both_fit = min(found.others.get(x, 0.0) for x in _BESIDE) > best / 2
    if both_fit and best_shift in _BESIDE:
        description = "the next or the previous image, in turn,"
    here = "" if own_is_unknown else f", {found.own:.1f} here"
    raise DataError(
        f"{labels.pattern}: labels fit {description} better than their own: edges and colours "
        f"agree {best:.1f} standard deviations above chance there{here}; names, order or "
        "orientation were mixed up; if they are right, as faint areas may be, "
        f"{go_on} goes on"
    )


def _check_uniform(labels: LabelSet, go_on: str) -> None:
    """Stops where each label has one value on all of its pixels; UndecidedError."""
    # Then the files that hold each value add up to the number of labels.
    are_uniform = sum(facts.files for facts in labels.values.values()) == len(labels.labels)
    if are_uniform and len(labels.values) > 1 and len(labels.labels) >= _FEWEST_DOUBTED:
        raise UndecidedError(
            f"{labels.pattern}: each label has one value on all of its pixels: classes of whole "
            "images, which segmentation cannot learn, or areas that fill their images?",
            [Reading("areas that fill their images", go_on)],
        )


def _check_inverted(labels: LabelSet, pairs: Sequence[ComparedPair], go_on: str) -> None:
    """Stops where some masks have the values of the others exchanged; UndecidedError."""
    if len(labels.values) != 2 or labels.classes:
        return
    rims = [(pair, rim) for pair in pairs if (rim := pair.rim_share) is not None]
    outside = [pair for pair, rim in rims if rim > 1 - _LITTLE_RIM]
    inside = [pair for pair, rim in rims if rim < _LITTLE_RIM]
    number = len(inside) + len(outside)
    # Most masks must be clearly of one kind or of the other.
    if number < max(_FEWEST_DOUBTED, (1 - _FEWEST_INVERTED / 2) * len(rims)):
        return
    fewer = min(inside, outside, key=len)
    if len(fewer) < _FEWEST_INVERTED * number:
        return
    if _contrasts_agree(inside, outside) < _SAME_COLORS:
        raise UndecidedError(
            f"{labels.pattern}: {len(fewer)} of {len(pairs)} masks look inverted: what lies inside "
            f"of others has the rim of the image in {first_of((x.label for x in fewer), 3)}",
            [Reading("all are right", go_on)],
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
