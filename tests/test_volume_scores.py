"""Dice and Hausdorff distances of volumes beside all pairs of voxels, also those of folds."""

import json
import math
import re
import sys
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
from test_volumes import OBLIQUE, RAS, TRAINED, phantom, run, slices_of_three

from segtrain.config import DataConfig
from segtrain.data.read.cut_volumes import CutVolume, read_cut_volumes
from segtrain.data.read.volumes import Stack
from segtrain.desk.commands.folds import _volume_table
from segtrain.distributed import collectives as dist
from segtrain.errors import DataError
from segtrain.run.division import Division, Fold
from segtrain.score.volume_scores import VolumeRow, VolumeScores, VolumeTable
from segtrain.task.prediction import Prediction
from segtrain.types import IGNORE_INDEX

__all__ = ["slices_of_three"]
CLASSES = "ground", "ball", "nowhere"
SPACING = 3.0, 0.5, 0.8


def border(mask):
    """(n, 3): voxels of which one of six neighbours is not in the mask, or out of the volume."""
    near = np.pad(mask, 1)
    inside = np.ones_like(mask)
    for axis in range(3):
        for step in (-1, 1):
            inside &= np.roll(near, step, axis)[1:-1, 1:-1, 1:-1]
    return np.argwhere(mask & ~inside)


def by_all_pairs(label, pred, spacing):
    """The larger 95th percentile of both directed distances, in the unit of `spacing`."""
    one, other = (border(mask) * spacing for mask in (label, pred))
    far = np.sqrt(((one[:, None] - other) ** 2).sum(-1))
    return max(np.percentile(far.min(axis), 95) for axis in (0, 1))


def balls(shift=0.0, shape=(6, 13, 11)):
    grid = np.stack(np.mgrid[: shape[0], : shape[1], : shape[2]], -1) / shape
    return (((grid - (0.5, 0.4 + shift, 0.5)) ** 2).sum(-1) < 0.05).astype(np.uint8)


def volume_of(name, number=6, spacing=SPACING):
    names = [f"images/{name}/z{i}" for i in range(number)]
    return CutVolume(slices=names, size=(13, 11), axis="z", spacing_mm=spacing, stored=None)


def measured(tmp_path, pairs, volumes, groups):
    """The scores of volumes by their names, (label, pred) each; groups: of each volume."""
    content = {name: x.model_dump() for name, x in volumes.items()}
    (tmp_path / "volumes.json").write_text(json.dumps(content))
    paths = [
        (name, i, Path(f"{x}.tif")) for name in pairs for i, x in enumerate(volumes[name].slices)
    ]
    order = np.random.default_rng(0).permutation(len(paths)).tolist()  # as of several ranks
    paths = [paths[i] for i in order]
    images = [tmp_path / path for *_, path in paths]
    scores = VolumeScores(CLASSES, tmp_path, images, [groups[name] for name, *_ in paths])
    for i, (name, number, _) in enumerate(paths):
        label, pred = (x[number] for x in pairs[name])
        scores.add(Prediction(i, np.zeros((*label.shape, 1), np.uint8), label, pred))
    scores.sum_over_ranks()
    return scores.table


def test_distances_in_mm_and_dice_are_those_of_all_voxels(tmp_path):
    rng = np.random.default_rng(0)
    noisy = balls(0.1)
    noisy[rng.random(noisy.shape) < 0.02] = 1
    unsure = balls()
    unsure[:, 4:6] = IGNORE_INDEX
    pairs = {"a": (balls(), balls(0.2)), "b/ct": (balls(), noisy), "c": (unsure, balls(0.1))}
    groups = {"a": "p1", "b/ct": "p1", "c": "p2"}
    scores = measured(tmp_path, pairs, {name: volume_of(name) for name in pairs}, groups)
    found = scores.to_dict()
    expected = {}
    for row, (name, (label, pred)) in zip(found["volumes"], pairs.items(), strict=True):
        assert (row["volume"], row["group"], row["problem"]) == (name, groups[name], "")
        for k in range(2):
            known = label != IGNORE_INDEX
            one, other = label == k, (pred == k) & known
            expected[name, k] = by_all_pairs(one, other, SPACING)
            dice = 2 * (one & other).sum() / (one.sum() + other.sum())
            assert row["HD95_mm"][CLASSES[k]] == pytest.approx(expected[name, k])
            assert row["Dice"][CLASSES[k]] == pytest.approx(dice)
        assert (row["HD95_mm"]["nowhere"], row["Dice"]["nowhere"]) == (None, None)
    assert expected["a", 1] != pytest.approx(by_all_pairs(*(x == 1 for x in pairs["a"]), (1, 1, 1)))
    balls_mm = [expected[name, 1] for name in pairs]
    over = found["over_volumes"]["HD95_mm"]["ball"]
    assert (over["mean"], over["sd"]) == pytest.approx(
        (np.mean(balls_mm), np.std(balls_mm, ddof=1))
    )
    first, second = found["groups"]
    assert first["HD95_mm"]["ball"] == pytest.approx(np.mean(balls_mm[:2]))
    assert second["HD95_mm"]["ball"] == pytest.approx(balls_mm[2])
    label, pred = (np.stack([pairs[name][side] == 1 for name in ("a", "b/ct")]) for side in (0, 1))
    assert first["Dice"]["ball"] == pytest.approx(
        2 * (label & pred).sum() / (label.sum() + pred.sum())
    )
    again = VolumeTable.of(json.loads(json.dumps(found)))
    assert (again.to_dict(), again.lines()) == (found, scores.lines())
    (line,) = (x for x in scores.lines() if x.startswith("ball"))
    assert f"{np.mean(balls_mm):.2f}" in line.split()
    assert "warning" not in "".join(scores.lines())


