"""Precision and recall by threshold, beside scikit-learn; and predictions by such a threshold."""

import csv
from dataclasses import replace

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from test_evaluate import cityscapes, command, know_the_colors  # noqa: F401 - fixtures
from test_evaluate_dataset import CLASSES, CPU, SETTINGS
from test_predict import photo, read, run, save  # noqa: F401 - `run` is a fixture
from torch import nn

from segtrain.errors import ConfigError
from segtrain.evaluation.curves import ClassCurve, CurveQuestion
from segtrain.evaluation.decision_rule import rule_of
from segtrain.evaluation.predictor import for_scores
from segtrain.evaluation.scoring import evaluate_dataset
from segtrain.one_vs_rest import CURVE_BINS, CurveCounts, average_precision
from segtrain.types import IGNORE_INDEX, SegLogits

ASKED = CurveQuestion(class_name="a", precision=0.5)


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
        label = rng.choice(CLASSES, size, p=[0.4, 0.3, 0.27, 0.03]).astype(np.uint8)
        image = rng.normal(0, 1, (*size, 3)) + 1.5 * np.eye(4)[label][..., :3]
        label[rng.random(size) < 0.1] = IGNORE_INDEX
        return image.astype(np.float32), label


def noisy(**options):
    settings = replace(SETTINGS, value_range=(0.0, 255.0), **options)
    return for_scores(Noisy(), settings, CPU, CLASSES)


def probabilities():
    """(n, K) and labels (n,) of all pixels that are not ignored, by NumPy."""
    known, labels = [], []
    for image, label in map(NoisyImages().__getitem__, range(5)):
        logits = np.concatenate([image, image[..., :1] - image[..., 1:2]], axis=2)
        p = np.exp(logits.astype(float))
        known.append((p / p.sum(2, keepdims=True))[label != IGNORE_INDEX])
        labels.append(label[label != IGNORE_INDEX])
    return np.concatenate(known), np.concatenate(labels)


@pytest.fixture(params=["whole", "slide"])
def counts(request):
    """As an evaluation counts them; whole images and windows are equal for this model."""
    curves = CurveCounts(CLASSES)
    predictor = noisy(mode=request.param, crop_size=(9, 11))
    plain = evaluate_dataset(predictor, NoisyImages())
    outcome = evaluate_dataset(predictor, NoisyImages(), curves=curves)
    assert torch.equal(outcome.matrix.counts, plain.matrix.counts)
    assert int((outcome.calibration.counts - plain.calibration.counts).abs().sum()) <= 4
    return curves.counts


def test_curves_and_average_precision_are_those_of_scikit_learn(counts):
    from sklearn.metrics import average_precision_score, precision_recall_curve

    known, labels = probabilities()
    for k in range(CLASSES):
        rounded = np.floor(known[:, k] * CURVE_BINS) / CURVE_BINS
        curve = ClassCurve.of(counts[k])
        ap = average_precision_score(labels == k, rounded)
        assert average_precision(counts)[k] == pytest.approx(ap, abs=1e-3)  # rounding in float32
        expected = precision_recall_curve(labels == k, rounded)
        places = (expected[2] * CURVE_BINS).astype(int)
        for mine, theirs in zip((curve.precision, curve.recall), expected[:2], strict=True):
            np.testing.assert_allclose(mine[places], theirs[:-1], atol=2e-3)


def counted():
    curves = CurveCounts(CLASSES)
    evaluate_dataset(noisy(), NoisyImages(), curves=curves)
    return curves.counts


def test_two_ranks_count_what_one_counts(run_ranks):
    assert all(torch.equal(found, counted()) for found in run_ranks(2, counted))


@pytest.mark.parametrize("wanted", [{"precision": 0.8}, {"recall": 0.6}, {"recall": 1.0}])
def test_predictions_by_the_threshold_have_the_precision_and_recall_that_were_told(counts, wanted):
    """Pixel by pixel, and no other threshold is better."""
    curve = ClassCurve.of(counts[2])
    best = curve.best(**wanted)
    predictor = noisy().by(rule_of([("c", best / CURVE_BINS)], "abcd"))
    hits = predicted = labelled = 0
    for image, label in map(NoisyImages().__getitem__, range(5)):
        (found,) = predictor.label_maps([torch.from_numpy(image)], place="x")
        valid = label != IGNORE_INDEX
        is_found = found.label.numpy()[valid] == 2
        hits += int((is_found & (label[valid] == 2)).sum())
        predicted += int(is_found.sum())
        labelled += int((label == 2).sum())
    pair = hits / predicted, hits / labelled
    assert pair == (curve.precision[best], curve.recall[best])
    kept, other = pair if "precision" in wanted else pair[::-1]
    assert kept >= next(iter(wanted.values()))
    pairs = np.stack([curve.precision, curve.recall], axis=1)[1:]
    pairs = pairs if "precision" in wanted else pairs[:, ::-1]
    enough = pairs[:, 0] >= next(iter(wanted.values()))
    assert other == pairs[enough, 1].max()


@pytest.mark.parametrize("thresholds", [{0: 0.2}, {1: 0.9}, {0: 0.2, 2: 0.3}, {0: 0.5, 1: 0.1}])
def test_a_class_is_there_only_from_its_threshold_on(thresholds):
    p = torch.rand((3, 20, 30), generator=torch.Generator().manual_seed(0))
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


