"""Masks in a file for each organ that make a label, beside the voxels they were drawn by."""

import json
import re

import numpy as np
import pytest
from test_volumes import RAS, SMALL, axial, cut, phantom, slices, write_nifti

from segtrain.config import load_config
from segtrain.data.read.classes import load_class_file

ORGANS = ["kidney_left", "kidney_right", "rib_left_1", "rib_left_11", "vertebrae_L1"]
CT, MASK = "s000{i}/ct.nii.gz", "s000{i}/segmentations/{organ}.nii.gz"


def write_masks(root, organs, number=3, image=CT, mask=MASK, value=1):
    """Volumes, and a mask of each organ; returns label maps with ids from 1."""
    labels = []
    for i in range(number):
        values, _ = phantom(i, SMALL)
        rng = np.random.default_rng(i)
        label = rng.integers(0, len(organs) + 1, (5, 4, 3)).repeat(3, 0).repeat(3, 1).repeat(2, 2)
        write_nifti(root / "data" / image.format(i=i), values, axes="LPS" if i else "RAS")
        for k, organ in enumerate(organs, 1):
            path = root / "data" / mask.format(i=i, organ=organ)
            write_nifti(path, (value * (label == k)).astype(np.uint8))
        labels.append(label)
    return labels


def names_of(root):
    return json.loads((root / "cut/dataset.json").read_text())["labels"]


@pytest.mark.parametrize("value", [1, 255])
def test_masks_of_organs_become_one_label_with_classes_called_as_their_files(
    tmp_path, lab, capsys, value
):
    labels = write_masks(tmp_path, ORGANS, value=value)
    (tmp_path / "data/s0001/segmentations/rib_left_1.nii.gz").unlink()
    labels[1][labels[1] == 1 + ORGANS.index("rib_left_1")] = 0
    assert cut(tmp_path) == 0
    said = capsys.readouterr().out
    assert "warning: 1 volume has no file of rib_left_1, absent there: s0001/ct\n" in said
    assert "of two organs" not in said
    for i, label in enumerate(labels):
        np.testing.assert_array_equal(slices(tmp_path / "cut", f"s000{i}/ct")[1], axial(label))
    assert names_of(tmp_path) == {"background": 0, **{x: i for i, x in enumerate(ORGANS, 1)}}
    lab.done("init", tmp_path / "cut", "--output", tmp_path / "mine")
    config = load_config(tmp_path / "mine/config.yaml")
    assert load_class_file(config.data.classes).names == ("background", *ORGANS)


@pytest.mark.parametrize(
    ("image", "mask"),
    [
        ("imagesTr/s000{i}.nii", "labelsTr/{organ}/s000{i}.nii"),
        ("imagesTr/p{i}x_0000.nii", "labelsTr/{organ}/p{i}x.nii"),
        ("images/s000{i}.nii", "labels/s000{i}/{organ}.nii"),
        ("images/s000{i}.nii", "labels/{organ}/s000{i}/mask.nii"),
        ("images/s000{i}.nii", "masks/s000{i}_{organ}_mask.nii"),
        ("s000{i}/s000{i}_ct.nii", "s000{i}/seg/s000{i}_{organ}.nii"),
        ("train/s000{i}/ct.nii", "train/s000{i}/segmentations/{organ}.nii"),
    ],
)
@pytest.mark.parametrize("organs", [ORGANS, ORGANS[:2], ORGANS[:1]])
def test_organs_are_told_by_folders_and_by_names(tmp_path, image, mask, organs):
    labels = write_masks(tmp_path, organs, 2, image, mask)
    assert cut(tmp_path) == 0
    assert [*names_of(tmp_path)] == ["background", *organs]
    files = sorted((tmp_path / "cut/labels").rglob("z0003.png"))
    for path, label in zip(files, labels, strict=True):
        name = path.parent.relative_to(tmp_path / "cut/labels").as_posix()
        np.testing.assert_array_equal(slices(tmp_path / "cut", name)[1], axial(label))