def test_what_has_no_distance_is_said(tmp_path):
    same, none = (balls(), balls()), np.zeros_like(balls())
    pairs = {"a": same, "b": (balls(), none), "c": same, "d": same}
    volumes = {name: volume_of(name) for name in "ab"}
    volumes |= {"c": volume_of("c", spacing=None), "d": volume_of("d")}
    scores = measured(tmp_path, pairs, volumes, dict.fromkeys(pairs, "p"))
    rows = {row["volume"]: row for row in scores.to_dict()["volumes"]}
    assert [rows[x]["HD95_mm"]["ball"] for x in "abcd"] == [0, None, None, 0]
    assert [rows[x]["Dice"]["ball"] for x in "abcd"] == [1, 0, 1, 1]
    lines = scores.lines()
    assert [x.split()[-1] for x in lines if x.startswith(("ground", "ball", "nowhere"))] == [*"010"]
    assert lines[-1] == "warning: volumes without HD95: c (no spacing in mm at right angles)"
    volumes["d"] = volume_of("d", 9)  # three of its slices are in another split
    content = {name: x.model_dump() for name, x in volumes.items()}
    (tmp_path / "volumes.json").write_text(json.dumps(content))
    images = [tmp_path / f"images/d/z{i}.tif" for i in range(6)]
    part = VolumeScores(CLASSES, tmp_path, images, ["p"] * 6)
    for i in range(6):
        part.add(Prediction(i, np.zeros((13, 11, 1), np.uint8), balls()[i], balls()[i]))
    part.sum_over_ranks()
    (row,) = part.table.to_dict()["volumes"]
    assert (row["problem"], row["HD95_mm"]["ball"], row["Dice"]["ball"]) == (
        "6 of 9 slices",
        None,
        1,
    )


def test_a_volume_that_folds_divide_counts_once(tmp_path):
    pair = balls(), balls(0.2)
    (tmp_path / "volumes.json").write_text(json.dumps({"a": volume_of("a").model_dump()}))
    parts = []
    for numbers in ((0, 1, 4), (2, 3, 5)):
        images = [tmp_path / f"images/a/z{i}.tif" for i in numbers]
        scores = VolumeScores(CLASSES, tmp_path, images, ["p"] * 3)
        for i, number in enumerate(numbers):
            image = np.zeros((13, 11, 1), np.uint8)
            scores.add(Prediction(i, image, *(x[number] for x in pair)))
        scores.sum_over_ranks()
        parts.append(scores.table)
    found = VolumeTable.joined(parts).to_dict()
    whole = measured(tmp_path, {"a": pair}, {"a": volume_of("a")}, {"a": "p"}).to_dict()
    (row,), (same,) = found["volumes"], whole["volumes"]
    assert (row["voxels"], row["Dice"]) == (same["voxels"], same["Dice"])
    assert (row["problem"], row["HD95_mm"]["ball"]) == ("divided among folds", None)
    assert not VolumeTable.joined([VolumeTable.of({})])


SEVERAL = "warning: volumes whose slices have several groups, each taken for a group: "


