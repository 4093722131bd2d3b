"""Outlines on the map: to labels of rasters, and back; against areas known before."""

import json
import re
import sys

import numpy as np
import pytest
from affine import Affine

from segtrain import cli
from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file
from segtrain.desk.annotations import label_maps, read_annotations
from segtrain.desk.annotations.polygons import write_polygons
from segtrain.errors import ConfigError, DataError

UTM = "EPSG:32633"
H, W, PX_M = 90, 120, 0.5
LEFT, TOP = 500_000.0, 5_400_000.0
NORTH_UP = Affine(PX_M, 0, LEFT, 0, -PX_M, TOP)
# Columns and rows of pixels, so what is inside is known without a rule of drawing.
FIELD, POND, ROAD = (10, 20, 60, 70), (30, 35, 50, 55), (70, 0, 80, 90)


def box(left, top, right, bottom, transform=NORTH_UP):
    corners = [(left, top), (left, bottom), (right, bottom), (right, top), (left, top)]
    return [transform @ corner for corner in corners]


def raster(path, transform=NORTH_UP, crs=UTM, size=(H, W), pixels=None):
    """A TIFF of noise, or of these pixels (bands, H, W), whatever was there."""
    rasterio = pytest.importorskip("rasterio")
    if pixels is None:
        pixels = np.random.default_rng(0).integers(0, 256, (3, *size), np.uint8)
    path.parent.mkdir(parents=True, exist_ok=True)
    count, height, width = pixels.shape
    options = {"count": count, "dtype": "uint8", "height": height, "width": width}
    with rasterio.open(path, "w", driver="GTiff", crs=crs, transform=transform, **options) as file:
        file.write(pixels)
    return path


@pytest.fixture
def map_tif(tmp_path):
    return raster(tmp_path / "images/map.tif")


def transformed(system, other, geometry):
    from rasterio.warp import transform_geom

    return transform_geom(system, other, geometry)


def feature(outline, *holes, system=UTM, kind="Polygon", **properties):
    geometry = {"type": kind, "coordinates": [outline, *holes]}
    found = transformed(system, "OGC:CRS84", geometry)
    return {"type": "Feature", "properties": properties, "geometry": found}


def collection(path, *features, **members):
    found = {"type": "FeatureCollection", "features": features, **members}
    path.write_text(json.dumps(found))
    return path


def opened(path):
    """The first band, and the header."""
    rasterio = pytest.importorskip("rasterio")
    with rasterio.open(path) as file:
        return file.read(1), file.profile


def drawn(root, *features, **options):
    """The annotations of some features, or of a file of them, and the labels by image."""
    source = features[0]
    if isinstance(source, dict):
        source = collection(root / "some.geojson", *features)
    found = read_annotations([source], root / "images", **options)
    label_maps.claim(root / "drawn", found.folder, overwrite=True)
    label_maps.write_labels(found, root / "drawn", overlap=found.overlap, jobs=1)
    folder = root / "drawn" / label_maps.LABELS
    return found, {image.name: opened(folder / image.name)[0] for image in found.images}


def truth():
    label = np.zeros((H, W), np.uint8)
    label[20:70, 10:60] = 1  # field
    label[35:55, 30:50] = 0  # the hole of the field
    label[0:90, 70:80] = 2  # road
    return label


def features():
    yield feature(box(*FIELD), box(*POND)[::-1], kind="Polygon", fid=1, kind_of="x", label="field")
    yield feature(box(*ROAD), fid=2, kind_of="y", label="road")


def test_degrees_become_the_pixels_whose_centre_is_inside(tmp_path, map_tif):
    found, labels = drawn(tmp_path, *features())
    assert list(found.classes) == ["background", "field", "road"]
    np.testing.assert_array_equal(labels["map.tif"], truth())
    _, header = opened(tmp_path / "drawn/labels/map.tif")
    assert (header["crs"].to_string(), header["transform"]) == (UTM, NORTH_UP)
    assert header["nodata"] == 255
    assert (tmp_path / "drawn/pairs.txt").read_text() == "map.tif\tlabels/map.tif\n"

    shapely = pytest.importorskip("shapely")
    corners = [(10.3, 5.6), (100.7, 30.2), (40.4, 80.9), (10.3, 5.6)]
    outline = [NORTH_UP @ corner for corner in corners]
    y, x = np.mgrid[:H, :W] + 0.5
    inside = shapely.contains_xy(shapely.Polygon(corners), x, y)
    _, labels = drawn(tmp_path, feature(outline, label="tri"))
    np.testing.assert_array_equal(labels["map.tif"], inside)