def test_predict_takes_thresholds_for_images_of_any_kind(run, tmp_path):  # noqa: F811
    image = photo(20, 30) // 64
    save(tmp_path / "a.png", image)
    p = np.exp(image.astype(float))
    p /= p.sum(2, keepdims=True)
    expected = np.where(p[..., 1] >= 0.1, 1, p[..., [0, 2]].argmax(2) * 2)
    assert (expected != p.argmax(2)).mean() > 0.2
    for mode in ("whole", "slide"):
        how = {"set": [f"eval.mode={mode}", "eval.crop_size=[16, 16]"], "overwrite": True}
        assert run(tmp_path / "a.png", thresholds=[("greenish", 0.1)], **how) == 0
        label = read(tmp_path / "out/labels/a.png")
        assert np.array_equal(label, np.array([7, 23, 11])[expected])
    for given, words in (
        ([("sky", 0.1)], "--threshold: no class sky; there are reddish"),
        ([("bluish", 0.1), ("bluish", 0.2)], "--threshold: once for each class"),
        ([(x, 0.1) for x in ("bluish", "greenish", "reddish")], "one class needs to be without"),
    ):
        with pytest.raises(ConfigError, match=words):
            run(tmp_path / "a.png", thresholds=given, overwrite=True)


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_pixels_that_are_not_sure_enough_have_no_class(run, tmp_path, mode):  # noqa: F811
    """In label maps, and counted beside those whose image has no value; thresholds go before."""
    image = photo(20, 30) // 64
    image[:, :4] = 255
    tags = [(42113, "s", 0, "255", True)]
    tifffile.imwrite(tmp_path / "a.tif", image, photometric="rgb", extratags=tags)
    p = np.exp(image.astype(float))
    p /= p.sum(2, keepdims=True)
    how = {"set": [f"eval.mode={mode}", "eval.crop_size=[16, 16]"], "overwrite": True}
    for thresholds in ([], [("greenish", 0.2)]):
        label = p.argmax(2)
        is_greenish = np.zeros(label.shape, bool)
        if thresholds:
            is_greenish = p[..., 1] >= 0.2
            label = np.where(is_greenish, 1, p[..., [0, 2]].argmax(2) * 2)
        unknown = (p.max(2) < 0.6) & ~is_greenish
        unknown[:, :4] = False
        expected = np.where(unknown, 0, np.array([7, 23, 11])[label])
        expected[:, :4] = 0
        files = {"table": tmp_path / "t.csv", "thresholds": thresholds}
        assert run(tmp_path / "a.tif", unknown_below=0.6, **files, **how) == 0
        found = np.array(Image.open(tmp_path / "out/labels/a.png"))
        assert np.array_equal(found, expected)
        with (tmp_path / "t.csv").open(newline="") as opened:
            rows = list(csv.DictReader(opened))
        assert {row["unknown_px"] for row in rows} == {str(int(unknown.sum()))}
        assert {row["no_value_px"] for row in rows} == {"80"}
        assert unknown.sum() > 20
        counts = [int((expected == raw).sum()) for raw in (7, 23, 11)]
        assert [int(row["pixels"]) for row in rows] == counts
    with pytest.raises(ConfigError, match="--unknown-below: no effect: of 3 classes one always"):
        run(tmp_path / "a.tif", unknown_below=0.3, overwrite=True)


def test_eval_tells_curves_and_the_threshold(command, tmp_path, capsys):  # noqa: F811
    plain = command()
    assert "curves" not in plain
    file = tmp_path / "curves.csv"
    found = command(curves=file, class_name="road", recall=0.9)["curves"]
    output = capsys.readouterr().out
    point = found["operating_point"]
    with file.open(newline="") as opened:
        rows = [row for row in csv.DictReader(opened) if row["class"] == "road"]
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
    counts = torch.zeros(2, 2, CURVE_BINS, dtype=torch.int64)
    counts[0, 0, 700], counts[0, 1, 700], counts[0, 1, 0] = 3, 1, 1
    (*_, line), found = ASKED.answer(counts, ["a", "b"])
    assert line == "a: no threshold has a precision of 50.00%; the highest is 25.00%"
    assert found["operating_point"] == {"class": "a", "threshold": None}
    counts[0, 1, 900] = 2
    (*_, line), found = ASKED.answer(counts, ["a", "b"])
    assert found["operating_point"] == {
        "class": "a",
        "threshold": 700 / 1024,
        "precision": 0.5,
        "recall": 0.75,
    }
    assert line.endswith("by predict --threshold a=0.68359375")
    # Of its four pixels two are found first, one beside three others, and one last.
    ap = 2 / 4 * 1 + 1 / 4 * 3 / 6 + 1 / 4 * 4 / 7
    assert found["AP"] == {"a": pytest.approx(ap), "b": None}


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"precision": 0.5}, "--precision, --recall: need --class NAME"),
        ({"class_name": "road"}, "--class: needs either --precision or --recall"),
        ({"class_name": "road", "precision": 0.5, "recall": 0.5}, "--class: needs either"),
        ({"class_name": "cloud", "recall": 0.5}, "--class: no class cloud; there are road,"),
    ],
)
def test_questions_without_an_answer_are_refused(command, given, words):  # noqa: F811
    with pytest.raises(ConfigError, match=words):
        command(**given)
