"""Pixels from files. PNG files are written bit by bit here: no library vouches for itself."""

import io
import os
import re
import struct
import zlib

import numpy as np
import pytest
import tifffile
from PIL import Image

from segtrain.data.read import image as images
from segtrain.data.read.classes import ClassFile, SegClass
from segtrain.data.read.decode import printed_lines
from segtrain.data.read.image_formats import read_info
from segtrain.data.read.label_formats import label_format_of
from segtrain.data.read.labels import looks_like_train_ids
from segtrain.data.read.photos import read_photo
from segtrain.data.read.raw_label import read_raw_label
from segtrain.errors import DataError

GREY, RGB, PALETTE, GREY_ALPHA, RGBA = 0, 2, 3, 4, 6
CHANNELS = {GREY: 1, RGB: 3, PALETTE: 1, GREY_ALPHA: 2, RGBA: 4}


def chunk(kind, data):
    return struct.pack(">I", len(data)) + kind + data + struct.pack(">I", zlib.crc32(kind + data))


def png(values, color_type, depth, *, extra=(), size=None):
    """A PNG of the samples `values` (H, W) or (H, W, C), by the text of the standard."""
    height, width = values.shape[:2]
    assert values.reshape(height, width, -1).shape[2] == CHANNELS[color_type]
    bits = (values.reshape(height, -1, 1) >> np.arange(depth - 1, -1, -1)) & 1
    rows = np.packbits(bits.reshape(height, -1).astype(np.uint8), axis=1)
    filtered = b"".join(b"\0" + row.tobytes() for row in rows)
    width, height = size or (width, height)
    header = struct.pack(">IIBBBBB", width, height, depth, color_type, 0, 0, 0)
    body = b"".join(chunk(kind, data) for kind, data in extra)
    pixels = chunk(b"IDAT", zlib.compress(filtered))
    return b"\x89PNG\r\n\x1a\n" + chunk(b"IHDR", header) + body + pixels + chunk(b"IEND", b"")


def jpeg(image, **options):
    out = io.BytesIO()
    Image.fromarray(image).save(out, "JPEG", **options)
    return out.getvalue()


def class_file(*ids, ignore=(), colors=None, ignore_color=(0, 0, 0)):
    colors = colors or [(10 * i, 5, 200) for i in range(len(ids))]
    classes = tuple(
        SegClass(f"c{i}", color, tuple(one) if isinstance(one, tuple) else (one,))
        for i, (one, color) in enumerate(zip(ids, colors, strict=True))
    )
    return ClassFile("toy", classes, tuple(ignore), ignore_color)


@pytest.fixture
def saved(tmp_path):
    def save(data, name="x.png"):
        path = tmp_path / name
        path.write_bytes(data)
        return path

    return save


def read_image(path, dtype=np.uint8):
    return images.read_image([path], images.ImageForm(dtype=np.dtype(dtype)))


def read_one_photo(path):
    return read_photo(path, images.RGB)


def random_values(depth, shape=(5, 11), seed=0):
    return np.random.default_rng(seed).integers(0, 1 << depth, shape)


def smooth_image(height=40, width=56):
    y, x = np.mgrid[:height, :width]
    return np.stack([4 * x, 5 * y, 100 + x + y], axis=2).astype(np.uint8)


@pytest.mark.fault(55, 56, 58)
@pytest.mark.parametrize("depth", [1, 2, 4, 8, 16])
def test_a_label_gives_the_stored_ids_at_every_depth_and_not_the_colours(saved, depth):
    ids = random_values(depth)
    raw = read_raw_label(saved(png(ids, GREY, depth)))
    assert raw.dtype == (np.uint16 if depth == 16 else np.uint8)
    np.testing.assert_array_equal(raw, ids)
    if depth <= 8:
        colors = random_values(8, (1 << depth, 3), seed=1).astype(np.uint8)
        path = saved(png(ids, PALETTE, depth, extra=[(b"PLTE", colors.tobytes())]))
        np.testing.assert_array_equal(read_raw_label(path), ids)


