"""Millilitres and components of volumes, beside sums of numpy and a flood fill; what is refused."""

import csv
import sys
from itertools import product

import cv2
import numpy as np
import pytest
from test_volumes import OBLIQUE, RAS, SMALL, phantom, read_dicom, write_dicom, write_nifti

from segtrain.data.read.volumes import find_volumes, load_volume, no_spacing, voxel_ml
from segtrain.predict.object_table import VOLUME_TITLES
from segtrain.predict.volume_table import volume_rows
from segtrain.types import IGNORE_INDEX


def image_of(affine, unit="mm", shape=(7, 6, 5)):
    nib = pytest.importorskip("nibabel")
    image = nib.Nifti1Image(np.zeros(shape, np.int16), affine)
    image.header.set_xyzt_units(unit)
    return nib.Nifti1Image.from_bytes(image.to_bytes())  # as it is read from a file


def flooded(mask):
    """How many parts a mask has whose voxels are apart by at most 1 along each axis."""
    left, number = {tuple(x) for x in np.argwhere(mask).tolist()}, 0
    while left:
        number, reached = number + 1, [left.pop()]
        while reached:
            at = reached.pop()
            near = {tuple(np.add(at, step).tolist()) for step in product((-1, 0, 1), repeat=3)}
            reached += near & left
            left -= near
    return number


@pytest.mark.parametrize("share", [0.03, 0.1, 0.4])
def test_components_are_those_of_a_flood_fill(share):
    rng = np.random.default_rng(0)
    labels = rng.choice(3, (9, 11, 7), p=[1 - 2 * share, share, share]).astype(np.uint8)
    labels[:, 0], labels[0, :, 0] = IGNORE_INDEX, 1
    classes, image = ["ground", "a", "b", "nowhere"], image_of(RAS)
    rows = volume_rows("p/scan", labels, 13, classes, image)
    known = int((labels != IGNORE_INDEX).sum())
    for k, row in enumerate(rows):
        voxels = int((labels == k).sum())
        expected = ["p/scan", classes[k], voxels, pytest.approx(voxels * 0.8 * 0.7 * 3 / 1000)]
        shared = pytest.approx(voxels / (labels.size - 13))
        unknown = labels.size - 13 - known
        assert row == [*expected, flooded(labels == k), shared, 13, unknown]
    assert [row[2] for row in rows][3] == 0


@pytest.mark.parametrize(
    ("affine", "unit", "mm3"),
    [
        (RAS, "mm", 0.8 * 0.7 * 3),
        (OBLIQUE, "mm", 0.8 * 0.7 * 3),
        (RAS, "unknown", 0.8 * 0.7 * 3),
        (RAS[[2, 0, 1, 3]] * [[1], [-1], [1], [1]], "mm", 0.8 * 0.7 * 3),
        (RAS + np.outer([0, 1, 0, 0], [0, 0, 0.9, 0]), "mm", 0.8 * 0.7 * 3),  # a tilted gantry
        (np.diag([250.0, 250, 900, 1]), "micron", 0.25 * 0.25 * 0.9),
        (np.diag([0.001, 0.001, 0.002, 1]), "meter", 2.0),
        (np.eye(4), "mm", 1.0),
    ],
)
def test_a_voxel_is_as_large_as_its_header_says(affine, unit, mm3):
    image = image_of(affine, unit)
    assert not no_spacing(image)
    assert voxel_ml(image) == pytest.approx(mm3 / 1000, rel=1e-6)


@pytest.mark.parametrize("affine", [None, np.eye(4), np.diag([-1, -1, 1, 1])])
def test_a_header_that_says_no_spacing_gives_no_millilitres(affine):
    image = image_of(affine, "unknown")
    assert "1x1x1 without a unit" in no_spacing(image)
    labels = np.ones((5, 6, 7), np.uint8)
    assert [row[3] for row in volume_rows("a", labels, 0, ["x", "y"], image)] == ["", ""]


