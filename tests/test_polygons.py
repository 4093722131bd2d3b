"""Label maps to outlines: every kind of label that training reads, everywhere on the Earth."""

import json
from functools import partial

import numpy as np
import pytest
from affine import Affine
from test_geojson import NORTH_UP, PX_M, UTM, drawn, raster

from segtrain.data.read.label_formats import label_format_of
from segtrain.desk.annotations import polygons
from segtrain.desk.annotations.polygons import find_label_maps, write_polygons
from segtrain.errors import DataError

rasterio = pytest.importorskip("rasterio")
pytest.importorskip("rasterio.warp")
shapely = pytest.importorskip("shapely")

NAMES = "classes: [background, wood, lake]\n"


@pytest.fixture
def outlines(tmp_path):
    """`outlines(*paths)`: the areas by class, and the features, of these label maps."""

    def found(*paths, classes=NAMES, label_format=None, **options):
        (tmp_path / "c.yaml").write_text(classes)
        file = label_format_of(label_format or "ids").class_file(str(tmp_path / "c.yaml"))
        options |= {"label_format": label_format}
        output = tmp_path / "found.geojson"
        areas = write_polygons(find_label_maps(paths), file, output, **options)
        return {name: one[1] for name, one in areas.items()}, json.loads(output.read_text())[
            "features"
        ]

    return found


def square(side=20, value=1):
    return np.full((1, side, side), value, np.uint8)


def test_overlapping_classes_are_outlined_band_by_band(tmp_path, outlines):
    bands = np.zeros((2, 30, 30), np.uint8)
    bands[0, :10, :10] = 1
    bands[1, 5:25, 5:25] = 1
    path = raster(tmp_path / "labels/a.tif", pixels=bands)
    areas, _ = outlines(path, classes="classes: [wood, lake]\n", label_format="bands")
    assert areas == {"wood": 100 * PX_M**2, "lake": 400 * PX_M**2}
    with pytest.raises(DataError, match=r"a\.tif: 2 channels; --label-format bands, colors or ids"):
        outlines(path, classes="classes: [wood, lake]\n")


def test_windows_of_a_large_raster_are_one_label_map(tmp_path, outlines, monkeypatch):
    bands = np.zeros((2, 50, 40), np.uint8)
    bands[0, 5:45, 10:30] = bands[1, 20:22] = 1
    path = raster(tmp_path / "a.tif", pixels=bands)
    options = {"classes": "classes: [wood, lake]\n", "label_format": "bands"}
    whole = outlines(path, **options)
    monkeypatch.setattr(polygons, "raster_size", lambda path: (50, 40))
    monkeypatch.setattr(polygons, "windows", partial(polygons.windows, side=16))
    assert outlines(path, **options) == whole
    assert whole[0] == {"wood": 800 * PX_M**2, "lake": 80 * PX_M**2}


def test_probabilities_are_no_label_map(tmp_path, outlines):
    path = tmp_path / "p.tif"
    for bands in 1, 3:
        options = {"count": bands, "height": 8, "width": 9, "dtype": "float32", "nodata": "nan"}
        with rasterio.open(path, "w", transform=NORTH_UP, crs=UTM, **options) as file:
            file.write(np.random.default_rng(0).random((bands, 8, 9), np.float32))
        for label_format in "bands", "ids":
            with pytest.raises(DataError, match=r"p\.tif: the label (has|holds|is)"):
                outlines(path, label_format=label_format)


def test_all_label_maps_of_a_folder_count_whatever_their_suffix(tmp_path, outlines):
    for name in "a.tif", "b.tiff", "c.TIF", "deep/d.tif":
        raster(tmp_path / "labels" / name, pixels=square())
    options = {"driver": "PNG", "count": 1, "dtype": "uint8", "height": 20, "width": 20}
    with rasterio.open(
        tmp_path / "labels/e.png", "w", crs=UTM, transform=NORTH_UP, **options
    ) as png:
        png.write(square())
    # As `predict` writes it beside a.tif.
    (tmp_path / "labels/a.png").write_bytes((tmp_path / "labels/e.png").read_bytes())
    areas, features = outlines(tmp_path / "labels", tmp_path / "labels/a.tif")
    assert areas == {"wood": 5 * 400 * PX_M**2}
    found = [one["properties"]["raster"].rpartition("labels/")[2] for one in features]
    assert sorted(found) == ["a.tif", "b.tiff", "c.TIF", "deep/d.tif", "e.png"]


def test_a_label_map_without_a_place_is_refused_in_a_folder_too(tmp_path, outlines):
    raster(tmp_path / "labels/a.tif", pixels=square())
    raster(tmp_path / "labels/b.tif", Affine.identity(), crs=None, pixels=square())
    raster(tmp_path / "labels/c.tif", crs=None, pixels=square())
    with pytest.raises(DataError, match=r"b\.tif: no georeference"):
        outlines(tmp_path / "labels")
    with pytest.raises(DataError, match=r"c\.tif: its georeference has no coordinate system"):
        outlines(tmp_path / "labels/c.tif")
    (tmp_path / "labels/c.tif").rename(tmp_path / "labels/a.TIFF")
    (tmp_path / "labels/b.tif").unlink()
    with pytest.raises(DataError, match=r"a\.TIFF, a\.tif have one name; keep one"):
        outlines(tmp_path / "labels")