@pytest.mark.fault(56)
@pytest.mark.parametrize(
    ("depth", "label_format", "values", "train_ids"),
    [
        (8, "ids", [7, 8, 4, 9, 7, 255], [1, 0, 0, 255, 1, 255]),
        (16, "ids", [7, 1000, 4, 232, 7, 255], [1, 2, 0, 255, 1, 255]),
        (8, "train_ids", [0, 1, 2, 255, 2, 1], [0, 1, 2, 255, 2, 1]),
    ],
)
def test_raw_ids_become_train_ids(saved, depth, label_format, values, train_ids):
    classes = class_file((8, 4), 7, 1000, ignore=(9, 232, 255))
    file = saved(png(np.array([values[:3], values[3:]]), GREY, depth))
    label = label_format_of(label_format).read(file, classes)
    assert label.dtype == np.uint8
    assert label.flatten().tolist() == train_ids
    assert classes.write_ids == [8, 7, 1000]


@pytest.mark.fault(52)
@pytest.mark.parametrize("depth", [8, 16])
def test_unknown_ids_are_named_with_their_pixels(saved, depth):
    path = saved(png(np.array([[0, 40, 40], [1, 77, 40]]), GREY, depth))
    with pytest.raises(DataError, match=r"x\.png: .* toy: 40 \(3 pixels\), 77 \(1 pixels\)"):
        label_format_of("ids").read(path, class_file(0, 1, ignore=(255,)))


@pytest.mark.parametrize("depth", [8, 16])
def test_an_unknown_id_is_noticed_even_if_the_classes_take_all_train_ids(saved, depth):
    classes = class_file(*range(255), ignore=())
    ids = np.array([[*range(255)]])
    read = label_format_of("ids").read(saved(png(ids, GREY, depth)), classes)
    np.testing.assert_array_equal(read, ids)
    with pytest.raises(DataError, match=r"outside class file toy: 255 \(1 pixels\)"):
        label_format_of("ids").read(
            saved(png(np.append(ids, [[255]], axis=1), GREY, depth)), classes
        )


@pytest.mark.fault(53, 54)
@pytest.mark.parametrize(
    ("values", "classes", "hint"),
    [
        ([0, 255], class_file(0, 1), "0/255 mask"),
        ([0, 1, 255], class_file(7, 8, ignore=(0, 1)), "look like train ids"),
        ([0, 1, 255], class_file(0, 1), r"to ignore them, write `ignore_ids: \[255\]` there"),
        ([0, 1, 255], class_file(0, 1, ignore=(9,)), r"write `ignore_ids: \[9, 255\]` there"),
        ([0, 2], class_file(0, 1, ignore=(255,)), r"write `ignore_ids: \[255, 2\]` there"),
        ([1, 2, 3], class_file(0, 1, 2), "count from 1"),
        ([1, 2, 3, 255], class_file(0, 1, 2), "count from 1"),
        (range(256), class_file(0, 1), "resizing with interpolation"),
    ],
)
def test_typical_mistakes_of_ids_are_recognized(saved, values, classes, hint):
    path = saved(png(np.array([list(values)]), GREY, 8))
    with pytest.raises(DataError, match=hint):
        label_format_of("ids").read(path, classes)


COLORS = class_file(0, 1, colors=[(1, 2, 3), (1, 2, 4)], ignore_color=(9, 9, 9))
TRAIN_IDS = class_file(7, 8, 0, ignore=(1, 255))
# Of two colours the second is not opaque.
CLEAR = [(b"PLTE", bytes([1, 2, 4, 1, 2, 3])), (b"tRNS", bytes([255, 7]))]


def rgb(*colors):
    return np.array([colors])


@pytest.mark.fault(57)
@pytest.mark.parametrize(
    ("content", "label_format", "message"),
    [
        (png(random_values(8, (5, 11, 3)), RGB, 8), "ids", "is RGB, expected one channel"),
        (jpeg(smooth_image()[..., 0]), "ids", "compressed with loss"),
        (png(random_values(16, (5, 11, 3)), RGB, 16), "colors", "3 channels of uint16; expected"),
        (png(rgb([1, 2, 3, 0], [1, 2, 3, 9], [1, 2, 3, 255]), RGBA, 8), "colors", "2 pixels are t"),
        (png(np.array([[0, 1, 1]]), PALETTE, 1, extra=CLEAR), "colors", "2 pixels are transparent"),
        (png(rgb([5, 5, 5], [5, 5, 5], [0, 9, 1]), RGB, 8), "colors", "name: [5, 5, 5] (2 pixels)"),
        *((png(np.array([[0, i]]), GREY, 8), "train_ids", f"{i} (1 pixels)") for i in (3, 7, 254)),
    ],
)
def test_labels_of_another_form_are_refused(saved, content, label_format, message):
    classes = TRAIN_IDS if label_format == "train_ids" else COLORS
    with pytest.raises(DataError, match=f"x.png: .*{re.escape(message)}"):
        label_format_of(label_format).read(saved(content), classes)


