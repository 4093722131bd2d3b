"""Series of DICOM files of many kinds, beside the numbers they were drawn from and SimpleITK's."""

import os
import sys

import numpy as np
import pytest
from test_volumes import OBLIQUE, SMALL, axial, cut, phantom, read_dicom, write_dicom, write_nifti

from segtrain.data.read.volumes import find_volumes, load_volume, read_stack
from segtrain.errors import DataError

CODECS = ("JPEG Lossless", "JPEG-LS", "JPEG 2000")
SLOW = pytest.mark.slow("data")
KINDS = ["JPEG-LS", "no header", "suffixes", "orientation"]
MORE_KINDS = ["JPEG Lossless", "JPEG 2000", "no preamble", "UIDs"]
SUFFIXES = "", ".dcm", ".IMA", ".img", ".001"


def even(seed=0, shape=SMALL):
    """Values that a slope of 2 can hold, and their labels."""
    values, label = phantom(seed, shape)
    return values - values % 2, label


def encoded(kind, pixels):
    """The transfer syntax of this kind, and the pixels in it."""
    import imagecodecs
    from pydicom import uid

    if kind == "JPEG Lossless":
        return uid.JPEGLosslessSV1, imagecodecs.ljpeg_encode(pixels, bitspersample=12)
    if kind == "JPEG-LS":
        return uid.JPEGLSLossless, imagecodecs.jpegls_encode(pixels)
    options = {"level": 0, "codecformat": "j2k", "bitspersample": 12}
    return uid.JPEG2000Lossless, imagecodecs.jpeg2k_encode(pixels, **options)


def changed(path, i, kind):
    """The path of a file of a drawn series that was made one of this kind."""
    import pydicom

    one = read_dicom(path)
    if kind in CODECS:
        syntax, content = encoded(kind, one.pixel_array)
        one.PixelData = pydicom.encaps.encapsulate([content])
        one.file_meta.TransferSyntaxUID = syntax
        one["PixelData"].is_undefined_length = True
    elif kind == "orientation":
        cosines = np.array(one.ImageOrientationPatient, float) + 1e-12 * (i % 2)
        one.ImageOrientationPatient = [f"{x:.12f}" for x in cosines]
    one.save_as(path)
    if kind == "no preamble":
        path.write_bytes(path.read_bytes()[132:])
    elif kind == "no header":
        bare = pydicom.Dataset(dict(one.items()))
        pydicom.dcmwrite(path, bare, implicit_vr=True, little_endian=True)
    names = {"UIDs": str(one.SOPInstanceUID), "suffixes": f"{path.name}{SUFFIXES[i % 5]}"}
    return path.rename(path.with_name(names.get(kind, path.name)))


def by_position(folder):
    files = {path: read_dicom(path).ImagePositionPatient[2] for path in folder.iterdir()}
    return sorted(files, key=files.get)


@pytest.mark.parametrize("kind", [*KINDS, *(pytest.param(x, marks=SLOW) for x in MORE_KINDS)])
def test_a_series_is_what_it_was_drawn_from_and_what_simpleitk_reads(tmp_path, kind):
    sitk = pytest.importorskip("SimpleITK")
    values, _ = even()
    write_dicom(tmp_path / "ct", values, OBLIQUE)
    files = [changed(path, i, kind) for i, path in enumerate(by_position(tmp_path / "ct"))]
    (volume,), others = find_volumes(tmp_path)
    assert (volume.name, set(volume.files), others) == ("ct", set(files), [])
    image = load_volume(volume)
    np.testing.assert_array_equal(read_stack(volume, image, 2).pixels[..., 0], axial(values))

    reader = sitk.ImageSeriesReader()
    reader.SetImageIO("GDCMImageIO")
    reader.SetFileNames([str(path) for path in files])
    theirs = reader.Execute()
    np.testing.assert_array_equal(image.dataobj, sitk.GetArrayFromImage(theirs).T)
    directions = np.reshape(theirs.GetDirection(), (3, 3)) * theirs.GetSpacing()
    place = np.column_stack([directions, theirs.GetOrigin()]) * [[-1], [-1], [1]]
    np.testing.assert_allclose(image.affine[:3], place, atol=1e-5)


