"""Outlines on the map: to labels of rasters, and back; against areas known before."""

import json
import sys
from pathlib import Path

import numpy as np
import pytest

rasterio = pytest.importorskip("rasterio")
shapely = pytest.importorskip("shapely")
from rasterio.warp import transform_geom  # noqa: E402

from segtrain import cli  # noqa: E402
from segtrain.annotations import label_maps, read_annotations  # noqa: E402
from segtrain.annotations.polygons import write_polygons  # noqa: E402
from segtrain.config import load_config  # noqa: E402
from segtrain.data import open_dataset  # noqa: E402
from segtrain.data.read.classes import load_class_file  # noqa: E402
from segtrain.errors import ConfigError, DataError  # noqa: E402

UTM = "EPSG:32633"
H, W, PX_M = 90, 120, 0.5
LEFT, TOP = 500_000.0, 5_400_000.0
NORTH_UP = rasterio.Affine(PX_M, 0, LEFT, 0, -PX_M, TOP)
# Columns and rows of pixels, so what is inside is known without a rule of drawing.
FIELD, POND, ROAD = (10, 20, 60, 70), (30, 35, 50, 55), (70, 0, 80, 90)


def box(left, top, right, bottom, transform=NORTH_UP):
    corners = [(left, top), (left, bottom), (right, bottom), (right, top), (left, top)]
    return [transform @ corner for corner in corners]


def raster(path, transform=NORTH_UP, crs=UTM, size=(H, W)):
    path.parent.mkdir(parents=True, exist_ok=True)
    options = {"count": 3, "dtype": "uint8", "height": size[0], "width": size[1]}
    with rasterio.open(path, "w", driver="GTiff", crs=crs, transform=transform, **options) as file:
        file.write(np.random.default_rng(0).integers(0, 256, (3, *size), np.uint8))
    return path


def feature(outline, *holes, system=UTM, kind="Polygon", **properties):
    geometry = {"type": kind, "coordinates": [outline, *holes]}
    found = transform_geom(system, "OGC:CRS84", geometry)
    return {"type": "Feature", "properties": properties, "geometry": found}


def collection(path, *features, **members):
    found = {"type": "FeatureCollection", "features": features, **members}
    path.write_text(json.dumps(found))
    return path


def drawn(root, source, images=None, **options):
    found = read_annotations([source], images or root / "images", **options)
    label_maps.claim(root / "drawn", found.folder, overwrite=True)
    label_maps.write_labels(found, root / "drawn", overlap=found.overlap, jobs=1)
    labels = {}
    for image in found.images:
        with rasterio.open(root / "drawn" / label_maps.LABELS / image.name) as file:
            labels[image.name] = file.read(1)
    return found, labels


def truth():
    label = np.zeros((H, W), np.uint8)
    label[20:70, 10:60] = 1  # field
    label[35:55, 30:50] = 0  # the hole of the field
    label[0:90, 70:80] = 2  # road
    return label


def features():
    yield feature(box(*FIELD), box(*POND)[::-1], kind="Polygon", fid=1, kind_of="x", label="field")
    yield feature(box(*ROAD), fid=2, kind_of="y", label="road")


def test_degrees_become_the_pixels_whose_centre_is_inside(tmp_path):
    raster(tmp_path / "images/map.tif")
    found, labels = drawn(tmp_path, collection(tmp_path / "all.geojson", *features()))
    assert list(found.classes) == ["background", "field", "road"]
    np.testing.assert_array_equal(labels["map.tif"], truth())
    with rasterio.open(tmp_path / "drawn/labels/map.tif") as file:
        assert (file.crs, file.transform, file.nodata) == (
            rasterio.CRS.from_string(UTM),
            NORTH_UP,
            255,
        )
    assert (tmp_path / "drawn/pairs.txt").read_text() == "map.tif\tlabels/map.tif\n"


def test_a_pixel_is_inside_if_its_centre_is(tmp_path):
    raster(tmp_path / "images/map.tif")
    corners = [(10.3, 5.6), (100.7, 30.2), (40.4, 80.9), (10.3, 5.6)]
    outline = [NORTH_UP @ corner for corner in corners]
    source = collection(tmp_path / "a.geojson", feature(outline, label="tri"))
    y, x = np.mgrid[:H, :W] + 0.5
    inside = shapely.contains_xy(shapely.Polygon(corners), x, y)
    np.testing.assert_array_equal(drawn(tmp_path, source)[1]["map.tif"], inside)