def test_one_mask_of_one_of_several_organs_is_no_other_organ(tmp_path, capsys):
    """As where each hospital has labelled its own; all would be class 1."""
    labels = write_masks(tmp_path, ["liver", "spleen"], 4)
    for i, label in enumerate(labels):
        left_out = i % 2
        label[label == 1 + left_out] = 0
        (tmp_path / f"data/s000{i}/segmentations/{['liver', 'spleen'][left_out]}.nii.gz").unlink()
    assert cut(tmp_path) == 0
    said = capsys.readouterr().out
    assert "2 volumes have no file of liver, absent there: s0000/ct, s0002/ct" in said
    assert names_of(tmp_path) == {"background": 0, "liver": 1, "spleen": 2}
    for i, label in enumerate(labels):
        np.testing.assert_array_equal(slices(tmp_path / "cut", f"s000{i}/ct")[1], axial(label))


def test_ids_of_several_classes_are_no_organ(tmp_path):
    for i in range(2):
        values, label = phantom(i, SMALL)
        write_nifti(tmp_path / "data" / CT.format(i=i), values)
        write_nifti(tmp_path / "data" / MASK.format(i=i, organ="body"), label)
    assert cut(tmp_path) == 0
    assert not (tmp_path / "cut/dataset.json").exists()
    for i in range(2):
        found = slices(tmp_path / "cut", f"s000{i}/ct")[1]
        np.testing.assert_array_equal(found, axial(phantom(i, SMALL)[1]))


@pytest.mark.parametrize("shared", [9, 200])
def test_voxels_of_two_organs_are_counted_and_many_are_refused(tmp_path, capsys, shared):
    """200 of 600 voxels, and 9: these are of the later name."""
    for i in range(2):
        write_nifti(tmp_path / "data" / CT.format(i=i), phantom(i, SMALL)[0])
        liver, spleen = np.zeros((2, SMALL[0] * SMALL[1] * SMALL[2]), np.uint8)
        liver[:700], spleen[700 - shared : 1080 - 80 * (shared == 9)] = 1, 1
        for organ, mask in (("liver", liver), ("spleen", spleen), ("aorta", 0 * liver)):
            path = tmp_path / "data" / MASK.format(i=i, organ=organ)
            write_nifti(path, mask.reshape(SMALL))
    label = np.where(spleen, 3, 2 * liver).reshape(SMALL)
    code, said = cut(tmp_path), capsys.readouterr()
    if shared == 9:
        assert code == 0
        what = "18 voxels are of two organs, and the later name counts: spleen over liver (18)"
        assert f"warning: {what}\n" in said.out
        for i in range(2):
            np.testing.assert_array_equal(slices(tmp_path / "cut", f"s000{i}/ct")[1], axial(label))
        return
    folder = r"\S*/segmentations"
    problem = rf"{folder}/spleen.nii.gz: 200 voxels are in {folder}/liver.nii.gz too, 34% of the"
    assert code == 3
    assert re.match(f"segtrain: {problem}", said.err)
    assert not (tmp_path / "cut/train.txt").exists()


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("ids", "found 0, 1, 2, expected 0 and one number: of several labels of a volume each"),
        ("soft", "expected ids from 0 to 65535, found 0.5"),
        ("shape", "label of 5x12x15 voxels, image of 6x12x15"),
        ("place", "label and image lie at different places, 3 mm apart"),
    ],
)
def test_a_file_that_is_no_mask_of_its_image_is_named(tmp_path, capsys, change, problem):
    write_masks(tmp_path, ["liver", "spleen"], 2)
    path = tmp_path / "data" / MASK.format(i=1, organ="spleen")
    mask, affine = np.zeros(SMALL, np.float32), RAS.copy()
    mask[3:5, 3:5, 0], mask[3, 3, 0] = 1, {"ids": 2, "soft": 0.5}.get(change, 1)
    if change == "place":
        affine[2, 3] += 3
    write_nifti(path, mask[:, :, :-1] if change == "shape" else mask, affine)
    assert cut(tmp_path) == 3
    assert f"segtrain: {path}: {problem}" in capsys.readouterr().err


def test_more_organs_than_ids_are_refused(tmp_path, capsys):
    write_masks(tmp_path, [f"x{i}y" for i in range(255)], 1)
    assert cut(tmp_path) == 3
    assert "255 organs, of which a label can hold 254" in capsys.readouterr().err