def test_colors_are_matched_exactly(saved):
    values = np.array([[[1, 2, 4], [9, 9, 9], [1, 2, 3]], [[1, 2, 3], [1, 2, 3], [1, 2, 4]]])
    opaque = np.dstack([values, np.full((2, 3), 255)])
    plte = [(b"PLTE", bytes([1, 2, 4, 9, 9, 9, 1, 2, 3]))]
    indexed = png(np.array([[0, 1, 2], [2, 2, 0]]), PALETTE, 2, extra=plte)
    for content in (png(values, RGB, 8), png(opaque, RGBA, 8), indexed):
        label = label_format_of("colors").read(saved(content), COLORS)
        assert label.dtype == np.uint8
        assert label.tolist() == [[1, 255, 0], [0, 0, 1]]
    other = np.where((values == 9).all(2, keepdims=True), 5, values)
    with pytest.raises(DataError, match=r"does not name: \[5, 5, 5\] \(1 pixels\); give each"):
        label_format_of("colors").read(saved(png(other, RGB, 8)), COLORS)


@pytest.mark.parametrize(
    ("raw_ids", "found", "expected"),
    [
        ((7, 23, 26), {0, 1, 2, 255}, True),
        ((7, 23, 26), {1}, True),
        ((7, 23, 26), {0, 3}, False),  # train ids end at 2
        ((7, 23, 26), {255}, False),
        ((1, 2, 3), {0, 2}, True),
        ((0, 1, 2), {0, 2}, False),
        ((0, 1, 255), {0, 2}, False),  # of a mask with a foreground of 255
    ],
)
def test_train_ids_are_told_from_raw_ids(raw_ids, found, expected):
    classes = tuple(SegClass(f"c{i}", (i, i, i), (i,)) for i in raw_ids)
    class_file = ClassFile("own", classes, ignore_ids=(), ignore_color=(9, 9, 9))
    assert looks_like_train_ids(found, class_file) == expected


@pytest.mark.fault(61)
@pytest.mark.parametrize("depth", [8, 16])
@pytest.mark.parametrize("color_type", [GREY, RGB, GREY_ALPHA, RGBA])
def test_png_image_of_any_kind_becomes_rgb(saved, color_type, depth):
    dtype = np.uint8 if depth == 8 else np.uint16
    values = random_values(depth, (5, 11, CHANNELS[color_type]))
    path = saved(png(values, color_type, depth))
    image = read_image(path, dtype)
    color = values[..., :3] if color_type in (RGB, RGBA) else values[..., :1]
    assert image.dtype == dtype
    np.testing.assert_array_equal(image, np.broadcast_to(color, (5, 11, 3)))
    with pytest.raises(DataError, match=r"x\.png: the image is uint.*convert all to one type"):
        read_image(path, np.uint16 if depth == 8 else np.uint8)


def test_a_palette_image_becomes_its_colours_and_a_jpeg_keeps_the_order_of_channels(saved):
    colors = random_values(8, (16, 3)).astype(np.uint8)
    values = random_values(4)
    image = read_image(saved(png(values, PALETTE, 4, extra=[(b"PLTE", colors.tobytes())])))
    np.testing.assert_array_equal(image, colors[values])
    expected = smooth_image()
    image = read_image(saved(jpeg(expected, quality=95, subsampling=0), "x.jpg"))
    assert np.abs(image.astype(int) - expected).max() <= 6


@pytest.mark.fault(60)
def test_exif_orientation_does_not_turn_the_image(saved):
    exif = Image.Exif()
    exif[0x0112] = 6
    path = saved(jpeg(smooth_image(40, 56), exif=exif), "x.jpg")
    assert read_image(path).shape == (40, 56, 3)
    assert read_info(path).orientation == 6


@pytest.mark.fault(61)
def test_cmyk_is_refused(tmp_path):
    Image.fromarray(smooth_image()).convert("CMYK").save(tmp_path / "x.jpg")
    with pytest.raises(DataError, match=r"x\.jpg: the image is CMYK; convert it to 8-bit RGB"):
        read_image(tmp_path / "x.jpg")