def test_an_older_file_says_its_system_by_crs(tmp_path):
    raster(tmp_path / "images/map.tif")
    crs = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32633"}}
    outline = {"type": "Polygon", "coordinates": [box(*ROAD)]}
    one = {"type": "Feature", "properties": None, "geometry": outline}
    found, labels = drawn(tmp_path, collection(tmp_path / "road.geojson", one, crs=crs))
    assert list(found.classes) == ["background", "road"]  # the name of the file
    np.testing.assert_array_equal(labels["map.tif"] == 1, truth() == 2)
    with pytest.raises(DataError, match="coordinates are no degrees, and no member crs"):
        drawn(tmp_path, collection(tmp_path / "road.geojson", one))


def test_rotated_rasters_and_tiles_get_the_part_that_lies_on_them(tmp_path):
    turned = NORTH_UP @ rasterio.Affine.rotation(30)
    raster(tmp_path / "images/turned.tif", turned)
    raster(
        tmp_path / "images/tile.tif", NORTH_UP @ rasterio.Affine.translation(30, 0), size=(40, 40)
    )
    raster(tmp_path / "images/far.tif", NORTH_UP @ rasterio.Affine.translation(5000, 0))
    both = [*features(), feature(box(5, 5, 25, 30, turned), label="field")]
    found, labels = drawn(tmp_path, collection(tmp_path / "all.geojson", *both))
    assert sorted(labels) == ["tile.tif", "turned.tif"]  # none lies on far.tif
    assert (labels["turned.tif"][5:30, 5:25] == 1).all()
    np.testing.assert_array_equal(labels["tile.tif"][:, :30], truth()[:40, 30:60])
    assert any("1 image is not named by any annotation" in line for line in found.notes)


def test_a_region_at_the_antipodes_does_not_wrap_round_the_earth(tmp_path):
    raster(tmp_path / "images/map.tif")
    everywhere = box(-166, -50, -164, 1, rasterio.Affine.identity())
    far = feature(everywhere, system="OGC:CRS84", label="sea")
    found, labels = drawn(tmp_path, collection(tmp_path / "a.geojson", *features(), far))
    np.testing.assert_array_equal(labels["map.tif"], truth())
    assert any("feature 2: lies on no image" in line for line in found.notes)


def test_later_regions_cover_earlier_ones_and_names_without_class_are_ignored(tmp_path):
    raster(tmp_path / "images/map.tif")
    inner = feature(box(*POND), label="void")
    _, labels = drawn(tmp_path, collection(tmp_path / "a.geojson", *features(), inner))
    label = truth()
    label[35:55, 30:50] = 255
    np.testing.assert_array_equal(labels["map.tif"], label)


def test_without_rasterio_the_line_to_install_it_is_said(tmp_path, monkeypatch):
    raster(tmp_path / "images/map.tif")
    source = collection(tmp_path / "a.geojson", *features())
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install '\.\[geo\]'"):
        drawn(tmp_path, source)


def test_what_is_unclear_is_asked_or_refused(tmp_path):
    raster(tmp_path / "images/map.tif")
    plain = [feature(box(*FIELD), a="x", b=1), feature(box(*ROAD), a="y", b=2)]
    source = collection(tmp_path / "a.geojson", *plain)
    with pytest.raises(DataError, match=r"a \(x, y\); b \(1, 2\); choose by --attribute"):
        drawn(tmp_path, source)
    assert drawn(tmp_path, source, attribute="b")[0].classes == ("background", "1", "2")
    assert drawn(tmp_path, source, attribute="none")[0].classes == ("background", "a")
    missing = [feature(box(*FIELD), label="x"), feature(box(*ROAD), label=None)]
    with pytest.raises(DataError, match="feature 1: its class is missing"):
        drawn(tmp_path, collection(tmp_path / "a.geojson", *missing))
    raster(tmp_path / "images/map.tif", crs=None, transform=rasterio.Affine.identity())
    with pytest.raises(
        DataError, match=r"no outline lies on an image .* \(0 of 1 images have one\)"
    ):
        drawn(tmp_path, source, attribute="b")