@pytest.mark.parametrize("west", [179.97, -180.03])
def test_outlines_across_the_antimeridian_are_drawn_or_refused(tmp_path, west):
    degrees = Affine(5e-4, 0, west, 0, -5e-4, 10.0)
    raster(tmp_path / "images/a.tif", degrees, crs="EPSG:4326")
    outline = np.array(box(10, 20, 100, 70, degrees))
    outline[:, 0] += 360 * (west < 0)  # from 179.975 on, beyond 180
    one = {"type": "Feature", "properties": {"label": "field"}}
    one["geometry"] = {"type": "Polygon", "coordinates": [outline.tolist()]}
    _, labels = drawn(tmp_path, one)
    expected = np.zeros((H, W), np.uint8)
    expected[20:70, 10:100] = 1
    np.testing.assert_array_equal(labels["a.tif"], expected)
    outline[:, 0] -= 360 * (outline[:, 0] > 180)
    polygon = {"type": "Polygon", "coordinates": [outline.tolist()]}
    several = {"type": "MultiPolygon", "coordinates": [polygon["coordinates"]]}
    for shape in polygon, {"type": "GeometryCollection", "geometries": [several]}:
        with pytest.raises(DataError, match=r"more than 180 degrees of longitude: .* beyond 180"):
            drawn(tmp_path, one | {"geometry": shape})
    crs = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::4269"}}
    with pytest.raises(DataError, match="more than 180 degrees of longitude"):
        drawn(tmp_path, collection(tmp_path / "a.geojson", one | {"geometry": polygon}, crs=crs))


def test_an_outline_of_a_polar_map_that_would_go_round_the_earth_is_refused(tmp_path, map_tif):
    square = [(-1e5, 1e6), (1e5, 1e6), (1e5, 1.1e6), (-1e5, 1.1e6), (-1e5, 1e6)]
    geometry = {"type": "Polygon", "coordinates": [square]}
    one = {"type": "Feature", "properties": None, "geometry": geometry}
    crs = {"type": "name", "properties": {"name": "EPSG:3995"}}
    with pytest.raises(DataError, match="more than 180 degrees of longitude"):
        drawn(tmp_path, collection(tmp_path / "ice.geojson", one, crs=crs))


def test_an_older_file_says_its_system_by_crs(tmp_path, map_tif):
    crs = {"type": "name", "properties": {"name": "urn:ogc:def:crs:EPSG::32633"}}
    outline = {"type": "Polygon", "coordinates": [box(*ROAD)]}
    one = {"type": "Feature", "properties": None, "geometry": outline}
    found, labels = drawn(tmp_path, collection(tmp_path / "road.geojson", one, crs=crs))
    assert list(found.classes) == ["background", "road"]  # the name of the file
    np.testing.assert_array_equal(labels["map.tif"] == 1, truth() == 2)
    wide = {"type": "Polygon", "coordinates": [box(0, 0, 500, 100)]}  # 250 m
    for geometry in outline, wide:
        with pytest.raises(DataError, match="coordinates are no degrees, and no member crs"):
            drawn(tmp_path, one | {"geometry": geometry})


def test_rotated_rasters_and_tiles_get_the_part_that_lies_on_them(tmp_path):
    turned = NORTH_UP @ Affine.rotation(30)
    raster(tmp_path / "images/turned.tif", turned)
    raster(tmp_path / "images/tile.tif", NORTH_UP @ Affine.translation(30, 0), size=(40, 40))
    raster(tmp_path / "images/far.tif", NORTH_UP @ Affine.translation(5000, 0))
    found, labels = drawn(tmp_path, *features(), feature(box(5, 5, 25, 30, turned), label="field"))
    assert sorted(labels) == ["tile.tif", "turned.tif"]  # none lies on far.tif
    assert (labels["turned.tif"][5:30, 5:25] == 1).all()
    np.testing.assert_array_equal(labels["tile.tif"][:, :30], truth()[:40, 30:60])
    assert any("1 image is not named by any annotation" in line for line in found.notes)


def test_a_region_at_the_antipodes_does_not_wrap_round_the_earth(tmp_path, map_tif):
    everywhere = box(-166, -50, -164, 1, Affine.identity())
    far = feature(everywhere, system="OGC:CRS84", label="sea")
    found, labels = drawn(tmp_path, *features(), far)
    np.testing.assert_array_equal(labels["map.tif"], truth())
    assert any("feature 2: lies on no image" in line for line in found.notes)


def test_later_regions_cover_earlier_ones_and_names_without_class_are_ignored(tmp_path, map_tif):
    _, labels = drawn(tmp_path, *features(), feature(box(*POND), label="void"))
    label = truth()
    label[35:55, 30:50] = 255
    np.testing.assert_array_equal(labels["map.tif"], label)


