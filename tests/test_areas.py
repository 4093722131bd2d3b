"""Areas in predictions and labels, and what has biased them."""

from dataclasses import replace

import numpy as np
import pytest
import torch

from segtrain.config import Config, DataConfig, LossConfig
from segtrain.metrics import ConfusionMatrix
from segtrain.one_vs_rest import BinaryCounts
from segtrain.score.areas import area_lines

NAMES = ["ground", "crack", "dust", "nowhere"]


def scores_of(label, pred):
    matrix = ConfusionMatrix(len(NAMES))
    matrix.update(torch.from_numpy(pred), torch.from_numpy(label))
    return matrix.scores()


def drawn(pixels):
    """A label and a prediction of 80x90 in which the classes 1, 2 ... have these pixels."""
    label, pred = (np.zeros(7200, np.uint8) for _ in range(2))
    for k, (labelled, predicted) in enumerate(pixels, start=1):
        label[1000 * k : 1000 * k + labelled] = pred[1000 * k : 1000 * k + predicted] = k
    return label.reshape(80, 90), pred.reshape(80, 90)


def config(uniform=0.0, **loss):
    data = DataConfig(root="x", classes="c", layout="folders", class_uniform=uniform)
    return Config(data=data).model_copy(update={"loss": LossConfig(**loss)})


def test_the_ratio_is_of_counted_pixels():
    rng = np.random.default_rng(0)
    label, pred = (rng.integers(0, 3, (41, 57)).astype(np.uint8) for _ in range(2))
    label[pred == 2] = 255
    expected = [(pred[label != 255] == k).sum() / (label == k).sum() for k in range(3)]
    found = scores_of(label, pred)
    assert found.area_ratio == pytest.approx([*expected, np.nan], nan_ok=True)
    assert found.to_dict(NAMES)["classes"][1]["area_ratio"] == pytest.approx(expected[1])
    overlapping, ones = BinaryCounts(2), (label == 1, label == 2, pred == 1, pred == 2)
    bands = [torch.from_numpy(np.stack(x, -1).astype(np.uint8)) for x in (ones[:2], ones[2:])]
    overlapping.update(bands[1], bands[0])
    wanted = [(pred == 1).sum() / (label == 1).sum(), (pred == 2).sum() / (label == 2).sum()]
    assert overlapping.scores().area_ratio == pytest.approx(wanted)


@pytest.mark.parametrize(
    ("pixels", "said"),
    [
        ([(400, 500), (400, 320)], None),  # at the bounds
        ([(400, 501), (400, 400)], ["crack 125%; take the threshold"]),
        ([(400, 800), (400, 100)], ["crack 200%; take the", "dust 25%; found on too little"]),
        ([(99, 800), (400, 400)], None),  # too few pixels to tell
        ([(400, 0), (400, 0)], ["crack 0%, dust 0%; found on too little area: train longer"]),
    ],
)
def test_classes_beyond_a_quarter_are_named(pixels, said):
    lines = area_lines(scores_of(*drawn(pixels)), NAMES, config())
    starts = [f"warning: predicted area over labelled area: {text}" for text in said or ()]
    assert [line[: len(s)] for line, s in zip(lines, starts, strict=True)] == starts


@pytest.mark.parametrize("overlap", [True, False])
def test_what_enlarges_classes_is_no_cause_of_areas_that_are_too_small(overlap):
    scores = scores_of(*drawn([(400, 0), (400, 100)]))
    weights = {"positive_weights": (2.0, 9.0)} if overlap else {"class_weights": (0.1, 1, 1, 1)}
    scores = replace(scores, ap=(0.5,) * 4) if overlap else scores
    for options in (weights, {"uniform": 0.5}):
        (line,) = area_lines(scores, NAMES, config(**options))
        assert "crack 0%, dust 25%; found on too little area: train longer, or take" in line
        assert "without" not in line
        assert "weight" not in line
    (line,) = area_lines(scores, NAMES, config())
    assert f"train longer, give it weight (loss.{next(iter(weights))}), or take" in line


@pytest.mark.parametrize(
    ("options", "cause"),
    [
        ({"class_weights": (0.1, 1, 1, 1)}, "loss.class_weights (loss.logit_adjustment=1 undoes"),
        ({"class_weights": (0.1, 1, 1, 1), "logit_adjustment": 1.0}, None),
        ({"uniform": 0.5}, "data.class_uniform"),
        ({"also": ({"kind": "focal", "class_weights": (0.1, 1, 1, 1)},)}, "loss.class_weights"),
        ({"overlap": True, "class_weights": (0.1, 1, 1, 1)}, None),
        ({"overlap": True, "positive_weights": (2.0, 9.0)}, "loss.positive_weights"),
    ],
)
def test_what_has_biased_them_is_named(options, cause):
    scores, options = scores_of(*drawn([(400, 800), (400, 400)])), dict(options)
    if options.pop("overlap", False):
        scores = replace(scores, ap=(0.5,) * 4)
    (line,) = area_lines(scores, NAMES, config(**options))
    assert ("of its training shifts areas: train without, or" in line) == (cause is not None)
    assert (cause or "crack 200%; take the threshold") in line