def test_a_volume_whose_slices_have_several_groups_is_named(tmp_path):
    """In an evaluation and in folds: it is of none of them, and pooled with no other volume."""
    pair, images = (balls(), balls(0.2)), {}
    volumes = {name: volume_of(name) for name in "abc"}
    text = json.dumps({name: x.model_dump() for name, x in volumes.items()})
    (tmp_path / "volumes.json").write_text(text)
    groups = {"a": [*"pppqqq"], "b": [*"pppqqq"], "c": ["p"] * 6}
    for name, volume in volumes.items():
        images |= dict(zip(volume.slices, groups[name], strict=True))
    names = {"a": "a (several groups)", "b": "b (several groups)", "c": "p"}

    def check(table):
        assert {row.volume: row.group for row in table.rows} == names
        assert [x["group"] for x in table.to_dict()["groups"]] == sorted(names.values())
        (line,) = (x for x in table.lines() if x.startswith(SEVERAL))
        assert line == f"{SEVERAL}a, b; give --group a pattern of whole volumes"

    paths = [tmp_path / f"{x}.tif" for x in images]
    scores = VolumeScores(CLASSES, tmp_path, paths, [*images.values()])
    for i in range(18):
        image = np.zeros((13, 11, 1), np.uint8)
        scores.add(Prediction(i, image, *(x[i % 6] for x in pair)))
    scores.sum_over_ranks()
    check(scores.table)
    root = str(tmp_path)
    config = SimpleNamespace(data=DataConfig(layout="folders", root=root, classes="c.yaml"))
    # Where folds divide a volume, each part has one group; where a fold has all of it, two.
    for sides in ([[*range(18)]], [[0, 1, 2, 6, 7, 8], [3, 4, 5, *range(9, 18)]]):
        folds = []
        for k, own in enumerate(sides):
            (tmp_path / f"fold_{k}").mkdir(exist_ok=True)
            listed = [[*images][i] for i in own]
            rows = [
                VolumeRow(x, "folder", "", [[1, 1, 1]] * 3, [math.nan] * 3)
                for x in "abc"
                if any(x == name.split("/")[1] for name in listed)
            ]
            found = {"by_volume": VolumeTable(CLASSES, rows).to_dict()}
            (tmp_path / f"fold_{k}/by_volume.json").write_text(json.dumps(found))
            folds.append(Fold(run=f"fold_{k}", images={x: images[x] for x in listed}))
        check(_volume_table(tmp_path, config, Division(by="group", all=True, folds=folds)))


def test_slices_of_another_size_than_was_cut_are_refused(tmp_path):
    content = {"a": volume_of("a").model_dump() | {"size": [26, 22]}}
    (tmp_path / "volumes.json").write_text(json.dumps(content))
    scores = VolumeScores(CLASSES, tmp_path, [tmp_path / "images/a/z0.tif"], ["p"])
    with pytest.raises(DataError, match="volume a: a label of 13x11, cut as 26x22; import"):
        scores.add(Prediction(0, np.zeros((13, 11, 1), np.uint8), balls()[0], balls()[0]))


def of_rank(root):
    """What a rank that has every other slice knows of all in the end."""
    scores = VolumeScores(CLASSES, root, [root / f"images/a/z{i}.tif" for i in range(6)], ["p"] * 6)
    for i in range(dist.rank(), 6, dist.world_size()):
        pair = balls()[i], balls(0.2)[i]
        scores.add(Prediction(i, np.zeros((13, 11, 1), np.uint8), *pair))
    scores.sum_over_ranks()
    return scores.table.to_dict()


def test_ranks_that_share_the_slices_of_a_volume_know_all_of_it(tmp_path, run_ranks):
    content = {"a": volume_of("a").model_dump()}
    (tmp_path / "volumes.json").write_text(json.dumps(content))
    one, *two = run_ranks(1, of_rank, tmp_path) + run_ranks(2, of_rank, tmp_path)
    assert two == [one, one]
    assert one["volumes"][0]["HD95_mm"]["ball"] > 1


def test_images_that_are_no_slices_have_no_volumes(tmp_path):
    scores = VolumeScores(CLASSES, tmp_path, [tmp_path / "images/a/z0.tif"], ["p"])
    scores.add(Prediction(0, np.zeros((13, 11, 1), np.uint8), balls()[0], balls()[0]))
    scores.sum_over_ranks()
    assert not scores.table
    (tmp_path / "volumes.json").write_text('{"a": {"slices": 3}}')
    with pytest.raises(DataError, match=r"volumes.json: damaged: .*; import the volumes again"):
        read_cut_volumes(tmp_path)