def test_without_rasterio_the_line_to_install_it_is_said(tmp_path, map_tif, monkeypatch):
    found = [*features()]
    monkeypatch.setitem(sys.modules, "rasterio", None)
    with pytest.raises(ConfigError, match=r"not installed.*pip install '\.\[geo\]'"):
        drawn(tmp_path, *found)


def test_what_is_unclear_is_asked_or_refused(tmp_path, map_tif):
    plain = [feature(box(*FIELD), a="x", b=1), feature(box(*ROAD), a="y", b=2)]
    with pytest.raises(DataError, match=r"a \(x, y\); b \(1, 2\); choose by --attribute"):
        drawn(tmp_path, *plain)
    assert drawn(tmp_path, *plain, attribute="b")[0].classes == ("background", "1", "2")
    assert drawn(tmp_path, *plain, attribute="none")[0].classes == ("background", "some")
    missing = [feature(box(*FIELD), label="x"), feature(box(*ROAD), label=None)]
    with pytest.raises(DataError, match="feature 1: its class is missing"):
        drawn(tmp_path, *missing)
    raster(map_tif, Affine.identity(), crs=None)
    with pytest.raises(DataError, match=r"no outline lies on an image .* \(0 of 1 images have one"):
        drawn(tmp_path, *plain, attribute="b")


def test_only_the_cause_is_said_where_no_outline_could_be_read(tmp_path, map_tif):
    """Not that none lies on an image, which would send to --images."""
    plain = [feature(box(*FIELD), a="x", b=1), feature(box(*ROAD), a="y", b=2)]
    in_metres = {"type": "Polygon", "coordinates": [box(*ROAD)]}
    metres = {"type": "Feature", "properties": None, "geometry": in_metres}
    for found, attribute, cause in (
        (plain, None, "which property"),
        (plain, "c", "no property c: which"),
        ([metres], None, "no degrees"),
    ):
        with pytest.raises(DataError) as caught:
            drawn(tmp_path, *found, attribute=attribute)
        assert cause in str(caught.value)
        assert "no outline" not in str(caught.value)


@pytest.mark.parametrize("system", [UTM, "EPSG:32750"])
def test_latitude_before_longitude_is_told(tmp_path, system):
    """In zone 33 both are degrees either way; in zone 50 the longitude, 117, is no latitude."""
    raster(tmp_path / "images/map.tif", crs=system)
    good = feature(box(*FIELD), system=system, label="field")
    assert (drawn(tmp_path, good)[1]["map.tif"] == 1).sum() == 50 * 50
    (ring,) = good["geometry"]["coordinates"]
    good["geometry"]["coordinates"] = [[(y, x) for x, y in ring]]
    with pytest.raises(DataError, match=r"map\.tif: outlines would lie on .* x and y swapped") as e:
        drawn(tmp_path, good)
    assert not re.search("no outline|no degrees", str(e.value))
    crs = {"type": "name", "properties": {"name": system}}
    outline = {"type": "Polygon", "coordinates": [[xy[::-1] for xy in box(*FIELD)]]}
    in_metres = collection(tmp_path / "m.geojson", good | {"geometry": outline}, crs=crs)
    with pytest.raises(DataError, match=r"map\.tif: outlines would lie on .* x and y swapped"):
        drawn(tmp_path, in_metres)
    crs["properties"]["name"] = "EPSG:27700"
    outline["coordinates"] = [box(1e12, 1e9, 1e12 + 9, 1e9 + 9, Affine.identity())]
    beyond = collection(tmp_path / "m.geojson", good | {"geometry": outline}, crs=crs)
    with pytest.raises(DataError, match=r"coordinates of EPSG:27700.*outside of projection domain"):
        drawn(tmp_path, beyond)
    good["geometry"]["coordinates"] = [[(y + 40, x) for x, y in ring]]
    with pytest.raises(DataError, match=r"no outline lies|are no degrees"):
        drawn(tmp_path, good)


def of_qupath(outline, **members):
    """The text of a file as QuPath writes it, of one outline."""
    properties = {
        "objectType": "annotation",
        "classification": {"name": "field", "color": [1, 2, 3]},
    }
    geometry = {"type": "Polygon", "coordinates": [outline]}
    one = {"type": "Feature", "geometry": geometry, "properties": properties}
    return json.dumps({"type": "FeatureCollection", "features": [one], **members})


