"""The scores of ADE20K and CamVid, by their own evaluators written out naively.

Each evaluator works on the raw values of label files and of the files that segtrain would submit.
segtrain's side reads the same label files through its class file. Cityscapes has its real evaluator
in tests/test_evaluate.py.
"""

import numpy as np
import pytest
import torch
from PIL import Image

from segtrain.data.read.classes import load_class_file
from segtrain.data.read.labels import read_label
from segtrain.evaluation.score_table import make_report
from segtrain.evaluation.scoring import Outcome
from segtrain.metrics import Calibration, ConfusionMatrix

SIZES = [(24, 31), (17, 40), (30, 22)]


def counted(matrix):
    """What an evaluation with these pixels has counted, without probabilities."""
    return Outcome(matrix, Calibration(), torch.zeros(0), 0)


def evaluated(tmp_path, classes, labels, *, layout, label_format="ids", seed=0):
    """The scores of random predictions on these label files, and the predictions as raw ids.

    labels: arrays of raw ids or colours. Two thirds of the pixels are predicted right.
    """
    rng = np.random.default_rng(seed)
    matrix, submitted = ConfusionMatrix(classes.num_classes), []
    for i, raw in enumerate(labels):
        Image.fromarray(raw).save(tmp_path / f"{i}.png")
        label = read_label(tmp_path / f"{i}.png", classes, label_format)
        other = rng.integers(0, classes.num_classes, label.shape).astype(np.uint8)
        pred = np.where((label == 255) | (rng.random(label.shape) < 1 / 3), other, label).astype(
            np.uint8
        )
        matrix.update(torch.from_numpy(pred), torch.from_numpy(label))
        submitted.append(np.array(classes.write_ids)[pred])
    report = make_report(counted(matrix), classes.names, classes, None, layout=layout)
    return report.to_dict(), submitted


def ade20k_challenge(labels, results):
    """demoEvaluation.m and utils_eval.py of the scene parsing challenge: mean IoU and accuracy."""
    intersections, unions = np.zeros((2, 150, len(labels)))
    correct = labelled = 0
    for i, (truth, result) in enumerate(zip(labels, results, strict=True)):
        judged = result * (truth > 0)
        ids = range(1, 151)
        both = np.array([((judged == k) & (truth == k)).sum() for k in ids])
        intersections[:, i] = both
        unions[:, i] = [(judged == k).sum() + (truth == k).sum() for k in ids] - both
        correct += ((truth == result) & (truth > 0)).sum()
        labelled += (truth > 0).sum()
    iou = intersections.sum(1) / (np.spacing(1) + unions).sum(1)
    return iou.mean(), correct / labelled


@pytest.mark.parametrize("highest", [150, 60])
def test_ade20k_scores_follow_the_scene_parsing_challenge(tmp_path, highest):
    """Up to class 60 alone, the other classes are absent and count as 0 there, but not in mIoU."""
    rng = np.random.default_rng(2)
    labels = [rng.integers(0, highest + 1, (4 * h, w)).astype(np.uint8) for h, w in SIZES]
    classes = load_class_file("ade20k")
    ours, results = evaluated(tmp_path, classes, labels, layout="ade20k")
    results = [np.where(r > highest, 1, r) for r in results]
    if highest < 150:
        ours = scores_of(tmp_path, classes, labels, results)
    mean, accuracy = ade20k_challenge(labels, results)
    assert ours["benchmark"] == pytest.approx(
        {
            "ADE20K mIoU": mean,
            "ADE20K pixel accuracy": accuracy,
            "ADE20K score": (mean + accuracy) / 2,
        },
        abs=1e-9,
    )
    assert ours["mIoU"] == pytest.approx(mean * 150 / highest, abs=1e-9)
    assert 0.1 < mean < 0.7


def scores_of(tmp_path, classes, labels, results):
    """The report of predictions given as raw ids."""
    matrix = ConfusionMatrix(classes.num_classes)
    for i, result in enumerate(results):
        pred = np.vectorize(classes.train_id_of.get)(result).astype(np.uint8)
        label = read_label(tmp_path / f"{i}.png", classes)
        matrix.update(torch.from_numpy(pred), torch.from_numpy(label))
    return make_report(counted(matrix), classes.names, classes, None, layout="ade20k").to_dict()


# The 32 classes of CamVid that make up each of the 11, by SegNet's grouping; void is in none.
CAMVID_GROUPS = {
    "Sky": [(128, 128, 128)],
    "Building": [(128, 0, 0), (0, 128, 64), (64, 192, 0), (64, 0, 64), (192, 0, 128)],
    "Pole": [(192, 192, 128), (0, 0, 64)],
    "Road": [(128, 64, 128), (128, 0, 192), (192, 0, 64)],
    "Pavement": [(0, 0, 192), (64, 192, 128), (128, 128, 192)],
    "Tree": [(128, 128, 0), (192, 192, 0)],
    "SignSymbol": [(192, 128, 128), (128, 128, 64), (0, 64, 64)],
    "Fence": [(64, 64, 128)],
    "Car": [(64, 0, 128), (64, 128, 192), (192, 128, 192), (192, 64, 128), (128, 64, 64)],
    "Pedestrian": [(64, 64, 0), (192, 128, 64), (64, 0, 192), (64, 128, 64)],
    "Bicyclist": [(0, 128, 192), (192, 0, 192)],
}


@pytest.mark.parametrize("form", ["ids", "colors"])
def test_camvid_scores_count_all_images_together_without_void(tmp_path, form):
    """SegNet's rule: IoU, class and global accuracy from one count over the split."""
    rng = np.random.default_rng(3)
    names = list(CAMVID_GROUPS)
    truths = [rng.integers(0, 12, size) for size in SIZES]  # 11 is void
    if form == "ids":
        labels = [truth.astype(np.uint8) for truth in truths]
    else:
        of_class = [*CAMVID_GROUPS.values(), [(0, 0, 0)]]
        labels = [
            np.array([[of_class[k][rng.integers(len(of_class[k]))] for k in row] for row in truth])
            for truth in truths
        ]
        labels = [label.astype(np.uint8) for label in labels]
    classes = load_class_file({"ids": "camvid", "colors": "camvid_colors"}[form])
    ours, results = evaluated(tmp_path, classes, labels, layout="camvid", label_format=form)
    truth = np.concatenate([one.ravel() for one in truths])
    result = np.concatenate([one.ravel() for one in results])[truth < 11]
    truth = truth[truth < 11]
    assert [row["name"] for row in ours["classes"]] == names
    for k, row in enumerate(ours["classes"]):
        both = ((truth == k) & (result == k)).sum()
        union = ((truth == k) | (result == k)).sum()
        assert row["IoU"] == pytest.approx(both / union, abs=1e-12)
        assert row["recall"] == pytest.approx(both / (truth == k).sum(), abs=1e-12)
    assert ours["aAcc"] == pytest.approx((truth == result).mean(), abs=1e-12)
    assert ours["num_pixels"] == truth.size
