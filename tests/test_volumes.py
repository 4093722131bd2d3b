"""Volumes of NIfTI, DICOM and TIFF as slices, and predictions of them, by known voxels."""

import json
import re
import shutil
import sys
from contextlib import redirect_stdout
from io import StringIO

import cv2
import numpy as np
import pytest
import tifffile

from segtrain import cli
from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file
from segtrain.data.read.cut_volumes import read_cut_volumes
from segtrain.data.read.find import Pair
from segtrain.data.read.image_formats import read_info, read_stored
from segtrain.data.read.neighbours import with_neighbour_files, with_neighbours
from segtrain.data.read.volumes import Stack, other_grid
from segtrain.errors import DataError
from segtrain.predict.pixel_size import grid_of

X, Y, Z = SHAPE = 48, 40, 12
SMALL = 15, 12, 6
# A voxel of 0.8 x 0.7 x 3 mm; x to the right, y to the front, z to the head.
RAS = np.array([[0.8, 0, 0, -20.0], [0, 0.7, 0, -30.0], [0, 0, 3.0, 5.0], [0, 0, 0, 1]])
OBLIQUE = RAS.copy()
OBLIQUE[:3, :3] = cv2.Rodrigues(np.array([0.05, 0.1, 0.2]))[0] @ RAS[:3, :3]


def phantom(seed=0, shape=SHAPE):
    """A bright box and a brighter ball in a dark body, and where they are; no symmetry."""
    rng = np.random.default_rng(seed)
    label = np.zeros(shape, np.uint8)
    n = [int(0.2 * s) for s in shape]
    label[n[0] : 2 * n[0], n[1] : 3 * n[1], n[2] : 4 * n[2] + 1] = 1
    grid = np.stack(np.mgrid[: shape[0], : shape[1], : shape[2]], -1) / shape
    label[((grid - (0.7, 0.4, 0.6)) ** 2).sum(-1) < 0.03] = 2
    values = np.array([-600, 60, 300])[label] + rng.normal(0, 20, shape)
    return values.round().astype(np.int16), label


def turned(voxels, affine, axes):
    """The same volume stored in other axes, such as `LPS` or `SAL`."""
    nib = pytest.importorskip("nibabel")
    image = nib.Nifti1Image(voxels, affine)
    turn = nib.orientations.ornt_transform(
        nib.io_orientation(affine), nib.orientations.axcodes2ornt(axes)
    )
    return image.as_reoriented(turn)


def write_nifti(path, voxels, affine=RAS, axes="RAS"):
    path.parent.mkdir(parents=True, exist_ok=True)
    turned(voxels, affine, axes).to_filename(path)
    return path


def write_case(root, name, i, shape=SHAPE, affine=RAS, *, end="", **how):
    """A phantom and its label, in images{end}/ and labels{end}/ of `root`; returns both."""
    values, label = phantom(i, shape)
    write_nifti(root / f"images{end}/{name}", values, affine, **how)
    write_nifti(root / f"labels{end}/{name}", label, affine, **how)
    return values, label


def write_series(folder, i=0, shape=SHAPE, **how):
    """A phantom as a series in `ct` and its label in seg.nii."""
    values, label = phantom(i, shape)
    write_dicom(folder / "ct", values, **how)
    write_nifti(folder / "seg.nii", label)