@pytest.mark.fault(59)
def test_jpeg_that_ends_early_is_refused(saved):
    """Also if the thumbnail in it has an end marker; bytes after the end are allowed."""
    data = jpeg(smooth_image(), exif=b"Exif\0\0" + jpeg(smooth_image(16, 16)))
    assert read_image(saved(data + b"\0" * 100, "x.jpg")).shape == (40, 56, 3)
    for end in (*(int(share * len(data)) for share in (0.1, 0.5, 0.9)), len(data) - 20):
        with pytest.raises(DataError, match=r"x\.jpg"):
            read_image(saved(data[:end], "x.jpg"))
    with pytest.raises(DataError, match="end marker is missing"):
        read_image(saved(data[:-20], "x.jpg"))


@pytest.mark.fault(59)
@pytest.mark.parametrize("read", [read_image, read_raw_label])
def test_no_cut_or_flipped_bit_in_a_png_goes_unnoticed_and_no_other_file_is_a_picture(saved, read):
    data = png(random_values(8, (6, 9)), GREY, 8)
    broken = [
        data[:end] for end in (4, 20, 40, len(data) // 2, *(len(data) - n for n in (13, 12, 1)))
    ]
    for place in range(8, len(data), 3):  # all but the signature
        damaged = bytearray(data)
        damaged[place] ^= 1 << (place % 8)
        broken.append(bytes(damaged))
    broken += [b"", b"hello, this is text\n", data[:8], b"\xff\xd8\xff\xe0", b"GIF89a" * 9]
    for content in broken:
        with pytest.raises(DataError, match=r"x\.png"):
            read(saved(content))


@pytest.mark.fault(62)
@pytest.mark.filterwarnings("ignore::PIL.Image.DecompressionBombWarning")
@pytest.mark.parametrize("side", [9_500, 14_000, 1 << 30])
@pytest.mark.parametrize("read", [read_image, read_raw_label, read_one_photo])
def test_decompression_bomb_is_refused_from_its_header(saved, read, side):
    """Predictions are made of images up to twice the size; here the pixels of these are missing."""
    said = "more than 178,956,970 pixels"
    if side == 9_500:
        said = "damaged image" if read is read_one_photo else "more than 89,478,485 pixels"
    path = saved(png(np.zeros((1, 8), int), GREY, 1, size=(side, side)))
    with pytest.raises(DataError, match=rf"x\.png: {said}"):
        read(path)


def test_a_label_of_any_format_that_keeps_numbers_gives_its_ids(tmp_path):
    """Also of three equal channels, as when a grey file was saved as RGB; and whole floats."""
    ids = random_values(4, (20, 30)).astype(np.uint8)
    for name in ("x.webp", "x.png"):
        Image.fromarray(np.dstack([ids] * 3)).save(tmp_path / name, lossless=True)
    np.savez(tmp_path / "x.npz", ids.astype(np.float32))
    for path in tmp_path.iterdir():
        found = read_raw_label(path)
        assert found.dtype == np.uint8
        np.testing.assert_array_equal(found, ids)


@pytest.mark.parametrize(
    ("name", "write", "message"),
    [
        ("x.npy", lambda p: np.save(p, np.array([[0, -1]])), "int64 from -1 to 0, expected whole"),
        ("x.npy", lambda p: np.save(p, np.array([[0, 0.5]])), "float64 from 0.0 to 0.5, expected"),
        ("x.npy", lambda p: np.save(p, np.array([[0, np.nan]])), "list it under ignore_ids"),
        ("x.npy", lambda p: np.save(p, np.zeros((2, 3, 5))), "has 5 channels"),
        ("x.webp", lambda p: Image.fromarray(smooth_image()).save(p), "compressed with loss"),
        ("x.tif", lambda p: tifffile.imwrite(p, smooth_image(), compression="jpeg"), "with loss"),
    ],
)
def test_a_label_that_does_not_hold_ids_is_refused(tmp_path, name, write, message):
    write(tmp_path / name)
    with pytest.raises(DataError, match=rf"{name}: .*{message}"):
        read_raw_label(tmp_path / name)


def test_of_what_is_printed_meanwhile_only_the_named_lines_are_taken(capfd):
    with printed_lines(("Corrupt", "Premature")) as said:
        os.write(2, b"Corrupt JPEG data\nof another thread\nPremature end\n 50%|")
    assert said == ["Corrupt JPEG data", "Premature end"]
    assert capfd.readouterr().err == "of another thread\n 50%|"