def test_two_series_of_a_folder_are_two_volumes(tmp_path):
    sitk = pytest.importorskip("SimpleITK")
    drawn = [even(seed)[0] for seed in range(2)]
    for i, values in enumerate(drawn):
        write_dicom(tmp_path / f"data/{i}", values)
        for path in (tmp_path / f"data/{i}").iterdir():
            path.rename(tmp_path / f"data/{path.name}_{i}")
        (tmp_path / f"data/{i}").rmdir()
    found, others = find_volumes(tmp_path / "data")
    assert others == []
    assert len({one.name for one in found}) == 2
    for one in found:
        of = {path.name[-1] for path in one.files}
        pixels = read_stack(one, load_volume(one), 2).pixels[..., 0]
        np.testing.assert_array_equal(pixels, axial(drawn[int(of.pop())]))
        assert not of
        theirs = sitk.ImageSeriesReader()
        uid = str(read_dicom(one.files[0]).SeriesInstanceUID)
        names = theirs.GetGDCMSeriesFileNames(str(tmp_path / "data"), uid)
        assert set(map(str, one.files)) == set(names)
        theirs.SetFileNames(names)
        np.testing.assert_array_equal(pixels[:, ::-1], sitk.GetArrayFromImage(theirs.Execute()))
        assert one.name == f"data_{uid[-8:]}"


@pytest.mark.parametrize("number", ["3", None, "same"])
def test_series_of_a_folder_have_names_that_do_not_depend_on_the_call(tmp_path, number):
    """Of PatientID and SeriesNumber, else of the SeriesInstanceUID; no name leaves the folder."""
    uids = {}
    for i, patient in enumerate(("../P/1", "P2")):
        write_dicom(tmp_path / f"all/one/{i}", even(i)[0], patient=patient)
        for path in [*(tmp_path / f"all/one/{i}").iterdir()]:
            one = read_dicom(path)
            one.PatientName, uids[patient] = "Secret^Anna", str(one.SeriesInstanceUID)
            one.PatientID = "same" if number == "same" else patient
            if number:
                one.SeriesNumber = "3" if number == "same" else str(i + 3)
            one.save_as(tmp_path / f"all/one/{path.name}_{i}")
            path.unlink()
    ends = [f"{x}_{uids[p][-8:]}" for x, p in (("P-1", "../P/1"), ("P2", "P2"))]
    if number == "same":
        ends = [f"same_{uid[-8:]}" for uid in uids.values()]
    ends = {"3": ["P-1_3", "P2_4"]}.get(number, ends)
    write_dicom(tmp_path / "all/another", even(2)[0])
    alone, _ = find_volumes(tmp_path / "all/one")
    beside, _ = find_volumes(tmp_path / "all")
    assert {x.name for x in alone} == {f"one_{x}" for x in ends}
    assert {x.name for x in beside} == {"another", *(f"one_{x}" for x in ends)}
    for one in alone:
        uid = str(read_dicom(one.files[0]).SeriesInstanceUID)
        assert one.about.endswith(f"SeriesInstanceUID {uid}")
        assert "Anna" not in one.about


def test_files_of_no_series_are_named(tmp_path, capfd):
    values, label = even()
    write_dicom(tmp_path / "data/p0/ct", values)
    write_nifti(tmp_path / "data/p0/seg.nii", label)
    report = read_dicom(tmp_path / "data/p0/ct/IM007")
    del report.PixelData, report.Rows, report.Columns
    report.save_as(tmp_path / "data/REPORT")
    (tmp_path / "data/p0/ct/zeros").write_bytes(bytes(900))
    (tmp_path / "data/p0/readme.txt").write_text("not beside the slices")
    assert cut(tmp_path) == 0
    said = capfd.readouterr()
    (line,) = [x for x in (said.out + said.err).splitlines() if "of no volume" in x]
    assert line.startswith("warning: 2 files are of no volume, and left out; a volume is short if ")
    assert line.endswith(f"{tmp_path}/data/REPORT, {tmp_path}/data/p0/ct/zeros")


BROKEN = ["cut", "JPEG Lossless, ends", "cosines", "colours"]
MORE_BROKEN = ["JPEG-LS, cut", "frames"]


@pytest.mark.parametrize("kind", [*BROKEN, *(pytest.param(x, marks=SLOW) for x in MORE_BROKEN)])
def test_a_file_that_is_no_slice_is_one_line_that_names_it(tmp_path, capfd, kind):
    values, label = even(shape=(48, 40, 4))
    write_dicom(tmp_path / "data/p0/ct", values)
    write_nifti(tmp_path / "data/p0/seg.nii", label)
    path, problem = tmp_path / "data/p0/ct/IM014", "damaged DICOM file"
    if "cut" in kind:
        changed(path, 0, kind.partition(",")[0])
        path.write_bytes(path.read_bytes()[:-200])
    elif "ends" in kind:
        data = bytearray(changed(path, 0, "JPEG Lossless").read_bytes())
        data[-400:-398] = b"\xff\xd9"  # the marker of the end
        path.write_bytes(data)
        problem = "damaged DICOM file: Corrupt JPEG data"
    one = read_dicom(path, force=True)
    if kind == "cosines":
        one.ImageOrientationPatient = [1, 0, 0]
        one.save_as(path)
    elif kind in ("frames", "colours"):
        problem = "expected one grey picture in each DICOM file"
        times = 2 if kind == "frames" else 3
        one.PixelData = times * bytes(2 * 48 * 40)
        if kind == "frames":
            one.NumberOfFrames = 2
        else:
            one.SamplesPerPixel, one.PlanarConfiguration = 3, 0
            one.PhotometricInterpretation = "RGB"
        one.save_as(path)
    assert cut(tmp_path) == 3
    said = capfd.readouterr().err
    assert said.startswith(f"segtrain: {path}: {problem}")
    assert said.count("\n") == 1


