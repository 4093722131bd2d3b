import csv
import json
import math

import numpy as np
import pytest
import torch

from segtrain.metrics import (
    Calibration,
    ConfusionMatrix,
    _histogram_without_wait,
    calibration_error,
    reliability,
    score_table,
    thin_classes,
)
from segtrain.score.records import scores_csv
from segtrain.types import IGNORE_INDEX

NAMES = ["road", "sky", "car"]


def random_pair(num_classes, *, seed=0, shape=(2, 30, 40)):
    generator = torch.Generator().manual_seed(seed)
    label = torch.randint(0, num_classes, shape, generator=generator)
    pred = torch.where(
        torch.rand(shape, generator=generator) < 0.6,
        label,
        torch.randint(0, num_classes, shape, generator=generator),
    )
    label[torch.rand(shape, generator=generator) < 0.2] = IGNORE_INDEX
    return pred.byte(), label.byte()


def matrix_of(pred, label, num_classes):
    matrix = ConfusionMatrix(num_classes)
    matrix.update(torch.as_tensor(pred), torch.as_tensor(label))
    return matrix


def scores_of(counts):
    matrix = ConfusionMatrix(len(counts))
    matrix.counts += torch.tensor(counts)
    return matrix.scores()


def test_scores_of_a_small_matrix_match_the_hand_computed_ones():
    scores = scores_of([[6, 2, 0], [1, 3, 0], [0, 0, 4]])
    assert scores.iou == (6 / 9, 3 / 6, 1.0)
    assert scores.recall == (6 / 8, 3 / 4, 1.0)
    assert scores.precision == (6 / 7, 3 / 5, 1.0)
    assert scores.dice == (12 / 15, 6 / 9, 1.0)
    assert scores.class_frequency == (8 / 16, 4 / 16, 4 / 16)
    assert scores.mean_iou == pytest.approx((6 / 9 + 0.5 + 1) / 3, rel=1e-15)
    assert scores.mean_recall == pytest.approx((0.75 + 0.75 + 1) / 3, rel=1e-15)
    assert scores.mean_precision == pytest.approx((6 / 7 + 0.6 + 1) / 3, rel=1e-15)
    assert scores.mean_dice == pytest.approx((0.8 + 2 / 3 + 1) / 3, rel=1e-15)
    assert scores.pixel_acc == 13 / 16
    assert scores.freq_weighted_iou == pytest.approx(6 / 9 / 2 + 0.5 / 4 + 1 / 4, rel=1e-15)
    assert scores.num_pixels == 16


@pytest.mark.parametrize("num_cells", [12, 420, 65792])
def test_the_histogram_for_devices_counts_as_bincount_does(num_cells):
    cells = torch.randint(0, num_cells, (30_011,), generator=torch.Generator().manual_seed(0))
    cells[:7000] = 3
    expected = torch.bincount(cells, minlength=num_cells)
    assert torch.equal(_histogram_without_wait(cells.int(), num_cells), expected)


@pytest.mark.parametrize(("pred", "label", "name"), [(3, 1, "pred"), (1, 3, "label")])
def test_a_device_says_late_what_is_out_of_range(pred, label, name):
    matrix = ConfusionMatrix(3)
    matrix._checks_late = True  # as on a device
    matrix.update(torch.tensor([2, 0, pred]).byte(), torch.tensor([255, 0, label]).byte())
    assert matrix.counts.sum() == 1
    for read in (matrix.scores, matrix.sum_over_ranks):
        with pytest.raises(ValueError, match=f"{name}: expected 0 to 2, found 1 pixels above"):
            read()


@pytest.mark.parametrize("num_classes", [1, 2, 19, 150, 254, 255])
def test_counts_match_one_count_per_pair_of_classes(num_classes):
    pred, label = random_pair(num_classes)
    expected = np.zeros((num_classes, num_classes), dtype=np.int64)
    valid = label.numpy() != IGNORE_INDEX
    np.add.at(expected, (label.numpy()[valid], pred.numpy()[valid]), 1)
    assert np.array_equal(matrix_of(pred, label, num_classes).counts.numpy(), expected)


@pytest.mark.fault(72)
@pytest.mark.parametrize(
    ("counts", "iou", "recall"),
    [
        ([[4, 0, 0], [0, 0, 0], [2, 0, 2]], (4 / 6, math.nan, 2 / 4), (1, math.nan, 2 / 4)),
        ([[3, 1], [0, 0]], (3 / 4, 0), (3 / 4, math.nan)),  # predicted, but never labelled
    ],
)
def test_a_class_that_is_absent_is_left_out_of_the_mean(counts, iou, recall):
    scores = scores_of(counts)
    for found, mean, expected in (
        (scores.iou, scores.mean_iou, iou),
        (scores.recall, scores.mean_recall, recall),
    ):
        assert found == pytest.approx(expected, rel=1e-15, nan_ok=True)
        assert mean == pytest.approx(np.nanmean(expected), rel=1e-15)


BYTES = torch.tensor([[0, 1]], dtype=torch.uint8)


