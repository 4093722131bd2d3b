"""Scores by group, beside scikit-learn's of the pixels that eval has written."""

import csv
import re
from statistics import mean, stdev

import numpy as np
import pytest
from PIL import Image
from test_evaluate import NAMES, cityscapes, command, know_the_colors  # noqa: F401 - fixtures

from segtrain.data.read.classes import load_class_file
from segtrain.errors import ConfigError

GROUPS = {"aachen": NAMES[:2], "ulm": NAMES[2:]}


@pytest.fixture
def maps(cityscapes, tmp_path):  # noqa: F811
    """Labels and predictions of each group as train ids, of pixels that are not ignored."""
    train_id_of = load_class_file("cityscapes").train_id_of

    def read(path, city):
        raw = np.array(Image.open(next(path.glob(f"**/{city}"))))
        return np.vectorize(lambda one: train_id_of.get(one, 255))(raw).ravel()

    def of(group):
        label = np.concatenate(
            [read(cityscapes, f"{name}_gtFine_labelIds.png") for name in GROUPS[group]]
        )
        pred = np.concatenate(
            [read(tmp_path / "out", f"{name}_pred_labelIds.png") for name in GROUPS[group]]
        )
        return label[label != 255], pred[label != 255]

    return of


def test_scores_of_groups_are_those_of_their_pixels(command, tmp_path, maps, capsys):  # noqa: F811
    from sklearn.metrics import f1_score, jaccard_score

    pattern = re.compile(r"/val/(\w+)/")
    scores = command(group=pattern, save_predictions=str(tmp_path / "out"))
    output = capsys.readouterr().out
    found = scores["by_group"]
    assert [(row["group"], row["num_images"]) for row in found["groups"]] == [
        ("aachen", 2),
        ("ulm", 1),
    ]
    names, expected = [row["name"] for row in scores["classes"]], {}
    for row in found["groups"]:
        label, pred = maps(row["group"])
        present = sorted(set(label) | set(pred))
        for title, score in (("IoU", jaccard_score), ("Dice", f1_score)):
            theirs = score(label, pred, labels=present, average=None, zero_division=0)
            by_name = dict(zip((names[i] for i in present), theirs, strict=True))
            expected[row["group"], title] = by_name
            ours = {name: x for name, x in row[title].items() if x is not None}
            assert ours == pytest.approx(by_name)
            assert row[f"m{title}"] == pytest.approx(theirs.mean())
    pair = [expected[group, "Dice"]["road"] for group in GROUPS]
    over_groups = found["over_groups"]["Dice"]["road"]
    assert over_groups == pytest.approx({"mean": mean(pair), "sd": stdev(pair)})
    assert found["over_groups"]["IoU"]["train"] == {"mean": None, "sd": None}
    assert "mean and standard deviation over 2 groups" in output
    cells = [f"{100 * x:.2f}" for x in over_groups.values()]
    assert [line.split()[-2:] for line in output.splitlines() if line[:5] == "road "][1] == cells
    worst = min(found["groups"], key=lambda row: row["mIoU"])
    assert f"lowest mIoU of groups: {worst['group']} {100 * worst['mIoU']:.2f}, " in output


def test_pixels_of_each_image_are_told(command, tmp_path, maps):  # noqa: F811
    command(per_image=tmp_path / "i.csv", save_predictions=str(tmp_path / "out"))
    with (tmp_path / "i.csv").open(newline="") as file:
        (row,) = (row for row in csv.DictReader(file) if row["image"].endswith(NAMES[2]))
    label, pred = maps("ulm")
    for k, name in enumerate(one.name for one in load_class_file("cityscapes").classes):
        masks = (label == k) & (pred == k), label == k, pred == k
        kinds = "right_px", "labelled_px", "predicted_px"
        assert [int(row[f"{name} {kind}"]) for kind in kinds] == [int(one.sum()) for one in masks]


def test_an_image_of_no_group_is_named(command):  # noqa: F811
    with pytest.raises(ConfigError, match=r"--group \(ulm\): 2 images have no group: .*aachen"):
        command(group=re.compile("(ulm)"))