@pytest.fixture
def labels(tmp_path):
    raster(tmp_path / "images/map.tif")
    drawn(tmp_path, collection(tmp_path / "all.geojson", *features()))
    return tmp_path / "drawn"


def test_polygons_have_the_areas_of_the_labels_and_come_back_as_the_same_pixels(labels):
    output = labels.parent / "found.geojson"
    words = ["data", "polygons", str(labels / "labels"), "--classes", str(labels / "classes.yaml")]
    assert cli.main([*words, "--output", str(output)]) == 0
    found = json.loads(output.read_text())["features"]
    areas = {one["properties"]["class"]: one["properties"]["area_m2"] for one in found}
    pixels = np.bincount(truth().ravel())
    assert areas == {"field": pixels[1] * PX_M**2, "road": pixels[2] * PX_M**2}
    for one in found:  # RFC 7946: degrees, and outlines go round to the left
        ring = np.array(one["geometry"]["coordinates"][0])
        assert (np.abs(ring - (15, 48.75)) < 0.1).all()
        assert shapely.LinearRing(ring).is_ccw
    _, again = drawn(labels.parent, output)
    np.testing.assert_array_equal(again["map.tif"], truth())


def test_areas_that_touch_by_a_corner_are_two(labels, tmp_path):
    label = np.zeros((H, W), np.uint8)
    label[10:20, 10:20] = label[20:30, 20:30] = 1
    with rasterio.open(labels / "labels/map.tif", "r+") as file:
        file.write(label, 1)
    classes = load_class_file(str(labels / "classes.yaml"))
    found = write_polygons([labels / "labels/map.tif"], classes, tmp_path / "a.geojson")
    assert found == {"field": (2, 200 * PX_M**2)}


def test_simplified_outlines_move_by_so_many_metres_at_most(labels, tmp_path):
    y, x = np.mgrid[:H, :W]
    disk = ((y - 45) ** 2 + (x - 60) ** 2 < 40**2).astype(np.uint8)
    path = labels / "labels/map.tif"
    with rasterio.open(path, "r+") as file:
        file.write(disk, 1)
    classes = load_class_file(str(labels / "classes.yaml"))
    sizes, found = {}, {}
    for metres in (0.0, 1.0):
        found[metres] = write_polygons([path], classes, tmp_path / "a.geojson", simplify_m=metres)
        (one,) = json.loads((tmp_path / "a.geojson").read_text())["features"]
        outline = shapely.geometry.shape(transform_geom("OGC:CRS84", UTM, one["geometry"]))
        sizes[metres] = len(outline.exterior.coords)
        distance = outline.exterior.hausdorff_distance(
            shapely.Point(*(NORTH_UP @ (60.5, 45.5))).buffer(20.0).exterior
        )
        assert distance < PX_M + metres
    assert found[0.0] == {"field": (1, int(disk.sum()) * PX_M**2)}
    assert sizes[1.0] * 4 < sizes[0.0]
    assert abs(found[1.0]["field"][1] / found[0.0]["field"][1] - 1) < 0.05


def test_label_rasters_without_a_place_or_with_other_values_are_refused(labels, tmp_path):
    classes = load_class_file(str(labels / "classes.yaml"))
    with rasterio.open(labels / "labels/map.tif", "r+") as file:
        file.write(np.full((H, W), 7, np.uint8), 1)
    with pytest.raises(DataError, match="value 7, which no class has"):
        write_polygons([labels / "labels/map.tif"], classes, tmp_path / "a.geojson")
    raster(tmp_path / "plain.tif", crs=None, transform=rasterio.Affine.identity())
    with pytest.raises(DataError, match="no georeference"):
        write_polygons([tmp_path / "plain.tif"], classes, tmp_path / "a.geojson")
    assert not Path(tmp_path / "a.geojson").exists()


