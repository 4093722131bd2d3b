"""Precision and recall by threshold, beside scikit-learn; and predictions by such a threshold."""

from dataclasses import replace

import numpy as np
import pytest
import torch
from test_evaluate import cityscapes, command, know_the_colors
from test_evaluate_dataset import CPU, SETTINGS
from test_objects import rows_of
from test_predict import CLASSES, NO_VALUE_255, photo, read, run, save, save_tiff
from torch import nn

from segtrain.errors import ConfigError
from segtrain.inference.predictor import for_scores
from segtrain.one_vs_rest import CURVE_BINS, CurveCounts, average_precision
from segtrain.score.curves import ClassCurve, CurveQuestion
from segtrain.score.scoring import evaluate_dataset
from segtrain.task.decision_rule import rule_of
from segtrain.task.tasks import task_of
from segtrain.types import IGNORE_INDEX, SegLogits

__all__ = ["cityscapes", "command", "know_the_colors", "run"]  # fixtures
NUM_CLASSES = 4


class Noisy(nn.Module):
    """Logits are the pixels, in three channels and a fourth of their differences."""

    def forward(self, images):
        return SegLogits(torch.cat([images, images[:, :1] - images[:, 1:2]], dim=1))


class NoisyImages:
    """Pixels tell the label, with noise; some labels are ignored, and class 3 is rare."""

    def __len__(self):
        return 5

    def __getitem__(self, index):
        rng = np.random.default_rng(index)
        size = 17 + index % 2, 23
        label = rng.choice(NUM_CLASSES, size, p=[0.4, 0.3, 0.27, 0.03]).astype(np.uint8)
        image = rng.normal(0, 1, (*size, 3)) + 1.5 * np.eye(4)[label][..., :3]
        label[rng.random(size) < 0.1] = IGNORE_INDEX
        return image.astype(np.float32), label


def noisy(**options):
    settings = replace(SETTINGS, value_range=(0.0, 255.0), **options)
    return for_scores(Noisy(), settings, CPU, NUM_CLASSES)


def probabilities():
    """(n, K) and labels (n,) of all pixels that are not ignored, by NumPy."""
    known, labels = [], []
    for image, label in map(NoisyImages().__getitem__, range(5)):
        logits = np.concatenate([image, image[..., :1] - image[..., 1:2]], axis=2)
        p = np.exp(logits.astype(float))
        known.append((p / p.sum(2, keepdims=True))[label != IGNORE_INDEX])
        labels.append(label[label != IGNORE_INDEX])
    return np.concatenate(known), np.concatenate(labels)


@pytest.fixture(scope="module", params=["whole", "slide"])
def counts(request):
    """As an evaluation counts them; whole images and windows are equal for this model."""
    curves = CurveCounts(NUM_CLASSES)
    predictor = noisy(mode=request.param, crop_size=(9, 11))
    plain = evaluate_dataset(predictor, NoisyImages())
    outcome = evaluate_dataset(predictor, NoisyImages(), curves=curves)
    assert torch.equal(outcome.matrix.counts, plain.matrix.counts)
    assert int((outcome.calibration.counts - plain.calibration.counts).abs().sum()) <= 4
    return curves.counts


def test_curves_and_average_precision_are_those_of_scikit_learn(counts):
    from sklearn.metrics import average_precision_score, precision_recall_curve

    known, labels = probabilities()
    for k in range(NUM_CLASSES):
        rounded = np.floor(known[:, k] * CURVE_BINS) / CURVE_BINS
        curve = ClassCurve.of(counts[k])
        ap = average_precision_score(labels == k, rounded)
        assert average_precision(counts)[k] == pytest.approx(ap, abs=1e-3)  # rounding in float32
        expected = precision_recall_curve(labels == k, rounded)
        places = (expected[2] * CURVE_BINS).astype(int)
        for mine, theirs in zip((curve.precision, curve.recall), expected[:2], strict=True):
            np.testing.assert_allclose(mine[places], theirs[:-1], atol=2e-3)


@pytest.mark.parametrize(("kind", "least"), [("precision", 0.8), ("recall", 0.6), ("recall", 1.0)])
def test_predictions_by_the_threshold_have_what_was_told(counts, kind, least):
    """Pixel by pixel, and no other threshold is better."""
    curve = ClassCurve.of(counts[2])
    best = curve.best(**{kind: least})
    predictor = noisy().by(rule_of([("c", best / CURVE_BINS)], "abcd"))
    hits = predicted = labelled = 0
    for image, label in map(NoisyImages().__getitem__, range(5)):
        (found,) = predictor.label_maps([torch.from_numpy(image)], place="x")
        valid = label != IGNORE_INDEX
        is_found = found.label.numpy()[valid] == 2
        hits += int((is_found & (label[valid] == 2)).sum())
        predicted += int(is_found.sum())
        labelled += int((label == 2).sum())
    found = {"precision": hits / predicted, "recall": hits / labelled}
    curves = {"precision": curve.precision, "recall": curve.recall}
    assert found == {key: values[best] for key, values in curves.items()}
    assert found[kind] >= least
    other = "recall" if kind == "precision" else "precision"
    assert found[other] == curves[other][1:][curves[kind][1:] >= least].max()


@pytest.mark.parametrize("thresholds", [{1: 0.9}, {0: 0.2, 2: 0.3}, {0: 0.5, 1: 0.1}])
def test_a_class_is_there_only_from_its_threshold_on(thresholds):
    p = torch.rand((3, 12, 17), generator=torch.Generator().manual_seed(0))
    p /= p.sum(0)
    names = ("a", "b", "c")
    rule = rule_of([(names[k], t) for k, t in thresholds.items()], names)
    label = rule.label(p).numpy()
    for y, x in np.ndindex(label.shape):
        own = p[:, y, x].numpy()
        reached = {k: own[k] / np.float32(t) for k, t in thresholds.items() if own[k] >= t}
        others = [k for k in range(3) if k not in thresholds]
        expected = max(reached, key=reached.get) if reached else max(others, key=own.__getitem__)
        assert label[y, x] == expected