def test_a_name_that_is_no_unicode_is_refused(tmp_path):
    write_dicom(tmp_path / "ct", even()[0])
    os.rename(tmp_path / "ct/IM007", os.fsencode(tmp_path / "ct") + b"/\xff")
    (volume,), _ = find_volumes(tmp_path)
    with pytest.raises(DataError, match=r"ct/.*: damaged DICOM file"):
        load_volume(volume)


@pytest.mark.parametrize("kind", ["pixels", "header", "no UID", "implicit", "a report"])
def test_a_damaged_slice_belongs_to_its_series_alone(tmp_path, kind):
    """In a folder of two series, and beside another folder; a report is of none."""
    from pydicom import dcmwrite
    from pydicom.uid import ImplicitVRLittleEndian

    for i, at in enumerate(("two/0", "two/1", "good")):
        write_dicom(tmp_path / at, even(i)[0])
    for path in [*(tmp_path / "two").rglob("IM*")]:
        path.rename(path.parent.parent / f"{path.parent.name}_{path.name}")
    path = tmp_path / "two/1_IM035"  # the last slice: without it steps are even
    one = read_dicom(path)
    uid, content = str(one.SeriesInstanceUID), path.read_bytes()
    if kind == "implicit":
        one.file_meta.TransferSyntaxUID = ImplicitVRLittleEndian
        dcmwrite(path, one, implicit_vr=True, little_endian=True)
        content = path.read_bytes()
    if kind == "a report":
        one.SOPClassUID = one.file_meta.MediaStorageSOPClassUID = "1.2.840.10008.5.1.4.1.1.88.22"
        del one.PixelData, one.Rows, one.Columns
        one.save_as(path)
    else:
        end = {"header": content.find(b"MONOCHROME"), "no UID": content.find(uid.encode()) - 8}
        path.write_bytes(content[: end.get(kind, -200)])
    found, lines = find_volumes(tmp_path)
    damaged = []
    for volume in found:
        if path in volume.files:
            damaged.append(volume.about.rpartition(" ")[2])
            with pytest.raises(DataError, match=f"{path}: damaged DICOM file"):
                load_volume(volume, headers_only=True)
        else:
            assert load_volume(volume, headers_only=True) is None
    uids = [x.about.rpartition(" ")[2] for x in found if x.name.startswith("two")]
    # Where nothing tells which series it is of, both may be a slice short.
    assert damaged == {"no UID": uids, "a report": []}.get(kind, [uid])
    assert len(uids) == 2
    if kind == "a report":
        assert "1 file is of no volume" in lines.pop()
    assert lines == []


@pytest.mark.parametrize(
    ("key", "value", "problem"),
    [
        (
            "PixelSpacing",
            [0.7, 0.81],
            "IM014: differ from the other slices in size, spacing or ori",
        ),
        ("ImageOrientationPatient", [0, 1, 0, 0, 0, -1], "IM014: differ from the other slices"),
        ("ImagePositionPatient", None, "slices lie at one place, as echoes .*: IM007 and IM014"),
    ],
)
def test_a_slice_that_does_not_go_with_the_others_is_named(tmp_path, key, value, problem):
    """A spacing, a localizer and an echo."""
    write_dicom(tmp_path / "ct", even()[0])
    one = read_dicom(tmp_path / "ct/IM014")
    other = read_dicom(tmp_path / "ct/IM007")
    setattr(one, key, value or getattr(other, key))
    one.save_as(tmp_path / "ct/IM014")
    (volume,), _ = find_volumes(tmp_path)
    with pytest.raises(DataError, match=f"ct: {problem}"):
        load_volume(volume)


