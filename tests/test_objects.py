"""Objects of label maps: tables of drawn images whose pixels, objects and places are known."""

import csv

import numpy as np
import pytest
import tifffile
from scipy import ndimage
from test_predict import CLASSES, NO_VALUE_255, photo, run, save, save_tiff, write_video
from test_raster import GEO

from segtrain.errors import ConfigError, DataError
from segtrain.predict import raster_inputs
from segtrain.predict.objects import find_objects
from segtrain.predict.pixel_size import grid_of
from segtrain.predict.summary import class_pixels, shares_line
from segtrain.types import IGNORE_INDEX

__all__ = ["run"]  # a fixture
CORNERS = np.ones((3, 3), int)


@pytest.mark.parametrize("seed", range(4))
def test_objects_are_those_of_scipy(seed):
    """Noise, whose objects wind, and areas; some pixels of no class."""
    rng = np.random.default_rng(seed)
    size = rng.integers(1, 40, 2)
    label = rng.integers(0, 3, size if seed % 2 else -(-size // 4)).astype(np.uint8)
    label = label.repeat(4, 0).repeat(4, 1)[: size[0], : size[1]]
    missing = (rng.random(label.shape) < 0.05).astype(np.uint8) * 255
    label = np.maximum(label, missing)
    found = find_objects(label, missing, 3)
    assert found.size == label.shape
    assert found.num_ignored == found.no_value == (missing > 0).sum()
    for k in range(3):
        ids, number = ndimage.label(label == k, CORNERS)
        places = [np.nonzero(ids == i + 1) for i in range(number)]
        expected = [
            [len(x), x.min(), y.min(), np.ptp(x) + 1, np.ptp(y) + 1, x.mean(), y.mean()]
            for y, x in places
        ]
        pixels, boxes, centres = found.objects[k]
        rows = np.concatenate([pixels[:, None], boxes, centres], axis=1)
        np.testing.assert_allclose(sorted(rows.tolist()), np.reshape(sorted(expected), (-1, 7)))
        assert boxes[:, 1].tolist() == sorted(boxes[:, 1])
        assert found.pixels[k] == (label == k).sum()


def test_classes_that_overlap_have_objects_of_their_own():
    label = np.random.default_rng(0).integers(0, 2, (30, 41, 3), dtype=np.uint8)
    label[:, :5] = IGNORE_INDEX
    found = find_objects(label, label[..., 0] == IGNORE_INDEX, 3)
    assert found.num_ignored == found.no_value == 150
    for k in range(3):
        assert found.pixels[k] == (label[..., k] == 1).sum()
        assert len(found.objects[k].pixels) == ndimage.label(label[..., k] == 1, CORNERS)[1]


def rows_of(path):
    with path.open(newline="") as file:
        return list(csv.DictReader(file))


def paint(label):
    """An image in which the strongest colour is that of the label."""
    return np.eye(3, dtype=np.uint8)[label] * 200


def drawn():
    """Greenish: a square of 4x5 with a pixel at its corner, and a disc; bluish: a line."""
    label = np.zeros((40, 60), int)
    label[3:7, 5:10] = 1
    label[7, 10] = 1
    y, x = np.mgrid[:40, :60]
    label[(y - 25) ** 2 + (x - 20) ** 2 <= 36] = 1
    label[12, 30:50] = 2
    return label


def test_tables_tell_pixels_objects_and_places_of_drawn_images(run, tmp_path):
    label = drawn()
    save(tmp_path / "in/b.png", paint(label))
    save(tmp_path / "in/a.png", paint(np.zeros((7, 9), int)))
    files = {"table": tmp_path / "t.csv", "objects": tmp_path / "new/o.csv"}
    assert run(tmp_path / "in", **files, min_area=(21.0, "")) == 0
    disc = ((np.mgrid[:40, :60] - np.array([25, 20])[:, None, None]) ** 2).sum(0) <= 36
    rows = [list(row.values()) for row in rows_of(files["table"])]
    greenish = 21 + int(disc.sum())
    counts = [2400 - greenish - 20, greenish, 20]
    shares = [f"{n / 2400:.12g}" for n in counts]
    assert rows == [
        ["a", "reddish", "63", "1", "1", "0", "0", "yes"],
        ["a", "greenish", "0", "0", "0", "0", "0", "no"],
        ["a", "bluish", "0", "0", "0", "0", "0", "no"],
        ["b", "reddish", str(counts[0]), shares[0], "1", "0", "0", "yes"],
        ["b", "greenish", str(counts[1]), shares[1], "2", "0", "0", "yes"],
        ["b", "bluish", "20", shares[2], "1", "0", "0", "no"],
    ]
    objects = [row for row in rows_of(files["objects"]) if row["class"] != "reddish"]
    assert [(row["class"], row["object"]) for row in objects] == [
        ("greenish", "1"),
        ("greenish", "2"),
        ("bluish", "1"),
    ]
    square, round_one, line = ([float(x) for x in list(row.values())[3:]] for row in objects)
    assert square == pytest.approx([21, (7 * 20 + 10) / 21, (4.5 * 20 + 7) / 21, 5, 3, 6, 5])
    assert round_one == [disc.sum(), 20, 25, 14, 19, 13, 13]
    assert line == [20, 39.5, 12, 30, 12, 20, 1]


def test_classes_found_are_told_in_one_line_as_the_table_counts(run, tmp_path, capsys):
    save(tmp_path / "in/b.png", paint(drawn()))
    pixels = paint(np.eye(7, 9, dtype=int)).astype(np.uint8)
    pixels[:3] = 255  # no value
    save_tiff(tmp_path / "in/a.tif", pixels, NO_VALUE_255)
    assert run(tmp_path / "in", table=tmp_path / "t.csv") == 0
    rows = rows_of(tmp_path / "t.csv")
    counts = dict.fromkeys(CLASSES.names, 0)
    for row in rows:
        counts[row["class"]] += int(row["pixels"])
    valid = 40 * 60 + 7 * 9 - 3 * 9
    assert sum(counts.values()) == valid
    largest = sorted(counts, key=counts.get, reverse=True)
    shares = ", ".join(f"{name} {100 * counts[name] / valid:.3g} %" for name in largest)
    said = capsys.readouterr().out.splitlines()
    assert f"classes: {shares}" in said
    # Without the table it is named.
    assert run(tmp_path / "in", overwrite=True) == 0
    assert f"classes: {shares}; by image: --table FILE" in capsys.readouterr().out.splitlines()


def test_the_six_largest_classes_are_told():
    label = np.repeat(np.arange(8, dtype=np.uint8), [1, 550, 500, 400, 300, 150, 0, 50])
    label = np.append(label, [IGNORE_INDEX] * 89).astype(np.uint8).reshape(30, 68)
    counts = [class_pixels(label, 2000, 8)] * 2
    line = (
        "classes: b 27.5 %, c 25 %, d 20 %, e 15 %, f 7.5 %, h 2.5 % and 1 more; 2.45 % of no class"
    )
    assert shares_line(counts, "abcdefgh", some_unknown=True) == line
    assert shares_line([np.array([9999, 1, 10000])], "ab") == "classes: a 100 %, b 0.01 %"
    assert shares_line([np.array([0, 0, 5])], "ab") == "classes: none"
    unknown = "classes: a 50 %, b 30 %; 20 % of no class"
    assert shares_line([np.array([5, 3, 10])], "ab", some_unknown=True) == unknown
    assert shares_line([], "ab") == shares_line([np.array([0, 0, 0])], "ab") == ""


def test_lengths_and_areas_are_in_the_unit_that_is_given(run, tmp_path):
    files = {"table": tmp_path / "t.csv", "objects": tmp_path / "o.csv"}
    # 21 pixels of 2.89 each, a little less in floats; the line has 20.
    for least, decision in (60.69, "yes"), (60.7, "no"):
        label = np.where(drawn() == 2, 2, 0)
        label[20:27, 30:33] = 1
        save(tmp_path / "a.png", paint(label))
        sizes = {"pixel_size": (1.7, "um"), "min_area": (least, "um2"), "overwrite": True}
        assert run(tmp_path / "a.png", **files, **sizes) == 0
        rows = {row["class"]: row for row in rows_of(files["table"])}
        assert rows["greenish"]["area_um2"] == "60.69"
        assert (rows["greenish"]["decision"], rows["bluish"]["decision"]) == (decision, "no")
    (square,) = (row for row in rows_of(files["objects"]) if row["class"] == "greenish")
    places = {"area_um2": 60.69, "x_um": 53.55, "y_um": 39.95, "width_um": 5.1, "height_um": 11.9}
    assert {key: float(square[key]) for key in places} == places


def microscope(kind, unit, times):
    """How tifffile writes pixels 0.65 um wide and 0.8 um high; times: units of a um."""
    sizes = {"X": 0.65 * times, "Y": 0.8 * times}
    if kind == "imagej":
        resolution = tuple(1 / x for x in sizes.values())
        return {"imagej": True, "resolution": resolution, "metadata": {"unit": unit}}
    about = {f"PhysicalSize{a}": x for a, x in sizes.items()}
    about |= {f"PhysicalSize{a}Unit": unit for a in sizes}
    return {"ome": True, "photometric": "rgb", "metadata": about}


@pytest.mark.parametrize(
    "kind",
    [
        ("imagej", "um", 1),
        ("imagej", "\\u00B5m", 1),
        ("imagej", "mm", 1e-3),
        ("ome", "µm", 1),
        ("ome", "nm", 1e3),
    ],
)
def test_the_pixel_size_of_a_microscope_is_read_and_compared(run, tmp_path, capsys, kind):
    label = np.where(drawn() == 2, 2, 0)
    label[20:27, 30:33] = 1
    path, files = tmp_path / "x.tif", {"table": tmp_path / "t.csv", "objects": tmp_path / "o.csv"}
    tifffile.imwrite(path, paint(label), **microscope(*kind))
    assert run(path, **files, min_area=(20.9 * 0.52, "um2")) == 0
    assert "warning" not in capsys.readouterr().out
    (row,) = (row for row in rows_of(files["table"]) if row["class"] == "greenish")
    area = pytest.approx(21 * 0.52, rel=1e-5)
    assert (float(row["area_um2"]), row["decision"]) == (area, "yes")
    (square,) = (row for row in rows_of(files["objects"]) if row["class"] == "greenish")
    sizes = [float(square[f"{x}_um"]) for x in ("x", "y", "width", "height")]
    assert sizes == pytest.approx([31.5 * 0.65, 23.5 * 0.8, 3 * 0.65, 7 * 0.8], rel=1e-5)
    assert run(path, **files, pixel_size=(0.325, "um"), overwrite=True) == 0
    said = capsys.readouterr().out
    assert f"warning: --pixel-size is not what files say: {path} (0.65 x 0.8 um)" in said
    (row,) = (row for row in rows_of(files["table"]) if row["class"] == "greenish")
    assert float(row["area_um2"]) == pytest.approx(21 * 0.325**2)
    # A table has one unit.
    save_tiff(tmp_path / "map.tif", paint(label), *GEO)
    assert run(path, tmp_path / "map.tif", **files, overwrite=True) == 0
    assert f"in pixels alone: {path}: pixels in um, others in m" in capsys.readouterr().out
    areas = {x["image"]: x["area_m2"] for x in rows_of(files["table"]) if x["class"] == "greenish"}
    assert areas == {"x": "", "map": "2100"}


def test_a_size_as_the_microscope_says_it_is_no_news(run, tmp_path, capsys):
    how = {"imagej": True, "resolution": (20 / 13, 20 / 13), "metadata": {"unit": "micron"}}
    tifffile.imwrite(tmp_path / "x.tif", paint(drawn()), **how)
    for size in ((0.651, "um"), (650.0, "nm")):
        asked = {"table": tmp_path / "t.csv", "pixel_size": size, "overwrite": True}
        assert run(tmp_path / "x.tif", **asked) == 0
        assert "warning" not in capsys.readouterr().out


def test_areas_and_centres_are_those_of_the_projection(run, tmp_path):
    label = np.zeros((200, 330), int)
    label[20:60, 30:37] = 1
    label[80, 160] = label[79, 159] = 2  # touch at a corner
    save_tiff(tmp_path / "x.tif", paint(label), *GEO)
    files = {"table": tmp_path / "t.csv", "objects": tmp_path / "o.csv"}
    assert run(tmp_path / "x.tif", **files, min_area=(300.0, "m2")) == 0
    rows = {row["class"]: row for row in rows_of(files["table"])}
    assert rows["greenish"]["area_m2"] == "28000"
    assert [rows[k]["objects"] for k in CLASSES.names] == ["1", "1", "1"]
    assert (rows["greenish"]["decision"], rows["bluish"]["decision"]) == ("yes", "no")
    # In pixels, of which it has 280.
    assert run(tmp_path / "x.tif", table=files["table"], min_area=(281.0, ""), overwrite=True) == 0
    assert rows_of(files["table"])[1]["decision"] == "no"
    (two,) = (row for row in rows_of(files["objects"]) if row["class"] == "bluish")
    assert float(two["map_x"]) == 500000 + 10 * 160
    assert float(two["map_y"]) == 5000000 - 10 * 80


def keys(*entries):
    numbers = [1, 1, 0, len(entries)]
    for key, value in entries:
        numbers += [key, 0, 1, value]
    return (34735, "H", len(numbers), tuple(numbers), True)


METRES = 32633, 9001, 1.0, (500_000.0, 5_000_000.0)
FEET = 2263, 9003, 1200 / 3937, (1_000_000.0, 200_000.0)


@pytest.mark.parametrize(
    ("point", "crs", "turned"),
    [(1, METRES, False), (1, FEET, True), (2, METRES, True), (2, FEET, False)],
)
def test_places_on_the_ground_are_those_of_the_tags(tmp_path, point, crs, turned):
    """Of the corner of a pixel, or (`point` 2) of its middle, from metres or feet."""
    code, unit, metres, (x, y) = crs  # a place where the projection holds
    matrix, numbers = np.array([(12.0, 3.0, x + 700), (4.0, -9.0, y + 900)]), np.eye(4)
    numbers[:2, [0, 1, 3]] = matrix
    where = [(34264, "d", 16, tuple(numbers.ravel()), True)]
    if not turned:
        tie = (33922, "d", 6, (2.0, 5.0, 0.0, x, y, 0.0), True)
        where = [(33550, "d", 3, (10.0, 20.0, 0.0), True), tie]
        matrix = np.array([(10.0, 0, x - 20), (0, -20.0, y + 100)])
    tags = [*where, keys((1024, 1), (1025, point), (3072, code), (3076, unit))]
    save_tiff(tmp_path / "x.tif", photo(8, 9), *tags)
    grid, why = grid_of(tmp_path / "x.tif")
    assert not why
    half = 0.5 * (point - 1)
    for column, row in ((0, 0), (3.5, 7)):
        expected = matrix @ (column - half, row - half, 1)
        assert grid.at(column, row) == pytest.approx(expected, rel=1e-12)
    assert grid.area == pytest.approx(abs(np.linalg.det(matrix[:, :2])) * metres**2)
    assert (grid.width, grid.height) == pytest.approx(np.hypot(*matrix[:, :2]) * metres)


@pytest.mark.parametrize(
    ("entries", "words"),
    [
        (((1024, 2), (2048, 4326)), "its coordinates are degrees"),
        (((1024, 1), (3072, 3857), (3076, 9001)), "areas on Earth are 0.57 times those of its"),
        (((1024, 1), (3072, 4087), (3076, 9001)), "areas on Earth are 0.708 times those of its"),
        (((1025, 1),), "it names no projection"),
    ],
)
def test_where_metres_are_not_sure_pixels_are_counted_and_it_is_said(
    run, tmp_path, capsys, entries, words
):
    tags = [*GEO[:2], keys(*entries)]
    save_tiff(tmp_path / "x.tif", photo(8, 9), *tags)
    assert run(tmp_path / "x.tif", table=tmp_path / "t.csv") == 0
    output = capsys.readouterr().out
    assert f"warning: measured in pixels alone: {tmp_path}/x.tif: {words}" in output
    assert "area_m2" not in rows_of(tmp_path / "t.csv")[0]
    with pytest.raises(ConfigError, match=r"--min-area: no pixel size in m: .*x\.tif"):
        run(tmp_path / "x.tif", table=tmp_path / "t.csv", min_area=(5.0, "m2"), overwrite=True)


def test_images_that_cannot_be_read_are_left_out_of_tables(run, tmp_path):
    save(tmp_path / "in/a.png", paint(drawn()))
    (tmp_path / "in/b.tif").write_text("not a picture")
    with pytest.raises(DataError, match=r"1 of 2 files cannot be read.*\n?.*b\.tif"):
        run(tmp_path / "in", table=tmp_path / "t.csv")
    assert {row["image"] for row in rows_of(tmp_path / "t.csv")} == {"a"}


def test_an_image_without_any_value_has_no_shares(run, tmp_path):
    save_tiff(tmp_path / "x.tif", np.full((8, 9, 3), 255, np.uint8), NO_VALUE_255)
    assert run(tmp_path / "x.tif", table=tmp_path / "t.csv") == 0
    assert {row["share"] for row in rows_of(tmp_path / "t.csv")} == {""}


def test_what_tables_cannot_honour_is_refused(run, tmp_path, monkeypatch):
    image, table = save(tmp_path / "a.png", photo(8, 9)), tmp_path / "t.csv"
    save_tiff(tmp_path / "x.tif", photo(8, 9), *GEO)
    video = write_video(tmp_path / "drive.mp4", [(200, 20, 30)])
    with pytest.raises(ConfigError, match=r"--table: not for a video: .*drive\.mp4"):
        run(video, table=table)
    with pytest.raises(ConfigError, match=r"--pixel-size: .* size of their own: .*x\.tif$"):
        run(image, tmp_path / "x.tif", table=table, pixel_size=(1.0, "m"))
    # A raster in parts; another command measures its label map.
    monkeypatch.setattr("segtrain.data.read.raster._MIN_BYTES", 0)
    monkeypatch.setattr(raster_inputs, "MAX_PHOTO_PIXELS", 50)
    words = r"{}: not for a raster .*x\.tif; .* segtrain data polygons LABELMAP"
    for option in "table", "objects":
        with pytest.raises(ConfigError, match=words.format(f"--{option}")):
            run(tmp_path / "x.tif", **{option: table})
    assert not table.exists()