def test_degrees_are_metres_by_their_latitude(tmp_path):
    transform = rasterio.Affine(1e-5, 0, 15, 0, -1e-5, 60)
    path = raster(tmp_path / "images/map.tif", transform, "EPSG:4326")
    one = feature(box(*ROAD, transform), system="EPSG:4326", label="road")
    drawn(tmp_path, collection(tmp_path / "a.geojson", one))
    classes = load_class_file(str(tmp_path / "drawn/classes.yaml"))
    labels = [tmp_path / "drawn/labels" / path.name]
    ((number, area),) = write_polygons(labels, classes, tmp_path / "b.geojson").values()
    # A cell of 1e-5 degrees at 60 degrees north, on the ellipsoid: 0.5580 m by 1.1141 m.
    assert number == 1
    assert area == pytest.approx(900 * 0.5580 * 1.1141, rel=0.005)


@pytest.mark.parametrize("system", ["EPSG:3857", "EPSG:3395", "EPSG:4087"])
def test_areas_are_on_the_ground_where_metres_of_the_map_are_not(tmp_path, system):
    """A rectangle of degrees around 60 degrees north, whose area on the sphere is known."""
    from rasterio.warp import transform_bounds

    left, bottom, right, top = transform_bounds("EPSG:4326", system, 10, 59.99, 10.02, 60.01)
    transform = rasterio.Affine((right - left) / 40, 0, left, 0, (bottom - top) / 40, top)
    labels = tmp_path / "labels.tif"
    shape = {"width": 40, "height": 40, "count": 1, "dtype": "uint8", "crs": system}
    with rasterio.open(labels, "w", driver="GTiff", transform=transform, **shape) as file:
        file.write(np.ones((40, 40), np.uint8), 1)
    (tmp_path / "c.yaml").write_text("classes: [background, field]\n")
    classes = load_class_file(str(tmp_path / "c.yaml"))
    ((number, area),) = write_polygons([labels], classes, tmp_path / "b.geojson").values()
    # On the ellipsoid at 60 degrees: 111,412 m a degree of latitude, 55,800 m one of longitude.
    assert number == 1
    assert area == pytest.approx(0.02 * 111_412 * 0.02 * 55_800, rel=0.005)


def test_one_raster_with_outlines_becomes_windows(tmp_path):
    wide = raster(tmp_path / "data/map.tif", size=(500, 900))
    both = [
        *(feature(box(x, 0, x + 30, 500), label="road") for x in (100, 400, 700)),
        *(feature(box(x, 50, x + 60, 400), label="field") for x in (200, 500, 800)),
    ]
    collection(tmp_path / "data/labels.geojson", *both)
    label = np.zeros((500, 900), np.uint8)
    for x in (100, 400, 700):
        label[:, x : x + 30] = 1
        label[50:400, x + 100 : x + 160] = 2
    assert cli.main(["init", str(tmp_path / "data"), "--output", str(tmp_path / "mine")]) == 0
    data = load_config(tmp_path / "mine/config.yaml").data
    for split in (data.train_split, data.eval_split):
        dataset = open_dataset(data, split)
        names = [dataset.classes.names[i] for i in (0, 1, 2)]
        ids = np.array([["background", "road", "field"].index(name) for name in names])
        for i, pair in enumerate(dataset.pairs):
            assert pair.image == wide
            top, left, height, width = pair.window
            part = label[top : top + height, left : left + width]
            np.testing.assert_array_equal(ids[dataset[i][1]], part)
        assert {0, 1, 2} <= set(
            np.concatenate([dataset[i][1].ravel() for i in range(len(dataset))])
        )


def test_init_draws_them_and_trains_on_the_map(tmp_path):
    for i in range(6):
        raster(tmp_path / f"data/map_{i}.tif", NORTH_UP @ rasterio.Affine.translation(1000 * i, 0))
    every = [
        feature(box(*ROAD, NORTH_UP @ rasterio.Affine.translation(1000 * i, 0)), label="road")
        for i in range(6)
    ]
    collection(tmp_path / "data/labels.geojson", *every)
    assert cli.main(["init", str(tmp_path / "data"), "--output", str(tmp_path / "mine")]) == 0
    assert cli.main(["data", "check", str(tmp_path / "mine")]) == 0
    lines = (tmp_path / "mine/train.txt").read_text().splitlines()
    assert "map_1.tif\tmap_1.tif" in lines