@pytest.mark.parametrize(
    ("unit", "place", "first", "expected"),
    [
        ("mm", RAS, "z0000", (3.0, 0.7, 0.8)),
        ("mm", OBLIQUE, "z0000", (3.0, 0.7, 0.8)),
        ("µm", None, "z0000", (3e-3, 0.7e-3, 0.8e-3)),
        ("", RAS, "z0000", None),  # a header without a spacing
        ("pixels", None, "z0000", None),
        ("mm", RAS + np.outer([0, 1, 0, 0], [0, 0, 0.9, 0]), "z0000", None),  # a tilted gantry
        ("mm", None, "t0000_z0000", None),
    ],
)
def test_a_spacing_in_mm_is_that_of_a_grid_at_right_angles(unit, place, first, expected):
    found = Stack(np.zeros((1, 2, 3, 1)), (first,), (3.0, 0.7, 0.8), unit, place).spacing_mm
    assert found == (expected and pytest.approx(expected))


pytestmark = pytest.mark.usefixtures("handlers")


def test_volumes_of_folds_are_of_the_model_that_has_not_seen_them(
    slices_of_three, tmp_path, stop, lab
):
    options = TRAINED | {"train.steps": 6, "checkpoint.every_steps": 6}
    settings = [x for key, value in options.items() for x in ("--set", f"{key}={value}")]
    mine, folds, maps = slices_of_three / "mine", tmp_path / "folds", tmp_path / "maps"
    words = "-k", 2, "--all", "--output", folds, "--save-predictions", maps, "--device", "cpu"
    said = lab.done("folds", mine, *words, *settings)
    assert len(stop["ran"]) == 4
    assert f"3 volumes of slices: {maps}/volumes" in said.err
    division = json.loads((folds / "folds.json").read_text())
    for fold in division["folds"]:
        trained = (folds / f"{fold['run']}_train.txt").read_text()
        cases = {re.search(r"case_\d", name)[0] for name in fold["images"]}
        assert not cases & {*re.findall(r"case_\d", trained)}
        for case in cases:
            check_joined(slices_of_three, folds, maps, fold["run"], case)
    check_kept(division["scores"]["by_volume"], maps, said.out)


def check_joined(data, folds, maps, held_out, case):
    """It lies where the source does, and is what the model of its fold alone predicts."""
    nib = pytest.importorskip("nibabel")
    source = data / f"data/imagesTr/{case}.nii.gz"
    joined, image = nib.load(maps / f"volumes/{case}.nii.gz"), nib.load(source)
    np.testing.assert_array_equal(joined.affine, image.affine)
    assert (joined.shape, nib.aff2axcodes(joined.affine)) == (image.shape, tuple("LPS"))
    for name in ("fold_0", "fold_1"):
        assert run("predict", folds / name, source, "--output", maps / name / case) == 0
        own = nib.load(maps / f"{name}/{case}/labels/{case}.nii.gz")
        assert np.array_equal(joined.dataobj, own.dataobj) == (name == held_out)


def check_kept(found, maps, said):
    """The scores are those of the volumes that were written."""
    nib = pytest.importorskip("nibabel")
    names = "background", "box", "ball"
    assert [row["volume"] for row in found["volumes"]] == ["case_0", "case_1", "case_2"]
    assert [row["group"] for row in found["volumes"]] == [f"images/case_{i}/z" for i in range(3)]
    for i, row in enumerate(found["volumes"]):
        volume = nib.as_closest_canonical(nib.load(maps / f"volumes/case_{i}.nii.gz"))
        pred, label = volume.get_fdata(), phantom(i)[1]
        for k, name in enumerate(names):
            one, other = label == k, pred == k
            dice = 2 * (one & other).sum() / (one.sum() + other.sum())
            assert row["Dice"][name] == pytest.approx(dice)
            if k and other.any():
                far = by_all_pairs(one, other, (0.8, 0.7, 3.0))
                assert row["HD95_mm"][name] == pytest.approx(far, rel=1e-6)
    ball = found["over_volumes"]["Dice"]["ball"]["mean"]
    lines = [x.split() for x in said.splitlines() if x.startswith("ball ")]
    assert [f"{100 * ball:.2f}" in line for line in lines] == [True]


@pytest.mark.parametrize("text", ['{"clip": {"patients": ["a"]}}', "[1, 2]", '{"a": 1}'])
def test_a_file_of_this_name_of_another_program_tells_nothing(tmp_path, text):
    (tmp_path / "volumes.json").write_text(text)
    assert read_cut_volumes(tmp_path) == {}


def test_folds_without_nibabel_are_refused_before_they_train(slices_of_three, tmp_path, lab):
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(sys.modules, "nibabel", None)
        words = "--output", tmp_path / "f", "--save-predictions", tmp_path / "maps"
        said = lab.refused("folds", slices_of_three / "mine", "-k", 2, *words)
    assert "nibabel, which is not installed" in said
    assert not (tmp_path / "f").exists()