def test_every_id_of_a_class_is_outlined_and_ignored_ones_are_not(tmp_path, outlines):
    pixels = square()
    pixels[0, :4], pixels[0, 4:8], pixels[0, 8:9] = 7, 9, 3
    path = raster(tmp_path / "a.tif", pixels=pixels)
    classes = "classes: [{name: rest, ids: [1]}, {name: wood, ids: [5, 7]}]\nignore_ids: [9, 3]\n"
    areas, _ = outlines(path, classes=classes)
    assert areas == {"wood": 80 * PX_M**2, "rest": 220 * PX_M**2}
    with rasterio.open(path, "r+") as file:
        file.nodata = 7
    assert outlines(path, classes=classes)[0] == {"rest": 220 * PX_M**2}


def test_colours_and_train_ids_are_read_as_training_reads_them(tmp_path, outlines):
    rgb = np.zeros((3, 10, 10), np.uint8)
    rgb[1, :5] = 255
    path = raster(tmp_path / "a.tif", pixels=rgb)
    two = [("{name: rest, color: [0, 0, 0], ids: [4]}"), "{name: wood, color: [0, 255, 0]}"]
    classes = f"classes: [{', '.join(two)}]\n"
    areas, _ = outlines(path, classes=classes, label_format="colors")
    assert areas == {"wood": 50 * PX_M**2, "rest": 50 * PX_M**2}
    path = raster(tmp_path / "b.tif", pixels=square(value=0))
    areas, _ = outlines(path, classes=classes, label_format="train_ids")
    assert areas == {"rest": 400 * PX_M**2}


@pytest.mark.parametrize("system", ["EPSG:32660", "EPSG:32601", "EPSG:4326", "EPSG:3832"])
def test_a_field_across_the_antimeridian_is_cut_there(tmp_path, outlines, system):
    """RFC 7946, 3.1.9."""
    (x,), (y,) = rasterio.warp.transform("OGC:CRS84", system, [180], [60])
    px = 8.0 if "4326" not in system else 1e-4
    transform = Affine(px, 0, x - 10 * px, 0, -px, y + 10 * px)
    path = raster(tmp_path / "images/a.tif", transform, system, pixels=square())
    areas, (one,) = outlines(path)
    shape = shapely.geometry.shape(one["geometry"])
    assert shape.geom_type == "MultiPolygon"
    assert len(shape.geoms) == 2
    assert shape.is_valid
    left, right = sorted(shape.geoms, key=lambda x: x.bounds)
    assert left.bounds[0] == -180
    assert right.bounds[2] == 180
    assert right.bounds[0] - left.bounds[2] > 359.9
    mercator = (1 - 0.00669438 * 0.75) / 0.25  # how often it shows an area at 60 degrees
    truth = {"EPSG:4326": 2e-3 * 111_412 * 2e-3 * 55_800, "EPSG:3832": 160**2 / mercator}
    assert areas["wood"] == pytest.approx(truth.get(system, 160**2), rel=1e-4)
    _, labels = drawn(tmp_path, tmp_path / "found.geojson")
    assert (labels["a.tif"] == 1).all()


@pytest.mark.parametrize(("system", "sign"), [("EPSG:3413", 1), ("EPSG:3031", -1)])
@pytest.mark.parametrize("first", [(-13, -9), (-10, 0), (-20, 5), (0, 0)])
def test_a_field_around_or_at_a_pole_has_its_area(tmp_path, outlines, system, sign, first):
    transform = Affine(50, 0, first[0] * 50, 0, -50, (20 + first[1]) * 50)
    pixels = square()
    pixels[0, 8:13, 5:16] = 2
    areas, features = outlines(raster(tmp_path / "a.tif", transform, system, pixels=pixels))
    equal = {"EPSG:3413": "EPSG:6931", "EPSG:3031": "EPSG:6932"}[system]
    y, x = (20 + first[1]) * 50, first[0] * 50
    lake = shapely.box(x + 250, y - 650, x + 800, y - 400)
    wood = shapely.box(x, y - 1000, x + 1000, y) - lake
    for one in features:
        shape = shapely.geometry.shape(one["geometry"])
        assert shape.is_valid
        assert sign * shape.bounds[1] > 0
        assert np.abs(shape.bounds[::2]).max() <= 180
        name = one["properties"]["class"]
        line = shapely.segmentize({"wood": wood, "lake": lake}[name], 10)
        truth = rasterio.warp.transform_geom(system, equal, line)
        truth = shapely.geometry.shape(truth).area
        assert areas[name] == pytest.approx(truth, rel=1e-4)
        assert shapely.transform(shape, _cylinder).area == pytest.approx(truth, rel=1e-4)


def _cylinder(points):
    """Cylindrical equal-area coordinates of the WGS84 ellipsoid, by Snyder's formulas (10-15)."""
    a, e = 6378137.0, 0.0818191908426215
    sin = np.sin(np.radians(points[:, 1]))
    q = (1 - e**2) * (sin / (1 - e**2 * sin**2) + np.arctanh(e * sin) / e)
    return np.stack([a * np.radians(points[:, 0]), a * q / 2], axis=1)


def test_simplified_outlines_move_by_metres_on_the_ground_in_mercator_too(tmp_path, outlines):
    """At 60 degrees north a metre of the ground is two of Mercator's."""
    (x,), (y,) = rasterio.warp.transform("OGC:CRS84", "EPSG:3857", [10], [60])
    stairs = np.tril(np.ones((40, 40), np.uint8))[None]
    path = raster(tmp_path / "a.tif", Affine(2, 0, x, 0, -2, y), "EPSG:3857", pixels=stairs)
    # Steps of 1 m on the ground: the diagonal through them is 0.71 m away.
    for simplify_m, is_straight in ((0.5, False), (0.8, True)):
        _, (one,) = outlines(path, simplify_m=simplify_m)
        assert (len(one["geometry"]["coordinates"][0]) < 8) == is_straight
