"""The scores of ADE20K and CamVid, by their own evaluators written out naively.

Each evaluator works on the raw values of label files and of the files that segtrain would submit.
segtrain's side reads the same label files through its class file. Cityscapes has its real evaluator
in tests/test_evaluate.py.
"""

import math

import numpy as np
import pytest
import torch
from PIL import Image

from segtrain.data.read.classes import ClassFile, SegClass, load_class_file
from segtrain.data.read.label_formats import label_format_of
from segtrain.metrics import Calibration, ConfusionMatrix
from segtrain.task.outcome import ClassOutcome
from segtrain.task.score_table import (
    InstanceCounts,
    ade20k_scores,
    group_scores,
)

SIZES = [(24, 31), (17, 40), (30, 22)]


def evaluated(tmp_path, name, labels, *, layout, label_format="ids", highest=255):
    """The scores of random predictions on these label files, and the predictions as raw ids.

    name: of the class file. labels: arrays of raw ids or colours. Two thirds of the pixels are
    predicted right. highest: ids above it are predicted as 1.
    """
    rng, classes = np.random.default_rng(0), load_class_file(name)
    matrix, submitted = ConfusionMatrix(classes.num_classes), []
    train_ids = np.vectorize(classes.train_id_of.get, otypes=[np.uint8])
    for i, raw in enumerate(labels):
        Image.fromarray(raw).save(tmp_path / f"{i}.png")
        label = label_format_of(label_format).read(tmp_path / f"{i}.png", classes)
        other = rng.integers(0, classes.num_classes, label.shape)
        pred = np.where((label == 255) | (rng.random(label.shape) < 1 / 3), other, label)
        ids = np.array(classes.write_ids)[pred]
        submitted.append(np.where(ids > highest, 1, ids))
        matrix.update(torch.from_numpy(train_ids(submitted[-1])), torch.from_numpy(label))
    counted = ClassOutcome(matrix, Calibration(), torch.zeros(0), 0)
    report = counted.report(classes.names, classes, instances=None, layout=layout)
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
    ours, results = evaluated(tmp_path, "ade20k", labels, layout="ade20k", highest=highest)
    mean, accuracy = ade20k_challenge(labels, results)
    scores = {"mIoU": mean, "pixel accuracy": accuracy, "score": (mean + accuracy) / 2}
    expected = {f"ADE20K {key}": score for key, score in scores.items()}
    assert ours["benchmark"] == pytest.approx(expected, abs=1e-9)
    assert ours["mIoU"] == pytest.approx(mean * 150 / highest, abs=1e-9)
    assert 0.1 < mean < 0.7
    assert math.isnan(ade20k_scores(ConfusionMatrix(150).scores())["ADE20K mIoU"])


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
    labels = [truth.astype(np.uint8) for truth in truths]
    if form == "colors":
        colors = [*CAMVID_GROUPS.values(), [(0, 0, 0)]]
        labels = [
            np.array([rng.choice(colors[k]) for k in one.flat], np.uint8).reshape(*one.shape, 3)
            for one in labels
        ]
    name = {"ids": "camvid", "colors": "camvid_colors"}[form]
    ours, results = evaluated(tmp_path, name, labels, layout="camvid", label_format=form)
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


def test_without_instances_only_categories_are_scored():
    """And without categories nothing. A union of classes has the pixels of all of them."""
    matrix = ConfusionMatrix(19)
    matrix.counts[11:13, 11:14] = torch.tensor([[3, 2, 4], [1, 5, 0]])  # person, rider; and car
    found = group_scores(matrix, load_class_file("cityscapes"), None)
    by_name = dict(zip(found.categories, found.category_iou, strict=True))
    assert by_name["human"] == 11 / 15
    assert by_name["vehicle"] == 0
    assert math.isnan(by_name["flat"])
    assert all(map(math.isnan, (*found.iiou, *found.category_iiou)))
    assert group_scores(matrix, load_class_file("camvid"), None) is None

    # Of a category in which only one class has instances, that class alone is scored by them.
    about = {"category": "all"}
    first = SegClass("a", (1, 1, 1), (1,), **about, instance_px=4.0)
    mixed = ClassFile("two", (first, SegClass("b", (2, 2, 2), (2,), **about)), (), (0, 0, 0))
    instances, matrix = InstanceCounts(mixed, []), ConfusionMatrix(2)
    instances.update(np.zeros((2, 3), np.uint8), np.full((2, 3), 1001, np.uint16))
    found = group_scores(matrix, mixed, instances)
    assert found.iiou[0] == 1
    assert math.isnan(found.category_iiou[0])