def test_what_could_be_a_map_is_never_read_as_pixels(tmp_path, map_tif):
    """QuPath's keys, where the image of that name, or any if none has it, lies on the map."""
    file = tmp_path / "map.geojson"
    crs = {"type": "name", "properties": {"name": UTM}}
    degrees = transformed(UTM, "OGC:CRS84", {"type": "Polygon", "coordinates": [box(*FIELD)]})
    for text in of_qupath(degrees["coordinates"][0]), of_qupath(box(*FIELD), crs=crs):
        file.write_text(text)
        found, labels = drawn(tmp_path, file)
        assert (found.format, found.classes) == ("GeoJSON", ("background", "field"))
        assert (labels["map.tif"][20:70, 10:60] == 1).all()
        assert labels["map.tif"].sum() == 50 * 50
    pixels = box(*FIELD, Affine.scale(1, 2))
    file.write_text(of_qupath(pixels))
    with pytest.raises(DataError, match=r"pixels are read of QuPath alone .* have no georeference"):
        drawn(tmp_path, file)
    # With a crs it is of the map, and without an image of the map nothing lies there.
    raster(map_tif, Affine.identity(), crs=None)
    file.write_text(of_qupath(box(*FIELD), crs=crs))
    with pytest.raises(DataError, match="no outline lies on an image with a georeference"):
        drawn(tmp_path, file)
    # Another image on the map says nothing of one that has the name.
    raster(tmp_path / "images/other.tif")
    file.write_text(of_qupath(box(*FIELD, Affine.identity())))
    found = read_annotations([file], tmp_path / "images")
    assert (found.format, [x.name for x in found.images]) == ("QuPath", ["map.tif"])


def test_outlines_of_qupath_become_an_experiment(tmp_path, lab):
    for i in range(4):
        raster(tmp_path / f"qp/images/{i}.tif", Affine.identity(), crs=None)
        (tmp_path / "qp/geojson").mkdir(exist_ok=True)
        field = box(10 + i, 20, 60, 70, Affine.identity())
        (tmp_path / f"qp/geojson/{i}.geojson").write_text(of_qupath(field))
    lab.done("init", tmp_path / "qp", "--output", tmp_path / "mine")
    data, shown = load_config(tmp_path / "mine/config.yaml").data, {}
    for split in (data.train_split, data.eval_split):
        dataset = open_dataset(data, split)
        assert dataset.classes.names == ("background", "field")
        shown |= {dataset.pairs[i].image.stem: dataset[i][1] for i in range(len(dataset))}
    for i in range(4):
        expected = np.zeros((H, W), np.uint8)
        expected[20:70, 10 + i : 60] = 1
        np.testing.assert_array_equal(shown[str(i)], expected)


@pytest.mark.parametrize("where", ["beside", "far", "other outlines", "output"])
def test_the_line_after_an_import_reads_the_same_files(tmp_path, lab, where):
    root = tmp_path / "root"
    is_beside = where in ("beside", "output")
    folder = root / ("rasters" if is_beside else "some/rasters")
    for i in range(3):
        raster(folder / f"{i}.tif", NORTH_UP @ Affine.translation(200 * i, 0))
    source = root / ("x.geojson" if is_beside else "some_outlines/x.geojson")
    source.parent.mkdir(exist_ok=True)
    at = [NORTH_UP @ Affine.translation(200 * i, 0) for i in range(3)]
    found = [feature(box(*FIELD, x), crop="field one", id=i) for i, x in enumerate(at)]
    collection(source, *found)
    if where == "far":
        raster(root / "other/map.tif")
    if where == "other outlines":
        collection(source.with_name("y.geojson"), feature(box(*POND), crop="pond"))
    output = root / "drawn" if where == "output" else tmp_path / "drawn"
    words = "data", "import", source, "--images", folder, "--attribute", "crop", "--output", output
    said = lab.done(*words).out.splitlines()[-1].removeprefix("next: ")
    if where == "beside":
        assert said.startswith(f"segtrain init {root} --attribute crop writes")
    else:
        assert said.startswith(f"copy {source} into {folder}; then segtrain init {folder} --attr")
        (folder / source.name).write_bytes(source.read_bytes())
    command = said.rpartition("segtrain ")[2].removesuffix(" writes a config, with splits").split()
    lab.done(*command, "--output", tmp_path / "mine")
    data = load_config(tmp_path / "mine/config.yaml").data
    datasets = [open_dataset(data, split) for split in (data.train_split, data.eval_split)]
    assert {one.classes.names for one in datasets} == {("background", "field one")}
    assert (
        sorted(pair.image for one in datasets for pair in one.pairs) == sorted(folder.iterdir())[:3]
    )


