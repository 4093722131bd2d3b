"""Instance-weighted scores and scores of categories, by the formulas written out naively."""

import math

import numpy as np
import pytest
import torch

from segtrain.data.read.classes import load_class_file
from segtrain.distributed import collectives as dist
from segtrain.evaluation.score_table import InstanceCounts, group_scores
from segtrain.metrics import ConfusionMatrix

CLASSES = load_class_file("cityscapes")
ROAD, PERSON, RIDER, CAR, BUS = 0, 11, 12, 13, 15
RAW = {ROAD: 7, PERSON: 24, RIDER: 25, CAR: 26, BUS: 28}
CARAVAN = 29


def images(count=5, seed=0):
    """(pred, label, instances) of each image: train ids, with groups and ignored instances."""
    rng = np.random.default_rng(seed)
    found = []
    for i in range(count):
        size = (20 + i, 31)
        label = rng.choice([ROAD, PERSON, RIDER, CAR, 255], size).astype(np.uint8)
        wrong = rng.random(size) < 0.3
        pred = np.where(wrong, rng.choice([ROAD, PERSON, RIDER, CAR, BUS], size), label)
        pred[pred == 255] = CAR
        raw = np.vectorize({**RAW, 255: CARAVAN}.get)(label).astype(np.uint16)
        number = rng.integers(0, 4, size)
        single = np.isin(raw, (24, 25, 26, CARAVAN)) & (number > 0)
        instances = np.where(single, 1000 * raw + number, raw).astype(np.uint16)
        found.append((pred.astype(np.uint8), label, instances))
    return found


def counted(data):
    matrix, instances = ConfusionMatrix(19), InstanceCounts(CLASSES, [])
    for pred, label, ids in data:
        matrix.update(torch.from_numpy(pred), torch.from_numpy(label))
        instances.update(pred, ids)
    return matrix, instances


def scores_of(data):
    return group_scores(*counted(data)[:1], CLASSES, counted(data)[1])


def naive_iiou(data, group):
    """iTP / (iTP + FP + iFN) with a loop over instances; the group's classes count as one."""
    right = wrong = false = 0.0
    for pred, label, ids in data:
        false += (np.isin(pred, group) & ~np.isin(label, group) & (label != 255)).sum()
        for value in np.unique(ids[ids >= 1000]):
            own = next((t for t in group if RAW.get(t) == value // 1000), None)
            if own is not None:
                mask = ids == value
                weight = CLASSES.classes[own].instance_px / mask.sum()
                right += weight * (mask & np.isin(pred, group)).sum()
                wrong += weight * (mask & ~np.isin(pred, group)).sum()
    return right / (right + false + wrong)


def test_iiou_matches_a_loop_over_the_instances():
    data = images()
    found = scores_of(data)
    for train_id in (PERSON, RIDER, CAR):
        expected = naive_iiou(data, [train_id])
        assert found.iiou[train_id] == pytest.approx(expected, rel=1e-12)
    human, vehicle = (found.categories.index(name) for name in ("human", "vehicle"))
    assert found.category_iiou[human] == pytest.approx(naive_iiou(data, [11, 12]), rel=1e-12)
    assert found.category_iiou[vehicle] == pytest.approx(
        naive_iiou(data, list(range(13, 19))), rel=1e-12
    )
    assert found.iiou[BUS] == 0.0  # predicted, without an instance
    assert math.isnan(found.iiou[ROAD])
    assert math.isnan(found.iiou[16])  # train: neither


def test_without_instances_only_categories_are_scored():
    matrix, _ = counted(images(2))
    found = group_scores(matrix, CLASSES, None)
    assert all(map(math.isnan, (*found.iiou, *found.category_iiou)))
    assert found.category_iou == scores_of(images(2)).category_iou
    assert group_scores(matrix, load_class_file("camvid"), None) is None


def scores_of_rank(splits):
    first = sum(splits[: dist.rank()])
    matrix, instances = counted(images(7)[first : first + splits[dist.rank()]])
    matrix.sum_over_ranks()
    instances.sum_over_ranks()
    return group_scores(matrix, CLASSES, instances)


def test_neither_the_order_nor_the_number_of_ranks_changes_a_bit(run_ranks):
    expected, splits = scores_of(images(7)), (1, 0, 6)
    assert repr(scores_of(images(7)[::-1])) == repr(expected)
    for found in run_ranks(len(splits), scores_of_rank, splits):
        assert repr(found) == repr(expected)