def write_dicom(folder, values, affine=RAS, *, patient="", white_low=False):
    """A series of `values` (X, Y, Z), HU of 12 bits with a slope, the files in no order."""
    pydicom = pytest.importorskip("pydicom")
    folder.mkdir(parents=True)
    uid, lps = pydicom.uid.generate_uid(), np.diag([-1, -1, 1, 1]) @ affine
    for k in np.random.default_rng(0).permutation(values.shape[2]).tolist():
        meta = pydicom.dataset.FileMetaDataset()
        meta.TransferSyntaxUID = pydicom.uid.ExplicitVRLittleEndian
        meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.2"
        meta.MediaStorageSOPInstanceUID = pydicom.uid.generate_uid()
        one = pydicom.FileDataset("", {}, file_meta=meta, preamble=b"\0" * 128)
        one.SOPClassUID, one.SOPInstanceUID = meta[0x20002].value, meta[0x20003].value
        one.SeriesInstanceUID, one.PatientID, one.Modality = uid, patient, "CT"
        one.Rows, one.Columns = values.shape[1], values.shape[0]
        spacing = np.linalg.norm(affine[:3, :3], axis=0)
        one.PixelSpacing = [float(spacing[1]), float(spacing[0])]
        one.ImagePositionPatient = [float(x) for x in (lps @ (0, 0, k, 1))[:3]]
        directions = lps[:3, :2] / spacing[:2]
        one.ImageOrientationPatient = [float(x) for x in directions.T.ravel()]
        one.SamplesPerPixel, one.BitsAllocated, one.BitsStored, one.HighBit = 1, 16, 12, 11
        one.PixelRepresentation, one.RescaleSlope, one.RescaleIntercept = 0, 2, -1024
        one.PhotometricInterpretation = "MONOCHROME1" if white_low else "MONOCHROME2"
        stored = ((values[:, :, k].T.astype(int) + 1024) // 2).astype(np.uint16)
        one.PixelData = (4095 - stored if white_low else stored).tobytes()
        one.save_as(folder / f"IM{(7 * k) % 97:03d}", enforce_file_format=True)


def read_dicom(path, **options):
    from pydicom import dcmread

    return dcmread(path, **options)


def run(*words):
    return cli.main([str(word) for word in words])


def cut(root):
    """The exit code of the import of `data` into `cut`."""
    return run("data", "import", root / "data", "--output", root / "cut")


def slices(root, case, letter="z"):
    """The images and labels that an import has written for a case, (N, H, W) both."""
    images = sorted((root / "images" / case).glob(f"{letter}*.tif"))
    names = [path.relative_to(root / "images").with_suffix(".png") for path in images]
    labels = [read_stored(root / "labels" / name) for name in names]
    return tuple(np.stack([x[..., 0] for x in y]) for y in (map(read_stored, images), labels))


def axial(voxels):
    """(N, H, W): slices with the front of the patient above."""
    return voxels.transpose(2, 1, 0)[:, ::-1]


def test_slices_are_those_of_the_patient_whatever_the_order_of_the_file(tmp_path, capsys):
    for i, axes in enumerate(("LPS", "SAL", "PIR")):
        values, label = phantom(i)
        write_nifti(tmp_path / f"data/imagesTr/case_{i}.nii.gz", values, axes=axes)
        write_nifti(
            tmp_path / f"data/labelsTr/case_{i}.nii.gz", label, axes=axes if i == 1 else "RAS"
        )
    assert cut(tmp_path) == 0
    said = capsys.readouterr()
    assert "36 slices along z of 3 volumes" in said.out + said.err
    for i in range(3):
        values, label = phantom(i)
        found = slices(tmp_path / "cut", f"case_{i}")
        np.testing.assert_array_equal(found[0], axial(values).astype(np.float32))
        np.testing.assert_array_equal(found[1], axial(label))
    with tifffile.TiffFile(tmp_path / "cut/images/case_0/z0003.tif") as file:
        (x, x_px), (y, y_px) = (file.pages[0].tags[f"{a}Resolution"].value for a in "XY")
    assert (10 * x_px / x, 10 * y_px / y) == pytest.approx((0.8, 0.7))
    lists = [(tmp_path / f"cut/{name}.txt").read_text() for name in ("train", "val")]
    cases = [set(re.findall(r"images/(case_\d)/", text)) for text in lists]
    assert cases[0] | cases[1] == {"case_0", "case_1", "case_2"}
    assert not cases[0] & cases[1]
    assert sum(text.count("\n") for text in lists) == 36


def test_a_dicom_series_is_the_same_slices_as_its_nifti(tmp_path):
    values, label = phantom()
    values -= values % 2  # what a slope of 2 can store
    for i, white_low in enumerate((False, True)):
        write_dicom(tmp_path / f"data/p{i}/ct", values, OBLIQUE, white_low=white_low)
        write_nifti(tmp_path / f"data/p{i}/seg.nii.gz", label, OBLIQUE, axes="LPI")
    assert cut(tmp_path) == 0
    for i in range(2):
        place = read_cut_volumes(tmp_path / "cut")[f"p{i}/ct"]
        assert place.spacing_mm == pytest.approx((3, 0.7, 0.8))
        assert place.stored[1] == pytest.approx(OBLIQUE, abs=1e-5)
        found = slices(tmp_path / "cut", f"p{i}/ct")
        np.testing.assert_array_equal(found[0], axial(values).astype(np.float32))
        np.testing.assert_array_equal(found[1], axial(label))


def test_a_patient_stays_on_one_side(tmp_path):
    for i in range(6):
        write_series(tmp_path / f"data/scan_{i}", i, (15, 12, 3), patient=f"Anna_{i // 2}")
    assert cut(tmp_path) == 0
    val = (tmp_path / "cut/val.txt").read_text()
    scans = {int(x) for x in re.findall(r"images/scan_(\d)/", val)}
    assert scans in ({0, 1}, {2, 3}, {4, 5})


SCANS = [(i, t) for i in range(6) for t in range(1 + (i < 4), 0, -1)]  # two of four patients


def sides(root, pattern):
    """What the pattern finds in the names of the images to train on, and to evaluate on."""
    texts = [(root / name).read_text() for name in ("train.txt", "val.txt")]
    rows = [[x for x in text.splitlines() if not x.startswith("#")] for text in texts]
    return [{re.search(pattern, row)[1] for row in part} for part in rows]


@pytest.mark.parametrize(
    ("name", "options", "patient"),
    [
        ("patient_{i:02}_t{t}", [], r"patient_(\d+)"),
        ("patient_{i:02}_t{t}_0000", [], r"patient_(\d+)"),
        ("s{i:02}{t}_0000", ["--group", r"s(\d\d)"], r"s(\d\d)"),
        ("sub-{i:02}/ses-{t}/anat/ct", [], r"sub-(\d+)"),
        ("visit{t}/p{i:02}", [], r"p(\d+)"),
        ("sub-{i:02}_ses-0{t}_T1w", [], r"sub-(\d+)"),
        ("p{i:02}_2020010{t}", [], r"p(\d+)"),
        ("scan{i:02}{t}", ["--group", r"scan(\d\d)"], r"scan(\d\d)"),
    ],
    ids=["counter", "channel", "letter", "folders", "visits", "BIDS", "dates", "group"],
)
def test_scans_of_a_patient_stay_on_one_side(tmp_path, lab, name, options, patient):
    for i, t in SCANS:
        values, label = phantom(i, (9, 8, 2))
        path = name.format(i=i, t=t)
        write_nifti(tmp_path / f"data/imagesTr/{path}.nii.gz", values)
        write_nifti(tmp_path / f"data/labelsTr/{path.removesuffix('_0000')}.nii.gz", label)
    lab.done("data", "import", tmp_path / "data", "--output", tmp_path / "cut", *options)
    train, val = sides(tmp_path / "cut", patient)
    assert train | val == {f"{i:02}" for i in range(6)}
    assert val
    assert not train & val


def test_an_organ_as_a_binary_label_is_a_class_and_no_patient_is_one(tmp_path, lab):
    """Of each patient a folder with slices of the same names; one does not show the organ."""
    for i in range(4):
        values, label = phantom(i, (12, 40, 48))
        organ = (label == 2) * (i > 0)
        write_nifti(tmp_path / f"data/s{i:04}/ct.nii.gz", values)
        write_nifti(tmp_path / f"data/s{i:04}/segmentations/ball.nii.gz", organ.astype(np.uint8))
    lab.done("data", "import", tmp_path / "data", "--output", tmp_path / "cut")
    lab.done("init", tmp_path / "cut", "--output", tmp_path / "mine")
    config = load_config(tmp_path / "mine/config.yaml")
    assert load_class_file(config.data.classes).names == ("background", "ball")
    train, val = sides(tmp_path / "cut", r"(s\d+)")
    assert train | val == {f"s{i:04}" for i in range(4)}
    assert val
    assert not train & val


def test_folders_that_divide_a_patient_are_refused_and_what_is_in_no_list_is_said(tmp_path, lab):
    """Two hospitals, each with both splits, which may be meant."""
    at = "site1/train/p01_t1", "site2/train/p02_t1", "site1/val/p01_t2", "site2/extra/p03_t1"
    for name in at:
        write_case(tmp_path / "data", f"{name}.nii.gz", 0, (9, 8, 2))
    words = ("data", "import", tmp_path / "data", "--output", tmp_path / "cut")
    said = lab.refused(*words, "--group", r"p\d+")
    assert "1 patient is in the folders of train and of val: p01" in said
    assert "1 volume is in no list: " in lab.done(*words).out


@pytest.mark.parametrize(
    ("change", "problem"),
    [
        ("shape", "label of 11x40x48 voxels, image of 12x40x48"),
        ("place", "different places, 3 mm apart; resample"),
        ("spacing", "different places"),
        ("values", "expected ids from 0 to 65535"),
        ("damage", "damaged volume"),
    ],
)
def test_labels_on_other_voxels_are_refused(tmp_path, capsys, change, problem):
    values, label = phantom()
    affine, label = RAS.copy(), label.astype(np.float32)
    if change == "shape":
        label = label[:, :, :-1]
    elif change == "place":
        affine[2, 3] += 3
    elif change == "spacing":
        affine[0, 0] *= 1.05
    elif change == "values":
        label[20, 20, 3] = 0.5
    write_nifti(tmp_path / "data/images/a.nii.gz", values)
    path = write_nifti(tmp_path / "data/labels/a.nii.gz", label, affine)
    if change == "damage":
        path.write_bytes(path.read_bytes()[:-2000])
    assert cut(tmp_path) == 3
    assert problem in capsys.readouterr().err


@pytest.mark.parametrize("library", ["nibabel", "SimpleITK"])
def test_what_is_not_installed_is_named_with_its_line(tmp_path, capsys, monkeypatch, library):
    write_series(tmp_path / "data/p0")
    monkeypatch.setitem(sys.modules, library, None)
    assert cut(tmp_path) == 2
    said = capsys.readouterr().err
    assert f"{library}, which is not installed" in said
    assert "pip install '.[medical]'" in said


def test_a_damaged_volume_is_named_when_it_is_cut(tmp_path, capsys):
    write_case(tmp_path / "data", "a.nii.gz", 0, axes="LPS")
    path = tmp_path / "data/images/a.nii.gz"
    path.write_bytes(path.read_bytes()[:-2000])
    assert cut(tmp_path) == 3
    assert f"{path}: damaged volume" in capsys.readouterr().err


def test_a_series_with_a_slice_missing_is_refused(tmp_path, capsys):
    write_series(tmp_path / "data/p0")
    (tmp_path / "data/p0/ct/IM021").unlink()
    assert cut(tmp_path) == 3
    said = capsys.readouterr().err
    assert "IM014 and IM028 lie 6 mm from each other, others 3; is one missing?" in said
    assert not (tmp_path / "cut/train.txt").exists()


def test_coarsest_axes_that_differ_are_asked_about(tmp_path, capsys):
    for i, spacing in enumerate(([0.8, 0.7, 3], [3, 0.8, 0.7])):
        affine = np.diag([*spacing, 1.0])
        values, label = write_case(tmp_path / "data", f"{i}.nii", i, affine=affine)
    words = "data", "import", tmp_path / "data", "--output", tmp_path / "cut"
    assert run(*words) == 2
    assert "coarsest along x, z; slices of all have to show the same" in capsys.readouterr().err
    assert run(*words, "--axis", "y") == 0
    found = slices(tmp_path / "cut", "1", "y")
    # Columns to the right, the head above.
    np.testing.assert_array_equal(found[0], values.transpose(1, 2, 0)[:, ::-1])
    np.testing.assert_array_equal(found[1], label.transpose(1, 2, 0)[:, ::-1])


def test_bytes_stay_bytes(tmp_path):
    for i in range(2):
        values, label = phantom(i)
        values = (values // 8 + 100).clip(0, 255).astype(np.uint8)
        write_nifti(tmp_path / f"data/images/{i}.nii", values)
        write_nifti(tmp_path / f"data/labels/{i}.nii", label)
    assert cut(tmp_path) == 0
    assert read_info(tmp_path / "cut/images/0/z0000.tif").dtype == np.uint8


@pytest.mark.parametrize("axes", ["ZYX", "TYX"])
@pytest.mark.parametrize("kind", ["imagej", "ome"])
def test_a_stack_is_no_image_of_many_channels(tmp_path, kind, axes):
    """Of 12 pages, as many as channels are read."""
    stack = np.zeros((12, 40, 48), np.uint8)
    metadata = {kind: True, "metadata": {"axes": axes}, "photometric": "minisblack"}
    tifffile.imwrite(tmp_path / "a.tif", stack, **metadata)
    with pytest.raises(DataError, match=r"a stack of slices \([TZ]\); segtrain data import FILE"):
        read_info(tmp_path / "a.tif")


@pytest.mark.parametrize(
    "kind", ["imagej", "plain", pytest.param("ome", marks=pytest.mark.slow("data"))]
)
def test_one_stack_is_cut_into_slices_with_a_gap(tmp_path, kind, capsys):
    values, label = phantom(shape=(48, 40, 40))
    values = axial((values // 8 + 100).clip(0, 255).astype(np.uint8))
    label = axial(label)
    options, axes = {} if kind == "plain" else {kind: True}, {"axes": "ZYX"}
    sizes = {"PhysicalSizeX": 0.25, "PhysicalSizeY": 0.25, "PhysicalSizeZ": 0.5}
    about = {"plain": {}, "imagej": axes | {"spacing": 0.5, "unit": "um"}, "ome": axes | sizes}
    options |= {"photometric": "minisblack", "metadata": about[kind]}
    (tmp_path / "data").mkdir()
    tifffile.imwrite(tmp_path / "data/em.tif", values, resolution=(4, 4), **options)
    tifffile.imwrite(tmp_path / "data/em_label.tif", label, **options)
    assert cut(tmp_path) == 0
    said = capsys.readouterr()
    said = said.out + said.err
    gap = {"imagej": "2 slices (1 um) from the nearest", "ome": "2 slices (1 µm) from the nearest"}
    assert gap.get(kind, "2 slices from") in said
    with tifffile.TiffFile(next((tmp_path / "cut/images/em").glob("*.tif"))) as file:
        tags = file.pages.first.tags
        if kind != "plain":  # pixels a centimetre
            assert tags.valueof("XResolution") == (40_000, 1)
            assert tags.valueof("ResolutionUnit") == 3
    assert ("pages without an axis are taken as slices" in said) == (kind == "plain")
    place = read_cut_volumes(tmp_path / "cut")["em"]
    in_mm = None if kind == "plain" else pytest.approx((0.5e-3, 0.25e-3, 0.25e-3))
    assert (place.stored, place.spacing_mm, len(place.slices)) == (None, in_mm, 40)
    found = slices(tmp_path / "cut", "em")
    np.testing.assert_array_equal(found[0], values)
    np.testing.assert_array_equal(found[1], label)
    train, val = (
        [int(x) for x in re.findall(r"images/em/z(\d+)", (tmp_path / f"cut/{y}.txt").read_text())]
        for y in ("train", "val")
    )
    assert len(val) == 8
    assert min(abs(a - b) for a in train for b in val) == 2


def test_channels_of_a_stack_are_bands_of_its_slices(tmp_path):
    rng = np.random.default_rng(0)
    values = rng.integers(0, 255, (2, 5, 3, 16, 20), np.uint8)  # TZCYX
    metadata = {"metadata": {"axes": "TZCYX"}, "photometric": "minisblack"}
    tifffile.imwrite(tmp_path / "a.tif", values, imagej=True, **metadata)
    assert run("data", "import", tmp_path / "a.tif", "--output", tmp_path / "cut") == 0
    for t, z in np.ndindex(2, 5):
        found = read_stored(tmp_path / f"cut/images/a/t{t:04d}_z{z:04d}.tif")
        np.testing.assert_array_equal(found, values[t, z].transpose(1, 2, 0))
    assert not (tmp_path / "cut/train.txt").exists()


@pytest.mark.parametrize("axes", ["TYX", "TCYX", "ZYX", "TZYX"])
@pytest.mark.parametrize("kind", ["imagej", "ome"])
@pytest.mark.parametrize("dtype", [np.uint8, np.uint16, np.float32])
def test_slices_of_a_microscope_keep_the_sizes_of_its_pixels(tmp_path, axes, kind, dtype):
    rng = np.random.default_rng(0)
    shape = [{"T": 4, "Z": 2, "C": 3, "Y": 20, "X": 24}[axis] for axis in axes]
    values = rng.integers(0, 255, shape).astype(dtype)
    # A pixel of 0.5 x 0.25 um; nobody says how far slices are apart.
    about = {"unit": "um"} if kind == "imagej" else {"PhysicalSizeX": 0.5, "PhysicalSizeY": 0.25}
    options = {kind: True, "metadata": about | {"axes": axes}, "resolution": (2, 4)}
    tifffile.imwrite(tmp_path / "lapse.tif", values, photometric="minisblack", **options)
    assert run("data", "import", tmp_path / "lapse.tif", "--output", tmp_path / "cut") == 0
    files = sorted((tmp_path / "cut/images/lapse").glob("*.tif"))
    assert len(files) == np.prod([n for axis, n in zip(axes, shape, strict=True) if axis in "TZ"])
    grid, why = grid_of(files[1])
    assert (grid.unit, why) == ("um", "")
    np.testing.assert_allclose((grid.width, grid.height, grid.area), (0.5, 0.25, 0.125), rtol=1e-6)
    bands = np.moveaxis(values, 1, -1) if "C" in axes else values[..., None]
    found = read_stored(files[1])
    np.testing.assert_array_equal(found, bands.reshape(-1, 20, 24, bands.shape[-1])[1])
    assert found.dtype == dtype
    assert read_cut_volumes(tmp_path / "cut")["lapse"].spacing_mm is None


@pytest.mark.parametrize("how", [{"imagej": True}, {"ome": True}, {"compression": "deflate"}])
def test_a_stack_that_is_cut_off_is_named_and_not_left_out(tmp_path, how, lab):
    rng, options = np.random.default_rng(0), {"photometric": "minisblack"} | how
    for name in "ab":
        values = rng.integers(0, 255, (6, 40, 48), np.uint8)
        path = tmp_path / f"data/{name}.tif"
        path.parent.mkdir(exist_ok=True)
        tifffile.imwrite(path, values, metadata={"axes": "TYX"}, **options)
    content = path.read_bytes()
    for kept in (0.3, 0.6):
        path.write_bytes(content[: int(kept * len(content))])
        words = "data", "import", tmp_path / "data", "--output", tmp_path / "cut"
        assert f"{path}: the TIFF is cut off" in lab.refused(*words, code=3)
        assert not (tmp_path / "cut").exists()


TRAINED = {
    "train.batch_size": 4,
    "train.precision": "float32",
    "augment.crop_size": [40, 48],
    "augment.scale_range": [1.0, 1.0],
    "model.pretrained": "null",
    "model.num_stages": 2,
    "model.output_stride": 8,
    "model.head_channels": 16,
    "schedule.warmup_steps": 0,
    "data.num_workers": 0,
    "log.charts": "false",
}


@pytest.fixture(scope="module")
def slices_of_three(tmp_path_factory):
    """Three phantoms, their slices in `cut`, and the config that init makes of these in `mine`."""
    root = tmp_path_factory.mktemp("three")
    for i in range(3):
        write_case(root / "data", f"case_{i}.nii.gz", i, axes="LPS", end="Tr")
    names = {"background": 0, "box": 1, "ball": 2}
    (root / "data/dataset.json").write_text(json.dumps({"labels": names}))
    assert cut(root) == 0
    said = StringIO()
    with redirect_stdout(said):
        assert run("init", root / "cut", "--output", root / "mine") == 0
    (root / "said.txt").write_text(said.getvalue())
    return root


def trained(root, output, steps, **options):
    """A run on these slices."""
    keys = ("train.steps", "eval.every_steps", "checkpoint.every_steps")
    pairs = (TRAINED | dict.fromkeys(keys, steps) | options).items()
    settings = [x for key, value in pairs for x in ("--set", f"{key}={value}")]
    assert run("train", root / "mine", "--nproc", 1, "--output", output, *settings) == 0
    return output


def test_slices_of_volumes_are_data_of_their_splits_and_classes(slices_of_three):
    said = (slices_of_three / "said.txt").read_text()
    assert "the splits of train.txt, val.txt: train and val" in said
    assert "names no image" not in said
    config = load_config(slices_of_three / "mine/config.yaml")
    assert config.data.train_split.endswith("train.txt")
    assert load_class_file(config.data.classes).names == ("background", "box", "ball")


def test_slices_of_a_body_are_not_mirrored_and_others_are(slices_of_three, tmp_path):
    config = slices_of_three / "mine/config.yaml"
    assert load_config(config).augment.flip_prob == 0
    assert "# a mirrored left kidney or lung is a right one" in config.read_text()
    cut = shutil.copytree(slices_of_three / "cut", tmp_path / "cut")
    (cut / "volumes.json").unlink()  # pictures like any others
    assert run("init", cut, "--output", tmp_path / "mine") == 0
    assert load_config(tmp_path / "mine/config.yaml").augment.flip_prob == 0.5


def test_a_predicted_volume_lies_where_its_source_does(slices_of_three, tmp_path, capsys):
    nib = pytest.importorskip("nibabel")
    model = trained(slices_of_three, tmp_path / "run", 8)
    values, label = phantom(7)
    values -= values % 2
    source = turned(values, OBLIQUE, "SAL")
    source.header["cal_max"] = 300
    source.header.set_xyzt_units("mm")
    source.set_sform(source.affine, code=2)
    (tmp_path / "new").mkdir()
    nib.save(source, tmp_path / "new/scan.nii.gz")
    write_dicom(tmp_path / "new/series", values, OBLIQUE)
    capsys.readouterr()
    table, where = tmp_path / "t.csv", ("--output", tmp_path / "found")
    asked = "--table", table, "--probabilities", "nii"
    assert run("predict", model, tmp_path / "new", *where, *asked) == 0
    said = capsys.readouterr().out
    assert "12 slices of 40x48 along z, 3 mm apart" in said
    assert "components: voxels of one class that touch, also at edges and corners" in said
    assert "2 of 2 volumes" in said
    found = nib.load(tmp_path / "found/labels/scan.nii.gz")
    assert found.shape == source.shape
    np.testing.assert_array_equal(found.affine, nib.load(tmp_path / "new/scan.nii.gz").affine)
    assert found.header.get_zooms() == pytest.approx(source.header.get_zooms())
    assert int(found.header["sform_code"]) == 2
    assert (found.get_data_dtype(), float(found.header["cal_max"])) == (np.uint8, 0)
    # Voxels are those that the network gives for the slices as images.
    for z, pixels in enumerate(axial(values).astype(np.float32)):
        (tmp_path / "slices").mkdir(exist_ok=True)
        tifffile.imwrite(tmp_path / f"slices/z{z:04d}.tif", np.ascontiguousarray(pixels))
    assert run("predict", model, tmp_path / "slices", "--output", tmp_path / "each") == 0
    each = [read_stored(tmp_path / f"each/labels/z{z:04d}.png")[..., 0] for z in range(Z)]
    in_patient = nib.as_closest_canonical(found).get_fdata().astype(np.uint8)
    np.testing.assert_array_equal(axial(in_patient), np.stack(each))
    turned_over = (np.flip(label, axis) for axis in range(3))
    shown = [(in_patient > 0)[where > 0].sum() for where in (label, *turned_over)]
    assert shown[0] > 1.3 * max(shown[1:])
    # The series is the same volume.
    series = nib.load(tmp_path / "found/labels/series.nii.gz")
    assert series.shape == SHAPE
    again = nib.as_closest_canonical(series)
    np.testing.assert_array_equal(again.get_fdata(), in_patient)
    np.testing.assert_allclose(again.affine, OBLIQUE, atol=1e-3)
    check_table(table, in_patient, 0.8 * 0.7 * 3)
    # Both are the same volume.
    names = "background", "box", "ball"
    shares = {
        name: f"{name} {100 * (in_patient == k).mean():.3g} %" for k, name in enumerate(names)
    }
    assert all(share in said for share in shares.values())
    check_probabilities(tmp_path / "found", found)
    # Without the option none of an earlier prediction is left.
    assert run("predict", model, tmp_path / "new", *where, "--overwrite") == 0
    assert not list((tmp_path / "found").rglob("ball.nii.gz"))
    # Bytes are numbers as those of more bits.
    for dtype in ("uint8", "float32"):
        write_nifti(tmp_path / f"bits/{dtype}.nii", values.clip(0, 255).astype(dtype))
    assert run("predict", model, tmp_path / "bits", "--output", tmp_path / "as") == 0
    one, other = (nib.load(tmp_path / f"as/labels/{x}.nii.gz") for x in ("uint8", "float32"))
    np.testing.assert_array_equal(one.get_fdata(), other.get_fdata())
    assert one.get_fdata().any()


UNSURE = "its header says no orientation (sform and qform codes 0): left and right are a guess"
MIRRORED = "its sform and qform say other directions (RAS and LAS), and the sform is taken"


def write_unsure(path, values, affine, sform, qform):
    """A NIfTI with these codes, its qform, if it has one beside an sform, mirrored along x."""
    nib = pytest.importorskip("nibabel")
    image = nib.Nifti1Image(values, affine)
    path.parent.mkdir(parents=True, exist_ok=True)
    image.set_qform(affine @ np.diag([-1 if sform else 1, 1, 1, 1]), qform)
    image.set_sform(affine, sform)
    image.to_filename(path)


def test_volumes_that_would_be_wrong_in_silence_are_named(slices_of_three, tmp_path, capsys):
    model, new = trained(slices_of_three, tmp_path / "run", 1), tmp_path / "new"
    values, _ = phantom(7)
    for name, codes in {"analyze": (0, 0), "mirrored": (1, 1), "one": (0, 1)}.items():
        write_unsure(new / f"{name}.nii", values, RAS, *codes)
    write_nifti(new / "good.nii.gz", values)
    # Thinner slices than those of 3 mm, by 1.6 and by 1.4.
    write_nifti(new / "thin.nii", values, RAS @ np.diag([1, 1, 1 / 1.6, 1]))
    write_nifti(new / "near.nii", values, RAS @ np.diag([1, 1, 1 / 1.4, 1]))
    window = (values.clip(-160, 240) + 160) * (255 / 400)
    for name, dtype in {"window": np.int16, "bytes": np.uint8}.items():
        write_nifti(new / f"{name}.nii", window.astype(dtype))
    for name, axes in {"cut": "RAS", "cut_too": "LPS"}.items():
        path = write_nifti(new / f"{name}.nii.gz", values, axes=axes)
        path.write_bytes(path.read_bytes()[:-2000])
    write_dicom(new / "short", values)
    for path in (new / "short").iterdir():
        one = read_dicom(path)
        one.InstanceNumber = 2 + round((one.ImagePositionPatient[2] - RAS[2, 3]) / 3)
        one.save_as(path)
    capsys.readouterr()
    words = "predict", model, new, "--output", tmp_path / "found", "--table", tmp_path / "t.csv"
    assert run(*words) == 3
    said = capsys.readouterr()
    for name in ("cut", "cut_too"):
        assert f"{new}/{name}.nii.gz: damaged volume" in said.err
    names = {x.split(",")[0] for x in (tmp_path / "t.csv").read_text().splitlines()[1:]}
    good = ["analyze", "bytes", "good", "mirrored", "near", "one", "short", "thin", "window"]
    assert names == {*good}
    assert f"{new}/short: 12 slices, whose InstanceNumber goes from 2 to 13: is one" in said.out
    found = re.findall(rf"^warning: {new}/(\w+)\.nii\S*: (.*)$", said.out, flags=re.MULTILINE)
    thin = "voxels of 1.88x0.7x0.8 mm (slices, rows, columns), the nearest of the training of "
    trained_on = "values from 0 to 254, and the model was trained on values of [-"
    expected = {
        "analyze": UNSURE,
        "mirrored": MIRRORED,
        "thin": f"{thin}3x0.7x0.8 mm: resample it",
        "window": "values from 0 to 254, none below 0, and those of the training are -",
        "bytes": trained_on,
    }
    assert sorted(name for name, _ in found) == sorted(expected)
    assert all(line.startswith(expected[name]) for name, line in found), found
    assert run("predict", model, tmp_path / "no.nii.gz", "--output", tmp_path / "x") == 3
    assert f"{tmp_path}/no.nii.gz: no such file\n" in capsys.readouterr().err


def test_a_damaged_header_stops_no_other_volume(slices_of_three, tmp_path, capsys):
    nib = pytest.importorskip("nibabel")
    model, new = trained(slices_of_three, tmp_path / "run", 1), tmp_path / "new"
    for name in ("a", "cut", "z"):
        path = write_nifti(new / f"{name}.nii.gz", phantom(7)[0])
    path = new / "cut.nii.gz"
    path.write_bytes(path.read_bytes()[:200])  # within the header
    write_nifti(new / "times.nii", np.zeros((9, 8, 2, 3), np.int16))
    content = write_nifti(new / "size.nii", phantom(7, SMALL)[0]).read_bytes()
    (new / "size.nii").write_bytes(b"\7\7\0\0" + content[4:])
    (new / "type.nii").write_bytes(content[:70] + b"\x63\0" + content[72:])
    write_dicom(new / "ct", phantom(7)[0])
    (new / "ct/IM014").write_bytes((new / "ct/IM014").read_bytes()[:-200])
    capsys.readouterr()
    words = "--output", tmp_path / "found", "--overwrite"
    assert run("predict", model, new, *words) == 3
    said = capsys.readouterr()
    assert "3 of 7 volumes: " in said.out
    # nibabel logs this without the name of the file.
    lines = [x for x in said.out.splitlines() if "sizeof_hdr" in x]
    mended = "its header was mended: sizeof_hdr should be 348; set sizeof_hdr to 348"
    assert lines == [f"warning: {new}/size.nii: {mended}"]
    assert f"{new}/type.nii: damaged volume: data code 99 not recognized" in said.err
    assert all(line.startswith("segtrain: ") for line in said.err.splitlines())
    assert f"{new}/ct/IM014: damaged DICOM file" in said.err
    assert f"{path}: damaged volume" in said.err
    assert f"{new}/times.nii: expected a volume of single numbers, found 9x8x2x3" in said.err
    found = {x.name: nib.load(x) for x in (tmp_path / "found/labels").iterdir()}
    assert {*found} == {"a.nii.gz", "size.nii.gz", "z.nii.gz"}
    assert run("predict", model, new / "a.nii.gz", "--output", tmp_path / "alone") == 0
    capsys.readouterr()
    alone = nib.load(tmp_path / "alone/labels/a.nii.gz")
    np.testing.assert_array_equal(found["a.nii.gz"].dataobj, alone.dataobj)
    # Of volumes with one name the folders tell them apart.
    both = [write_nifti(tmp_path / f"p{i}/a.nii.gz", phantom(7)[0]) for i in (1, 2)]
    assert run("predict", model, *both, new / "a.nii.gz", "--output", tmp_path / "both") == 0
    capsys.readouterr()
    for folder in ("p1", "p2", "new"):
        same = nib.load(tmp_path / f"both/labels/{folder}/a.nii.gz")
        np.testing.assert_array_equal(same.dataobj, alone.dataobj)
    # Where nothing can be predicted, or a name is wrong, no model is loaded.
    missing = new / "a.nii.gz", new / "no.nii.gz"
    for given, problem in (((path,), f"{path}: damaged"), (missing, "no.nii.gz: no such file")):
        assert run("predict", model, *given, *words) == 3
        said = capsys.readouterr()
        assert problem in said.err
        assert said.out == ""


def test_volumes_of_unsure_sides_are_named_when_they_are_cut(tmp_path, capsys):
    for i, codes in enumerate(((1, 0), (0, 0), (1, 1))):
        for folder, voxels in zip(("imagesTr", "labelsTr"), phantom(i, SMALL), strict=True):
            write_unsure(tmp_path / f"data/{folder}/c{i}.nii", voxels, RAS, *codes)
    assert cut(tmp_path) == 0
    said = capsys.readouterr().out
    assert f"warning: {tmp_path}/data/imagesTr/c1.nii: {UNSURE}" in said
    assert f"warning: {tmp_path}/data/imagesTr/c2.nii: {MIRRORED}" in said
    assert "c0.nii" not in said


def test_one_volume_without_a_spacing_is_cut_with_a_gap_in_slices(tmp_path, capsys):
    nib = pytest.importorskip("nibabel")
    for folder, voxels in zip(("imagesTr", "labelsTr"), phantom(0, (9, 8, 24)), strict=True):
        (tmp_path / "data" / folder).mkdir(parents=True)
        nib.Nifti1Image(voxels, np.eye(4)).to_filename(tmp_path / f"data/{folder}/a.nii")
    assert cut(tmp_path) == 0
    said = capsys.readouterr().out
    assert "2 slices from the nearest" in said
    assert "a.nii: its header has voxels of 1x1x1 without a unit" in said


def check_table(table, labels, mm3):
    """Of both volumes, by numpy and scipy; the series has the same voxels."""
    from scipy import ndimage

    rows = [line.split(",") for line in table.read_text().splitlines()]
    assert rows[0][:5] == ["image", "class", "voxels", "ml", "components"]
    classes = "background", "box", "ball"
    assert [x[:2] for x in rows[1:]] == [[y, x] for y in ("scan", "series") for x in classes]
    for k in range(3):
        voxels = (labels == k).sum()
        number = ndimage.label(labels == k, np.ones((3, 3, 3)))[1]
        for row in (rows[1 + k], rows[4 + k]):
            assert [float(x) for x in row[2:]] == pytest.approx(
                [voxels, voxels * mm3 / 1000, number, voxels / labels.size, 0, 0], rel=1e-5
            )


def check_probabilities(folder, labels):
    """A file a class, where the volume is; the highest one is the label, and all sum to 1."""
    sitk, nib = pytest.importorskip("SimpleITK"), pytest.importorskip("nibabel")
    found = []
    for name in ("background", "box", "ball"):
        path = folder / f"probabilities/scan/{name}.nii.gz"
        image = nib.load(path)
        assert image.get_data_dtype() == np.float32
        np.testing.assert_array_equal(image.affine, labels.affine)
        theirs = sitk.ReadImage(str(path))  # as 3D Slicer reads it
        assert theirs.GetDimension() == 3
        np.testing.assert_array_equal(sitk.GetArrayFromImage(theirs).T, image.get_fdata())
        found.append(image.get_fdata())
    np.testing.assert_allclose(sum(found), 1, atol=1e-5)
    np.testing.assert_array_equal(np.argmax(found, axis=0), labels.get_fdata())
    assert len({path.name for path in folder.glob("probabilities/**/*")}) == 5  # no draft is left


def test_neighbours_are_bands_of_images_and_of_slices(slices_of_three):
    """The middle of three slices is as in the files, and both sides see the same three."""
    data = load_config(slices_of_three / "mine/config.yaml").data
    data = data.model_copy(update={"neighbours": 1})
    for split in (data.train_split, data.eval_split):
        dataset = open_dataset(data, split)
        for i, name in enumerate(dataset.names):
            case, z = re.fullmatch(r"images/case_(\d)/z(\d+)", name).groups()
            volume, z = axial(phantom(int(case))[0]), int(z)
            image, _ = dataset[i]
            np.testing.assert_array_equal(with_neighbours(volume[..., None], z, 1), image)
            for band, place in enumerate((z, max(0, z - 1), min(Z - 1, z + 1))):
                np.testing.assert_array_equal(image[..., band], volume[place])


@pytest.mark.slow("data", "commands", "predict")
def test_volumes_are_predicted_with_the_neighbours_of_slices(slices_of_three, tmp_path, capsys):
    nib = pytest.importorskip("nibabel")
    root, model = slices_of_three, tmp_path / "run"
    trained(root, model, 2, **{"data.neighbours": 1})
    assert run("eval", model, "--save-predictions", tmp_path / "each") == 0
    case = re.search(r"case_\d", (root / "cut/val.txt").read_text())[0]
    source = root / f"data/imagesTr/{case}.nii.gz"
    assert run("predict", model, source, "--output", tmp_path / "found") == 0
    files = sorted((tmp_path / "each").rglob("z*.png"))
    each = [read_stored(path)[..., 0] for path in files]
    found = nib.as_closest_canonical(nib.load(tmp_path / f"found/labels/{case}.nii.gz"))
    np.testing.assert_array_equal(axial(found.get_fdata()), np.stack(each))
    capsys.readouterr()
    one = root / f"cut/images/{case}/z0003.tif"
    assert run("predict", model, one, "--output", tmp_path / "one") == 2
    assert "the slices before and after each; predict the volumes" in capsys.readouterr().err


def test_neighbours_of_names_without_numbers_are_refused(tmp_path):
    pairs = [Pair(tmp_path / f"{x}.tif", tmp_path / f"{x}.png", x) for x in "ab"]
    with pytest.raises(DataError, match="no image has a neighbour, as z0006 and z0007 are"):
        with_neighbour_files(pairs, 1)


def test_the_grids_of_a_long_and_thin_volume_are_compared_along_each_axis():
    """A spacing of slices that differs by 0.001 mm moves the fifth one by 0.005 mm, no pixel."""
    place = np.diag([0.5, 0.5, 3.0, 1.0])
    other = np.diag([0.5, 0.5, 3.001, 1.0])
    pixels, ids = np.zeros((5, 128, 256, 1), np.uint8), tuple(f"z{i:04d}" for i in range(5))
    image, label = (Stack(pixels, ids, (3.0, 0.5, 0.5), "mm", x) for x in (place, other))
    assert not other_grid(image, label)
    far = label._replace(place=np.diag([0.5, 0.51, 3.0, 1.0]))  # 128 rows: 1.28 mm
    assert "1.28 mm apart" in other_grid(image, far)


def pair_of_volumes(root, label, **how):
    """Two cases, each with this label."""
    nib = pytest.importorskip("nibabel")
    for i in range(2):
        write_nifti(root / f"data/imagesTr/c{i}.nii.gz", phantom(i, SMALL)[0])
        image = nib.Nifti1Image(label(phantom(i, SMALL)[1]), RAS)
        if how:
            image.set_data_dtype(np.uint8)  # with a slope of 2 / 255
        path = root / f"data/labelsTr/c{i}.nii.gz"
        path.parent.mkdir(parents=True, exist_ok=True)
        image.to_filename(path)


@pytest.mark.parametrize(
    ("label", "how"),
    [
        (lambda ids: ids * np.float32(0.99999994), {}),
        (lambda ids: ids.astype(np.float64), {"scaled": True}),
    ],
    ids=["beside whole numbers", "a slope of 0.0078"],
)
def test_ids_that_a_scale_moves_a_little_are_rounded(tmp_path, label, how):
    pair_of_volumes(tmp_path, label, **how)
    nib = pytest.importorskip("nibabel")
    stored = np.asanyarray(nib.load(tmp_path / "data/labelsTr/c0.nii.gz").dataobj)
    assert (stored != np.round(stored)).any()
    assert cut(tmp_path) == 0
    for i in range(2):
        labels = slices(tmp_path / "cut", f"c{i}")[1]
        np.testing.assert_array_equal(labels, axial(phantom(i, SMALL)[1]))


@pytest.mark.parametrize(
    ("label", "found"),
    [
        (lambda ids: ids * np.float32(0.4), "0.4"),
        (lambda ids: np.where(ids == 2, -1.0, ids).astype(np.int16), "-1"),
        (lambda ids: np.where(ids == 2, 0.97, 1.0 * ids).astype(np.float32), "0.97"),
        (lambda ids: np.where(ids == 2, np.nan, 1.0 * ids).astype(np.float32), "nan"),
    ],
    ids=["soft", "below 0", "two near one", "no number"],
)
def test_labels_that_hold_other_numbers_than_ids_are_refused_by_name(tmp_path, lab, label, found):
    pair_of_volumes(tmp_path, label)
    outcome = lab.command("data", "import", tmp_path / "data", "--output", tmp_path / "cut")
    assert outcome.code == 3
    assert f"labelsTr/c0.nii.gz: expected ids from 0 to 65535, found {found};" in outcome.err
    assert not (tmp_path / "cut/train.txt").exists()


def test_volumes_without_labels_are_said_to_be_so(tmp_path, lab):
    pair_of_volumes(tmp_path, lambda ids: ids)
    outcome = lab.done("data", "import", tmp_path / "data/imagesTr", "--output", tmp_path / "cut")
    assert "no labels: images alone" in outcome.out


@pytest.mark.parametrize(
    "option", ["--overlap order", "--attribute kind", "--names a,b", "--jobs 2", "--axis z"]
)
def test_an_option_without_effect_on_volumes_is_refused(tmp_path, lab, option):
    for name in ("images", "labels"):
        (tmp_path / "data" / name).mkdir(parents=True)
        options = {"imagej": True, "metadata": {"axes": "ZYX"}}
        tifffile.imwrite(tmp_path / f"data/{name}/a.tif", phantom(0, SMALL)[1].T, **options)
    words = "data", "import", tmp_path / "data", "--output", tmp_path / "cut", *option.split()
    assert f"{words[-2]}: no effect on " in lab.refused(*words)