@pytest.fixture
def polygons(tmp_path):
    """`polygons(pixels)`: what is written of such labels, and the features."""

    def made(label, transform=NORTH_UP, crs=UTM, **options):
        path = raster(tmp_path / "labels.tif", transform, crs, pixels=label[None].astype(np.uint8))
        (tmp_path / "c.yaml").write_text("classes: [background, field]\n")
        classes, output = load_class_file(str(tmp_path / "c.yaml")), tmp_path / "found.geojson"
        found = write_polygons([path], classes, output, **options)
        return found, json.loads(output.read_text())["features"]

    return made


def test_polygons_have_the_areas_of_the_labels_and_come_back_as_the_same_pixels(tmp_path, map_tif):
    shapely = pytest.importorskip("shapely")
    drawn(tmp_path, *features())
    labels, output = tmp_path / "drawn", tmp_path / "found.geojson"
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
    _, again = drawn(tmp_path, output)
    np.testing.assert_array_equal(again["map.tif"], truth())


def test_areas_that_touch_by_a_corner_are_two(polygons):
    label = np.zeros((H, W))
    label[10:20, 10:20] = label[20:30, 20:30] = 1
    assert polygons(label)[0] == {"field": (2, 200 * PX_M**2)}


def test_simplified_outlines_move_by_so_many_metres_at_most(polygons):
    shapely = pytest.importorskip("shapely")
    y, x = np.mgrid[:H, :W]
    disk = (y - 45) ** 2 + (x - 60) ** 2 < 40**2
    sizes, found = {}, {}
    for metres in (0.0, 1.0):
        found[metres], (one,) = polygons(disk, simplify_m=metres)
        outline = shapely.geometry.shape(transformed("OGC:CRS84", UTM, one["geometry"]))
        sizes[metres] = len(outline.exterior.coords)
        distance = outline.exterior.hausdorff_distance(
            shapely.Point(*(NORTH_UP @ (60.5, 45.5))).buffer(20.0).exterior
        )
        assert distance < PX_M + metres
    assert found[0.0] == {"field": (1, int(disk.sum()) * PX_M**2)}
    assert sizes[1.0] * 4 < sizes[0.0]
    assert abs(found[1.0]["field"][1] / found[0.0]["field"][1] - 1) < 0.05


def test_label_rasters_with_other_values_are_refused(polygons, tmp_path):
    with pytest.raises(DataError, match="label ids outside class file c: 7 "):
        polygons(np.full((H, W), 7))
    assert not (tmp_path / "found.geojson").exists()


@pytest.mark.parametrize("system", ["EPSG:4326", "EPSG:3857", "EPSG:3395", "EPSG:4087"])
def test_areas_are_on_the_ground_where_units_of_the_map_are_no_metres(polygons, system):
    """A rectangle of degrees around 60 degrees north, whose area on the ellipsoid is known."""
    from rasterio.warp import transform_bounds

    left, bottom, right, top = transform_bounds("EPSG:4326", system, 10, 59.99, 10.02, 60.01)
    transform = Affine((right - left) / 40, 0, left, 0, (bottom - top) / 40, top)
    ((number, area),) = polygons(np.ones((40, 40)), transform, system)[0].values()
    # There a degree of latitude has 111,412 m and one of longitude 55,800 m.
    assert number == 1
    assert area == pytest.approx(0.02 * 111_412 * 0.02 * 55_800, rel=1e-5)


def test_one_raster_with_outlines_becomes_windows(tmp_path):
    wide = raster(tmp_path / "data/map.tif", size=(500, 900))
    label, both = np.zeros((500, 900), np.uint8), []
    for x in (100, 400, 700):
        both.append(feature(box(x, 0, x + 30, 500), label="road"))
        label[:, x : x + 30] = 2
        both.append(feature(box(x + 100, 50, x + 160, 400), label="field"))
        label[50:400, x + 100 : x + 160] = 1
    collection(tmp_path / "data/labels.geojson", *both)
    assert cli.main(["init", str(tmp_path / "data"), "--output", str(tmp_path / "mine")]) == 0
    data, shown = load_config(tmp_path / "mine/config.yaml").data, set()
    for split in (data.train_split, data.eval_split):
        dataset = open_dataset(data, split)
        assert dataset.classes.names == ("background", "field", "road")
        for i, pair in enumerate(dataset.pairs):
            assert pair.image == wide
            top, left, height, width = pair.window
            part = label[top : top + height, left : left + width]
            np.testing.assert_array_equal(dataset[i][1], part)
            shown |= {*part.ravel().tolist()}
    assert shown == {0, 1, 2}