@pytest.mark.parametrize(
    ("pred", "label", "message"),
    [
        (BYTES + 2, BYTES, r"pred: expected 0 to 2, found \[3\]"),
        (BYTES, BYTES * 7, r"label: expected 0 to 2, found \[7\]"),
        (BYTES * IGNORE_INDEX, BYTES, r"pred: expected 0 to 2, found \[255\]"),
        (BYTES, BYTES.T, r"pred \(1, 2\) .*, label \(2, 1\)"),
        (BYTES, BYTES.long(), "label .* torch.int64"),
    ],
)
def test_values_out_of_range_are_refused_and_nothing_is_counted(pred, label, message):
    matrix = ConfusionMatrix(3)
    with pytest.raises(ValueError, match=message):
        matrix.update(pred, label)
    assert matrix.counts.sum() == 0


@pytest.mark.parametrize("num_classes", [0, 256])
def test_numbers_of_classes_that_bytes_cannot_hold_are_refused(num_classes):
    with pytest.raises(ValueError, match="num_classes"):
        ConfusionMatrix(num_classes)


def test_the_table_has_the_scores_of_each_class_in_percent():
    scores = scores_of([[3, 1, 0], [1, 3, 0], [0, 0, 0]])
    _, *rows, _, _ = score_table(scores, NAMES, [0.25, 0.5, math.nan])
    shown = [(row.split()[0], row.split()[1], row.split()[-1]) for row in rows]
    assert shown == [("road", "60.00", "25.00"), ("sky", "60.00", "50.00"), ("car", "-", "-")]


def test_what_is_left_out_of_a_mean_is_said():
    lines = score_table(scores_of([[3, 0, 0], [1, 0, 0], [0, 0, 0]]), NAMES)
    assert lines[-2:] == [
        "left out of mIoU, neither labelled nor predicted: car",
        "left out of mPrecision, never predicted: sky",
    ]


def test_classes_of_which_a_split_shows_nearly_nothing_are_named():
    scores = scores_of([[3000, 0, 0], [2, 3, 0], [0, 0, 0]])
    nothing, little = thin_classes(scores, NAMES, "val")
    assert nothing.startswith("warning: no label of val shows car: such classes count as 0 in mIoU")
    assert little == "warning: val shows very little of sky (5 pixels): each is 1/2 of mIoU"
    assert thin_classes(scores_of([[100, 0, 0], [0, 100, 0], [0, 0, 100]]), NAMES, "val") == []
    (nothing,) = thin_classes(scores_of([[0, 0, 0]] * 3), NAMES, "val")
    assert nothing == "warning: no pixel of val is labelled: there is nothing to score"


def test_a_mean_may_leave_out_classes():
    """As the mean, without classes of no pixel: of car here; sky is predicted, and has IoU 0."""
    scores = scores_of([[3, 1, 0], [0, 0, 0], [0, 0, 0]])
    assert scores.mean_iou_without(["road"], NAMES) == 0
    assert scores.mean_iou_without(["sky"], NAMES) == 3 / 4
    assert scores.mean_iou_without([], NAMES) == scores.mean_iou
    assert math.isnan(scores.mean_iou_without(["road", "sky"], NAMES))


def test_scores_for_json_and_scalars_have_no_nan():
    scores = scores_of([[3, 1, 0], [0, 0, 0], [0, 0, 0]])
    text = json.dumps(scores.to_dict(NAMES), allow_nan=False)
    assert json.loads(text)["classes"][2] == {"name": "car", "share": 0} | dict.fromkeys(
        ("IoU", "Dice", "precision", "recall", "area_ratio")
    )
    rows = list(csv.DictReader(scores_csv(scores, NAMES).splitlines()))
    assert [row["IoU"] for row in rows] == ["0.750000", "0.000000", "", "0.375000"]
    scalars = scores.scalars(NAMES)
    assert (scalars["eval/IoU/road"], scalars["eval/IoU/sky"]) == (3 / 4, 0)
    assert "eval/IoU/car" not in scalars
    assert set(scalars) >= {"eval/mIoU", "eval/mAcc", "eval/aAcc", "eval/fwIoU"}


def test_the_reliability_curve_is_that_of_scikit_learn():
    from sklearn.calibration import calibration_curve

    rng = np.random.default_rng(0)
    label, known = rng.integers(0, 3, 4000, np.uint8), rng.uniform(0.3, 1, 4000)
    pred = np.where(rng.random(4000) < known**2, label, (label + 1) % 3)
    label[rng.random(4000) < 0.1] = IGNORE_INDEX
    known[::9] = 1
    calibration = Calibration()
    for part in np.array_split(np.arange(4000), 3):
        calibration.update(*(torch.from_numpy(x[part]) for x in (known, pred, label)))
    valid = label != IGNORE_INDEX
    right, known = (pred == label)[valid], known[valid]
    accuracy, confidence = calibration_curve(right, known, n_bins=15)
    found = reliability(calibration.counts)
    assert [b.accuracy for b in found] == pytest.approx(accuracy, abs=5e-3)
    assert [b.confidence for b in found] == pytest.approx(confidence, abs=5e-4)
    share = np.histogram(known, 15, (0, 1))[0]
    share = share[share > 0] / len(known)
    assert [b.share for b in found] == pytest.approx(share, abs=5e-3)
    assert sum(b.share for b in found) == pytest.approx(1)
    expected = (share * np.abs(accuracy - confidence)).sum()
    assert calibration_error(calibration.counts) == pytest.approx(expected, abs=5e-4)
    assert np.isnan(calibration_error(Calibration().counts))
    broken, one = Calibration(), torch.ones(1, dtype=torch.uint8)
    broken.update(torch.tensor([math.nan]), one, one)
    assert broken.counts[1, 0] == broken.counts.sum() == 1