def test_a_probability_of_just_the_threshold_is_enough():
    p = torch.tensor([0.5, 0.25, 0.25]).view(3, 1, 1)
    assert rule_of([("b", 0.25)], "abc").label(p) == 1
    assert rule_of([], "abc", unknown_below=0.5).label(p) == 0


@pytest.mark.parametrize(
    ("mode", "least", "unsure"),
    [("whole", 0.1, None), ("slide", 0.1, None), ("whole", None, 0.6), ("slide", 0.2, 0.6)],
)
def test_predict_takes_thresholds_and_leaves_pixels_without_a_class(
    run, tmp_path, mode, least, unsure
):
    """Thresholds go before; in tables these pixels stand beside those whose image has no value."""
    image = photo(20, 30) // 64
    image[:, :4] = 255
    save_tiff(tmp_path / "a.tif", image, NO_VALUE_255)
    p = np.exp(image.astype(float))
    p /= p.sum(2, keepdims=True)
    is_greenish, label = p[..., 1] >= (least or np.inf), p.argmax(2)
    if least:
        label = np.where(is_greenish, 1, p[..., [0, 2]].argmax(2) * 2)
    unknown = (p.max(2) < (unsure or 0)) & ~is_greenish
    unknown[:, :4] = False
    expected = np.where(unknown, 0, np.array([7, 23, 11])[label])
    expected[:, :4] = 0
    assert (unknown if unsure else label != p.argmax(2)).sum() > 20
    given = {"thresholds": [("greenish", least)] if least else [], "unknown_below": unsure}
    how = {"set": [f"eval.mode={mode}", "eval.crop_size=[16, 16]"], "table": tmp_path / "t.csv"}
    assert run(tmp_path / "a.tif", **given, **how) == 0
    assert np.array_equal(read(tmp_path / "out/labels/a.png"), expected)
    rows = rows_of(tmp_path / "t.csv")
    assert {row["unknown_px"] for row in rows} == {str(int(unknown.sum()))}
    assert {row["no_value_px"] for row in rows} == {"80"}
    counts = np.array([(expected == raw).sum() for raw in (7, 23, 11)])
    assert [int(row["pixels"]) for row in rows] == counts.tolist()
    assert [float(row["share"]) for row in rows] == pytest.approx(counts / (600 - 80))


def test_one_class_needs_to_be_without_a_threshold(run, tmp_path):
    path, given = save(tmp_path / "a.png", photo(5, 6)), [(x, 0.1) for x in CLASSES.names]
    with pytest.raises(ConfigError, match="one class needs to be without"):
        run(path, thresholds=given)


def test_eval_tells_curves_and_the_threshold(command, tmp_path, capsys):
    plain = command()
    assert "curves" not in plain
    file = tmp_path / "curves.csv"
    found = command(curves=file, class_name="road", recall=0.9)["curves"]
    output = capsys.readouterr().out
    point = found["operating_point"]
    rows = [row for row in rows_of(file) if row["class"] == "road"]
    assert [float(row["threshold"]) for row in rows] == [i / 1024 for i in range(1, 1024)]
    enough = [row for row in rows if row["recall"] and float(row["recall"]) >= 0.9]
    best = max(enough, key=lambda row: (float(row["precision"]), float(row["threshold"])))
    assert point["threshold"] == float(best["threshold"])
    assert f"{point['recall']:.6f}" == best["recall"]
    scores = f"precision {point['precision']:.2%}, recall {point['recall']:.2%}"
    assert f"road: {scores} by predict --threshold road={point['threshold']}" in output
    ap = [x for x in found["AP"].values() if x is not None]
    assert found["mAP"] == pytest.approx(sum(ap) / len(ap))
    assert found["AP"]["train"] is None
    never = command(class_name="train", precision=0.5)["curves"]["operating_point"]
    assert never == {"class": "train", "threshold": None}
    assert "train: not labelled, so no threshold can be chosen" in capsys.readouterr().out


def test_a_precision_that_no_threshold_has_is_told_with_the_highest():
    asked = CurveQuestion(class_name="a", precision=0.5)
    counts = torch.zeros(2, 2, CURVE_BINS, dtype=torch.int64)
    counts[0, 0, 700], counts[0, 1, 700], counts[0, 1, 0] = 3, 1, 1
    (*_, line), found = asked.answer(counts, ["a", "b"], task_of("semantic"))
    assert line == "a: no threshold has a precision of 50.00%; the highest is 25.00%"
    assert found["operating_point"] == {"class": "a", "threshold": None}
    counts[0, 1, 900] = 2
    (*_, line), found = asked.answer(counts, ["a", "b"], task_of("semantic"))
    point = {"class": "a", "threshold": 700 / 1024, "precision": 0.5, "recall": 0.75}
    assert found["operating_point"] == point
    assert line.endswith("by predict --threshold a=0.68359375")
    (*_, line), _ = CurveQuestion(class_name="a", recall=0.9).answer(
        counts, ["a", "b"], task_of("semantic")
    )
    assert line == "a: no threshold has a recall of 90.00%; the highest is 75.00%"
    # Of its four pixels two are found first, one beside three others, and one last.
    ap = 2 / 4 * 1 + 1 / 4 * 3 / 6 + 1 / 4 * 4 / 7
    assert found["AP"] == {"a": pytest.approx(ap), "b": None}
