"""Borders of classes, beside all distances between them and the published boundary IoU."""

import math
from itertools import product

import numpy as np
import pytest
from scipy import ndimage
from test_evaluate import cityscapes, command, know_the_colors

from segtrain.score.surfaces import SurfaceScores, near_border
from segtrain.task.prediction import Prediction
from segtrain.types import IGNORE_INDEX

__all__ = ["cityscapes", "command", "know_the_colors"]  # fixtures
NAMES = ["ground", "disc", "bar", "nowhere"]
SIZE = 70, 90


def drawn(shift, *, bar=True):
    """A disc of radius 15 at (30, 40 + shift), and a bar of 10 x 40 whose height is 10 + shift."""
    y, x = np.mgrid[: SIZE[0], : SIZE[1]]
    label = ((y - 30) ** 2 + (x - 40 - shift) ** 2 <= 225).astype(np.uint8)
    if bar:
        label[55 : 65 + shift, 20:60] = 2
    return label


def scores(pairs, tolerance=2.0):
    found = SurfaceScores(NAMES, tolerance)
    for i, (label, pred) in enumerate(pairs):
        found.add(Prediction(i, np.zeros((*SIZE, 3), np.uint8), label, pred))
    return found


def border(mask):
    """(N, 2): pixels of which one of four neighbours is not in the mask, or outside the image."""
    near = np.pad(mask, 1)
    inside = near[:-2, 1:-1] & near[2:, 1:-1] & near[1:-1, :-2] & near[1:-1, 2:]
    return np.argwhere(mask & ~inside)


def by_all_pairs(label, pred, tolerance):
    """Of the distances of all border pixels from all others: the 95th percentile, and Dice."""
    ends = border(label)[:, None], border(pred)
    far = np.hypot(*np.moveaxis(ends[0] - ends[1], -1, 0))
    one, other = far.min(1), far.min(0)
    distance = max(np.percentile(one, 95), np.percentile(other, 95))
    near = (one <= tolerance).sum() + (other <= tolerance).sum()
    return distance, near / (len(one) + len(other))


@pytest.mark.parametrize("tolerance", [0.0, 1.0, 2.5])
def test_distances_are_those_of_all_pairs_on_whole_images(tolerance):
    rng = np.random.default_rng(0)
    noisy = np.where(rng.random(SIZE) < 0.1, rng.integers(0, 3, SIZE), drawn(1)).astype(np.uint8)
    unsure = drawn(0)
    unsure[25:60, 35:50] = IGNORE_INDEX  # of no class in either
    pairs = [(drawn(0), drawn(3)), (drawn(0), noisy), (unsure, drawn(3))]
    found = scores(pairs, tolerance).to_dict()
    expected = [
        [
            by_all_pairs(label == k, (pred == k) & (label != IGNORE_INDEX), tolerance)
            for label, pred in pairs
        ]
        for k in range(3)
    ]
    for k, row in enumerate(found["classes"][:3]):
        distance, dice = np.mean(expected[k], axis=0)
        assert (row["HD95_px"], row["surface_dice"]) == pytest.approx((distance, dice))
    assert found["mean_HD95_px"] == pytest.approx(np.mean(expected, axis=1)[:, 0].mean())


def test_an_image_that_only_one_shows_counts_as_said():
    pairs = [(drawn(0), drawn(0)), (drawn(0), drawn(0, bar=False)), (drawn(0, bar=False),) * 2]
    found = scores(pairs)
    bar, nowhere = found.to_dict()["classes"][2:]
    assert (bar["num_images"], bar["num_one_sided"]) == (2, 1)
    assert (bar["HD95_px"], bar["surface_dice"]) == (0, 0.5)
    counts = dict.fromkeys(("num_images", "num_one_sided"), 0)
    scores_of = dict.fromkeys(("HD95_px", "surface_dice", "boundary_IoU"))
    assert nowhere == {"name": "nowhere", **counts, **scores_of}
    nothing = scores([(np.full(SIZE, IGNORE_INDEX, np.uint8), drawn(0))])
    assert "warning" not in "".join([*found.lines(), *nothing.lines()])
    (line,) = (line for line in found.lines() if line.startswith("bar"))
    assert line.split()[1:5] == ["2", "1", "0.00", "50.00"]


def test_the_boundary_iou_is_the_published_formula():
    """Pixels of a mask no farther than d from its border, by the chessboard distance."""
    distance = max(1, round(0.02 * math.hypot(*SIZE)))
    sums = np.zeros((3, 2), int)
    pairs = [(drawn(0), drawn(2)), (drawn(1), drawn(4))]
    for pair, k in product(pairs, range(3)):
        near = []
        for one in pair:
            depth = ndimage.distance_transform_cdt(np.pad(one == k, 1), "chessboard")
            near.append((one == k) & (depth[1:-1, 1:-1] <= distance))
            assert np.array_equal(near_border((one == k).astype(np.uint8)), near[-1])
        sums[k] += [(near[0] & near[1]).sum(), (near[0] | near[1]).sum()]
    assert near_border(np.ones((10, 12), np.uint8)).sum() == 2 * (10 + 12) - 4
    found = [row["boundary_IoU"] for row in scores(pairs).to_dict()["classes"][:3]]
    assert found == pytest.approx((sums[:, 0] / sums[:, 1]).tolist())


def test_borders_that_are_ignored_pixels_are_warned_about():
    label = drawn(0)
    ring = ndimage.binary_dilation(label == 1, iterations=3) & (label != 1)
    label[ring] = IGNORE_INDEX
    lines = scores([(label, drawn(2))]).lines()
    edge = sum(
        (label == k) & ~ndimage.binary_erosion(label == k, np.ones((3, 3)), border_value=1)
        for k in range(3)
    )
    beside = ndimage.binary_dilation(label == IGNORE_INDEX, np.ones((3, 3)))
    share = f"{(edge * beside).sum() / edge.sum():.1%}"
    assert lines[-1].startswith(f"warning: {share} of the borders in labels are those of ignored")


def test_classes_that_overlap_are_measured_one_by_one():
    pair = drawn(0), drawn(2)
    layers = [(x[..., None] == np.arange(4)).astype(np.uint8) for x in pair]
    assert scores([layers]).to_dict() == scores([pair]).to_dict()


def test_eval_writes_them(command, capsys):
    found = command(surface=1.0)["surfaces"]
    assert found["tolerance_px"] == 1
    assert len(found["classes"]) == 19
    assert 0 < found["mean_surface_dice"] < 1
    assert "borders: surface Dice within 1 px" in capsys.readouterr().out