@pytest.mark.parametrize("places", [["IM014"], ["IM007", "IM014"], None])
@pytest.mark.parametrize(
    "keyword", ["ImagePositionPatient", "ImageOrientationPatient", "PixelSpacing"]
)
def test_what_some_slices_do_not_say_is_named(tmp_path, keyword, places):
    """All may lack spacing and orientation, but not their places."""
    write_dicom(tmp_path / "ct", even()[0])
    for name in places or [path.name for path in (tmp_path / "ct").iterdir()]:
        one = read_dicom(tmp_path / "ct" / name)
        delattr(one, keyword)
        one.save_as(tmp_path / "ct" / name)
    (volume,), _ = find_volumes(tmp_path)
    if places is None and keyword != "ImagePositionPatient":
        load_volume(volume)
        return
    which = ".*" if places is None else f"ct: {', '.join(places)}"
    with pytest.raises(DataError, match=f"{which}: no {keyword}; write it there"):
        load_volume(volume)


@pytest.mark.parametrize(
    ("numbers", "images", "said"),
    [
        ([1, 2, 3, 4, 5, 6], None, None),
        ([5, 4, 3, 2, 1, 0], "6", None),
        ([2, 3, 4, 5, 6, 7], None, "6 slices, whose InstanceNumber goes from 2 to 7: is one miss"),
        ([0, 1, 2, 3, 4, 6], None, "6 slices, whose InstanceNumber goes from 0 to 6: is one miss"),
        ([1, 1, 1, 1, 1, 1], None, None),
        ([9, None, 10, 11, 12, 13], None, None),
        ([1, 2, 3, 4, 5, 6], "7", "6 slices, and ImagesInAcquisition says 7: are some missing?"),
    ],
)
def test_a_series_without_its_first_or_last_slice_is_said_to_be_short(
    tmp_path, capsys, numbers, images, said
):
    values, label = even()
    write_dicom(tmp_path / "data/p0/ct", values)
    write_nifti(tmp_path / "data/p0/seg.nii", label)
    for number, path in zip(numbers, by_position(tmp_path / "data/p0/ct"), strict=True):
        one = read_dicom(path)
        one.InstanceNumber, one.ImagesInAcquisition = number, images
        one.save_as(path)
    assert cut(tmp_path) == 0
    lines = [x for x in capsys.readouterr().out.splitlines() if "missing" in x]
    start = f"warning: {tmp_path}/data/p0/ct: {said}"
    assert [x.startswith(start) for x in lines] == [True] * (said is not None)


@pytest.mark.parametrize("kind", ["12 bits, lossy", "filled up"])
def test_a_decoder_that_tries_or_is_given_more_than_it_needs_is_no_damage(tmp_path, kind):
    """Values beside those of imagecodecs."""
    import imagecodecs
    from pydicom import encaps, uid

    write_dicom(tmp_path / "ct", even()[0])
    path = tmp_path / "ct/IM014"
    one = read_dicom(path)
    pixels = np.random.default_rng(0).integers(0, 4096, one.pixel_array.shape, np.uint16)
    if kind == "filled up":
        content = imagecodecs.ljpeg_encode(pixels, bitspersample=12)
        content, syntax = content[:-2] + bytes(5) + content[-2:], uid.JPEGLosslessSV1
    else:
        content = imagecodecs.jpeg_encode(pixels, level=100, bitspersample=12)
        pixels, syntax = imagecodecs.jpeg_decode(content), uid.JPEGExtended12Bit
    one.PixelData, one.file_meta.TransferSyntaxUID = encaps.encapsulate([content]), syntax
    one["PixelData"].is_undefined_length = True
    one.BitsStored, one.HighBit, one.PixelRepresentation = 12, 11, 0
    one.save_as(path)
    (volume,), _ = find_volumes(tmp_path)
    index = by_position(tmp_path / "ct").index(path)
    found = np.asarray(load_volume(volume).dataobj)[:, :, index].T
    np.testing.assert_array_equal(found, pixels * float(one.RescaleSlope) + one.RescaleIntercept)
    if kind == "filled up":  # with what the decoder has not read
        path.write_bytes(path.read_bytes().replace(bytes(5) + b"\xff\xd9", b"12345\xff\xd9"))
        with pytest.raises(DataError, match="IM014: damaged DICOM file: Corrupt JPEG data"):
            load_volume(volume)
        data = path.read_bytes()
        end = data.rfind(b"\xff\xd9")
        path.write_bytes(data[: end - 200] + bytes(200) + data[end:])  # a block that was lost
        with pytest.raises(DataError, match="IM014: damaged DICOM file: Corrupt JPEG data"):
            load_volume(volume)


def test_files_that_are_no_dicom_need_no_library(tmp_path, monkeypatch):
    monkeypatch.setitem(sys.modules, "SimpleITK", None)
    for name, data in {
        "a": b"",
        "b.bin": b"\x08\0",
        "c.txt": b"abc" * 99,
        "d.dcm": bytes(12),
    }.items():
        (tmp_path / name).write_bytes(data)
    assert find_volumes(tmp_path) == ([], [])