@pytest.mark.parametrize(("keyword", "slices"), [("PixelSpacing", 4), ("SliceThickness", 1)])
def test_a_series_that_says_no_spacing_gives_no_millilitres(tmp_path, keyword, slices):
    write_dicom(tmp_path / "ct", phantom(0, (9, 8, slices))[0])
    for path in (tmp_path / "ct").iterdir():
        one = read_dicom(path)
        one.SliceThickness = 3
        if keyword in one:
            delattr(one, keyword)
        one.save_as(path)
    (volume,), _ = find_volumes(tmp_path)
    assert "no PixelSpacing" in no_spacing(load_volume(volume))


def test_a_series_has_the_volume_of_its_steps(tmp_path):
    write_dicom(tmp_path / "ct", phantom(0, SMALL)[0], OBLIQUE)
    (volume,), _ = find_volumes(tmp_path)
    image = load_volume(volume)
    assert not no_spacing(image)
    assert voxel_ml(image) == pytest.approx(0.8 * 0.7 * 3 / 1000, rel=1e-6)


def read_table(path):
    with path.open() as file:
        rows = list(csv.reader(file))
    assert tuple(rows[0]) == VOLUME_TITLES
    return rows[1:]


@pytest.mark.parametrize(
    ("words", "said"),
    [
        ("--objects o.csv", "--objects: not for a volume: {}; --table FILE counts components"),
        ("--probabilities npz", "--probabilities: not for a volume: {}; --probabilities nii"),
        ("--table t.csv --pixel-size 1mm", "--pixel-size: not for a volume: {}"),
        ("--table t.csv --min-area 9", "--min-area: not for a volume: {}"),
        ("photo.png --table t.csv", "--table: images and volumes have tables with other columns"),
        ("photo.png --probabilities nii", "--probabilities nii: not for images: photo.png; npz"),
        ("--opacity 0.3", "--opacity: not for a volume: {}"),
    ],
)
def test_options_are_refused_before_a_model_is_loaded(lab, monkeypatch, words, said):
    monkeypatch.chdir(lab.folder)
    cv2.imwrite("photo.png", np.zeros((8, 9, 3), np.uint8))
    path = write_nifti(lab.folder / "scans/a.nii.gz", np.zeros((8, 9, 3), np.int16))
    told = lab.refused("predict", "no_run", path, *words.split(), "--output", "out")
    assert said.format(path) in told


@pytest.mark.parametrize("what", ["4D", "colours", "no extent", "no library", "uneven"])
def test_wrong_volumes_are_refused_before_a_model_is_loaded(lab, monkeypatch, what):
    nib = pytest.importorskip("nibabel")
    folder, values = lab.folder / "scans", np.zeros((8, 9, 4), np.int16)
    write_nifti(folder / "good.nii", values)
    if what == "4D":
        nib.Nifti1Image(np.zeros((8, 9, 4, 2), np.int16), RAS).to_filename(folder / "bad.nii")
    elif what == "colours":
        colours = np.dtype([(x, "u1") for x in "RGB"])
        nib.Nifti1Image(np.zeros((8, 9, 4), colours), RAS).to_filename(folder / "bad.nii")
    elif what == "no extent":
        content = bytearray((folder / "good.nii").read_bytes())
        content[312:328] = bytes(16)  # srow_z
        (folder / "bad.nii").write_bytes(content)
    elif what == "uneven":
        write_dicom(folder / "bad", values)
        (folder / "bad/IM014").unlink()
    else:
        monkeypatch.setitem(sys.modules, "nibabel", None)
    if what != "no library":  # beside a good one it is named when that is done
        (folder / "good.nii").unlink()
    code, problem = {
        "4D": (3, "bad.nii: expected a volume of single numbers, found 8x9x4x2 int16"),
        "colours": (3, "bad.nii: expected a volume of single numbers, found 8x9x4"),
        "no extent": (3, "bad.nii: its affine (sform or qform) gives voxels no volume"),
        "uneven": (3, "bad: its slices are not at even steps"),
        "no library": (2, "nibabel, which is not installed"),
    }[what]
    told = lab.refused("predict", "no_run", folder, "--output", lab.folder / "out", code=code)
    assert problem in told
