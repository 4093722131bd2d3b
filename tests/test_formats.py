"""Readers of the table, against the libraries that wrote the files."""

import io
import re
import zipfile
from collections import Counter

import cv2
import numpy as np
import pytest
import tifffile
from PIL import Image

from segtrain.data.read.find import IMAGE_SUFFIXES, Window
from segtrain.data.read.image_formats import (
    SUFFIXES,
    open_stored,
    read_info,
    read_palette,
    read_stored,
)
from segtrain.errors import DataError

_H, _W = 24, 37


def pixels(channels, dtype, low=0, high=None):
    rng = np.random.default_rng([channels, np.dtype(dtype).itemsize])
    if np.dtype(dtype).kind == "f":
        return rng.normal(size=(_H, _W, channels)).astype(dtype)
    high = np.iinfo(dtype).max if high is None else high
    return rng.integers(low, high, (_H, _W, channels), dtype=dtype, endpoint=True)


def save(path, array, **options):
    """Writes (H, W, C) by the library that fits the suffix."""
    suffix, array = path.suffix, array.squeeze(-1) if array.shape[-1] == 1 else array
    if suffix == ".npy":
        np.save(path, array)
    elif suffix == ".npz":
        np.savez_compressed(path, array)
    elif suffix == ".tif":
        tifffile.imwrite(path, array, **options)
    elif suffix == ".jp2":
        import imagecodecs

        path.write_bytes(imagecodecs.jpeg2k_encode(array, level=0, reversible=True))
    elif array.dtype == np.uint16 and array.ndim == 3:
        order = [2, 1, 0, 3][: array.shape[-1]]
        assert cv2.imwrite(str(path), array[..., order])
    else:
        Image.fromarray(array).save(path, **options)
    return path


DEFLATE = {"compression": "deflate", "predictor": True}
KEPT = [
    (".png", 2, "uint8", {}),
    (".png", 4, "uint8", {}),
    (".png", 3, "uint16", {}),
    (".png", 4, "uint16", {}),
    (".bmp", 1, "uint8", {}),
    (".bmp", 3, "uint8", {}),
    (".webp", 3, "uint8", {"lossless": True, "exact": True}),
    (".webp", 4, "uint8", {"lossless": True, "exact": True}),
    (".jp2", 1, "uint16", {}),
    (".jp2", 3, "uint8", {}),
    (".pgm", 1, "uint8", {}),
    (".pgm", 1, "uint16", {}),
    (".ppm", 3, "uint8", {}),
    (".npy", 1, "uint8", {}),
    (".npy", 5, "float64", {}),
    (".npz", 3, "int16", {}),
    (".tif", 1, "uint8", {}),
    (".tif", 1, "uint8", {"photometric": "miniswhite"}),
    (".tif", 3, "uint8", {"photometric": "rgb", "tile": (16, 16), **DEFLATE}),
    (".tif", 4, "uint8", {"photometric": "rgb", "extrasamples": ["unassalpha"]}),
    (".tif", 5, "uint16", {"photometric": "minisblack", "planarconfig": "contig"}),
    (".tif", 1, "float32", {"compression": "zstd", "bigtiff": True}),
    (".tif", 1, "uint16", {"byteorder": ">", "compression": "lzw"}),
]


@pytest.mark.parametrize(("suffix", "channels", "dtype", "options"), KEPT)
def test_stored_pixels_come_back_as_written(tmp_path, suffix, channels, dtype, options):
    written = pixels(channels, dtype)
    path = save(tmp_path / f"x{suffix}", written, **options)
    if options.get("photometric") == "miniswhite":
        written = 255 - written
    info = read_info(path)
    assert info[:3] == ((_H, _W), channels, np.dtype(dtype))
    assert info.alpha == (channels in (2, 4) and dtype in ("uint8", "uint16"))
    read = read_stored(path)
    assert read.dtype == np.dtype(dtype)
    np.testing.assert_array_equal(read, written)


def test_equal_pages_of_a_tiff_are_channels(tmp_path):
    written = pixels(4, "uint16")
    with tifffile.TiffWriter(tmp_path / "pages.tif") as tiff:
        for plane in np.moveaxis(written, -1, 0):
            tiff.write(plane, photometric="minisblack", metadata=None)
    assert read_info(tmp_path / "pages.tif").channels == 4
    np.testing.assert_array_equal(read_stored(tmp_path / "pages.tif"), written)


@pytest.mark.parametrize("suffix", [".png", ".bmp", ".gif", ".tif"])
def test_palette_files_give_indices_and_colours(tmp_path, suffix):
    indices = pixels(1, "uint8", high=3)[..., 0]
    colors = [(0, 0, 0), (200, 10, 20), (0, 255, 0), (9, 8, 7)]
    image = Image.fromarray(indices, "P")
    image.putpalette(sum(colors, ()))
    image.save(tmp_path / f"x{suffix}")
    info = read_info(tmp_path / f"x{suffix}")
    assert (info.palette, info.channels, info.lossless) == (True, 1, True)
    np.testing.assert_array_equal(read_stored(tmp_path / f"x{suffix}")[..., 0], indices)
    assert read_palette(tmp_path / f"x{suffix}")[:4] == colors


def test_a_mask_of_one_bit_gives_zeros_and_ones(tmp_path):
    mask = pixels(1, "uint8", high=1)[..., 0]
    for suffix in (".png", ".tif", ".bmp"):
        Image.fromarray(mask.astype(bool)).save(tmp_path / f"x{suffix}")
        assert read_info(tmp_path / f"x{suffix}").depth == 1
        np.testing.assert_array_equal(read_stored(tmp_path / f"x{suffix}")[..., 0], mask)


def test_channels_first_arrays_are_turned_where_only_that_fits(tmp_path):
    written = pixels(3, "float32")
    np.save(tmp_path / "x.npy", np.asfortranarray(np.moveaxis(written, -1, 0)))
    np.testing.assert_array_equal(read_stored(tmp_path / "x.npy"), written)


def _animation(path):
    frames = [Image.fromarray(pixels(1, "uint8", high=n)[..., 0]) for n in (3, 200)]
    frames[0].save(path, save_all=True, append_images=frames[1:])


def _two_pictures(path):
    with tifffile.TiffWriter(path) as tiff:
        for size in (20, 24):
            tiff.write(np.zeros((size, 30), np.uint8), metadata=None)


def _cut(path, array, **options):
    save(path, array, **options)
    path.write_bytes(path.read_bytes()[:-200])


def _archive(path, *arrays):
    with zipfile.ZipFile(path, "w") as archive:
        for i, array in enumerate(arrays):
            buffer = io.BytesIO()
            np.lib.format.write_array(buffer, array)
            archive.writestr(f"a{i}.npy", buffer.getvalue())


def _huge_array(path):
    header = {"descr": "<f8", "fortran_order": False, "shape": (1 << 20, 1 << 20)}
    with path.open("wb") as file:
        np.lib.format.write_array_header_1_0(file, header)


REFUSED = [
    ("a.gif", _animation, "an animation of 2 pictures"),
    ("a.webp", _animation, "an animation of 2 pictures"),
    ("two.tif", _two_pictures, "several pictures: 2"),
    ("cut.tif", lambda p: _cut(p, pixels(3, "uint8")), "cut off"),
    ("cut.npy", lambda p: _cut(p, pixels(3, "uint8")), "damaged image: "),
    ("cut.bmp", lambda p: _cut(p, pixels(3, "uint8")), "damaged"),
    ("huge.npy", _huge_array, "more than .* pixels"),
    ("many.npy", lambda p: np.save(p, np.zeros((40, 40, 17))), "17 channels; at most 16"),
    ("o.npy", lambda p: np.save(p, np.array([[1, None]]), allow_pickle=True), "object"),
    ("deep.npy", lambda p: np.save(p, np.zeros((2, 3, 4, 5))), r"expected numbers of shape"),
    ("two.npz", lambda p: _archive(p, np.eye(3), np.eye(3)), "expected one array, found 2"),
    ("scaled.pgm", lambda p: p.write_bytes(b"P5 2 2 3 \0\1\2\3"), "255 or 65535"),
    ("cmyk.tif", lambda p: Image.new("CMYK", (9, 9)).save(p), "SEPARATED"),
    ("video.tif", lambda p: Image.new("YCbCr", (9, 9)).save(p), "YCBCR"),
    ("text.tif", lambda p: p.write_text("no image"), "damaged TIFF: not a TIFF file"),
    ("empty.tif", lambda p: p.write_bytes(b"II*\0" + bytes(60)), "damaged TIFF: it ends early"),
    ("x.txt", lambda p: p.write_text("no image"), "expected a file .png"),
]


@pytest.mark.parametrize(("name", "write", "message"), REFUSED, ids=[r[0] for r in REFUSED])
def test_what_would_be_read_wrong_is_refused_by_name(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(DataError, match=rf"(?s){name}: .*{message}"):
        read_stored(tmp_path / name)


def _pages(path, planes, **options):
    with tifffile.TiffWriter(path, bigtiff="bigtiff" in options) as tiff:
        for plane in planes:
            tiff.write(plane, photometric="minisblack", metadata=None, compression="lzw")


def _stack_behind_the_first_page(path, planes):
    with tifffile.TiffWriter(path, imagej=True) as tiff:
        tiff.write(planes, metadata={"axes": "CYX"}, truncate=True)


_CYX = {"metadata": {"axes": "CYX"}, "photometric": "minisblack"}
WHOLE = {
    "ImageJ": lambda p, x: tifffile.imwrite(p, x, imagej=True, **_CYX),
    "ImageJ, deflate": lambda p, x: tifffile.imwrite(p, x, imagej=True, compression=8, **_CYX),
    "ImageJ, one page": _stack_behind_the_first_page,
    "OME": lambda p, x: tifffile.imwrite(p, x, ome=True, **_CYX),
    "OME, deflate": lambda p, x: tifffile.imwrite(p, x, ome=True, compression=8, **_CYX),
    "tifffile": lambda p, x: tifffile.imwrite(p, x, photometric="minisblack"),
    "pages": _pages,
    "pages, BigTIFF": lambda p, x: _pages(p, x, bigtiff=True),
    "planes": lambda p, x: tifffile.imwrite(p, x, planarconfig="separate", photometric=1),
}


@pytest.mark.parametrize("kind", WHOLE)
def test_a_tiff_that_is_cut_off_is_never_read_as_fewer_channels(tmp_path, kind):
    path, cut = tmp_path / "a.tif", tmp_path / "cut.tif"
    written = pixels(3, "uint16")
    WHOLE[kind](path, np.moveaxis(written, -1, 0).copy())
    np.testing.assert_array_equal(read_stored(path), written)
    content = path.read_bytes()
    said = Counter()
    for kept in np.linspace(0.06, 0.999, 60):
        cut.write_bytes(content[: int(kept * len(content))])
        try:
            assert read_info(cut) == read_info(path)
            np.testing.assert_array_equal(read_stored(cut), written)
            said["whole"] += 1
            # The text of OME stands at the end, and is not needed.
            assert kept > 0.5
        except DataError as error:
            said[re.fullmatch(rf"{cut}: ([^:\n]*): [^\n]*", str(error))[1]] += 1
    assert said.keys() <= {"the TIFF is cut off", "damaged TIFF", "whole"}
    assert said["the TIFF is cut off"] >= 30


@pytest.mark.parametrize("text", ["ImageJ=1.54f\nimages=3\nchannels=3\n", "OME"])
def test_a_tiff_with_fewer_pages_than_its_description_says_is_refused(tmp_path, text):
    planes = np.moveaxis(pixels(3, "uint16"), -1, 0)
    if text == "OME":
        tifffile.imwrite(tmp_path / "a.tif", planes.copy(), ome=True, **_CYX)
        text = tifffile.tiffcomment(tmp_path / "a.tif")
    # Such as a program leaves that was stopped while it wrote.
    write = {"metadata": None, "description": text, "compression": "deflate"}
    tifffile.imwrite(tmp_path / "b.tif", planes[0], **write)
    with pytest.raises(DataError, match=r"b.tif: .* description says 3 pages, and it has 1; copy"):
        read_info(tmp_path / "b.tif")
    # The same text with three samples in the page, as Bio-Formats writes it.
    how = write | {"photometric": "minisblack", "planarconfig": "separate"}
    tifffile.imwrite(tmp_path / "c.tif", planes, **how)
    assert read_info(tmp_path / "c.tif").channels == 3


def test_one_file_of_a_set_of_ome_is_one_channel(tmp_path):
    plane = pixels(1, "uint16")
    files = "".join(f'<TiffData FirstC="{i}"><UUID FileName="c{i}.tif"/></TiffData>' for i in "01")
    sizes = "".join(
        f' Size{axis}="{n}"' for axis, n in zip("XYCZT", (_W, _H, 2, 1, 1), strict=True)
    )
    head = '<?xml version="1.0"?><OME xmlns="http://www.openmicroscopy.org/Schemas/OME/2016-06">'
    text = f'{head}<Image ID="Image:0"><Pixels ID="Pixels:0"{sizes}>{files}</Pixels></Image></OME>'
    path = tmp_path / "c0.tif"
    tifffile.imwrite(path, plane[..., 0], metadata=None, description=text)
    np.testing.assert_array_equal(read_stored(path), plane)


GDAL = [
    (np.uint8, {"compress": "jpeg", "photometric": "YCBCR", "interleave": "pixel"}, 5),
    (np.uint16, {"compress": "lzw", "predictor": 2, "tiled": True, "interleave": "band"}, 0),
    (np.float32, {"compress": "lerc", "nodata": -9999}, 0),
    (np.uint16, {"nbits": 12}, 0),
]


@pytest.mark.parametrize(("dtype", "options", "loss"), GDAL)
def test_tiffs_of_gdal_are_read_whole_and_by_windows(tmp_path, dtype, options, loss):
    rasterio = pytest.importorskip("rasterio")
    y, x = np.mgrid[:150, :260]
    written = np.stack([x * 255 // 260, y * 255 // 150, (x + y) * 255 // 410], 2).astype(dtype)
    form = {"driver": "GTiff", "height": 150, "width": 260, "count": 3, "dtype": dtype}
    if options.get("tiled"):
        options = {**options, "blockxsize": 64, "blockysize": 128}
    with rasterio.open(tmp_path / "x.tif", "w", **form, **options) as file:
        file.write(np.moveaxis(written, -1, 0))
        file.build_overviews([2])
    info = read_info(tmp_path / "x.tif")
    assert (info.channels, info.no_data) == (3, options.get("nodata"))
    whole = read_stored(tmp_path / "x.tif")
    np.testing.assert_allclose(whole, written, atol=loss, rtol=0)
    part = open_stored(tmp_path / "x.tif", Window(37, 50, 101, 203)).pixels()
    np.testing.assert_array_equal(part, whole[37:138, 50:253])


def test_the_names_of_images_are_those_of_the_table():
    assert IMAGE_SUFFIXES == SUFFIXES


@pytest.mark.parametrize(("bits", "dtype"), [(8, "uint8"), (9, "uint16"), (12, "uint16")])
def test_jpeg2000_of_more_than_8_bits_is_read_as_16(tmp_path, bits, dtype):
    imagecodecs = pytest.importorskip("imagecodecs")
    array = pixels(1, dtype, high=2**bits - 1)
    content = imagecodecs.jpeg2k_encode(array[..., 0], level=0, reversible=True, bitspersample=bits)
    (tmp_path / "a.jp2").write_bytes(content)
    info = read_info(tmp_path / "a.jp2")
    assert (info.dtype, info.depth) == (np.dtype(dtype), bits)
    np.testing.assert_array_equal(read_stored(tmp_path / "a.jp2"), array)
