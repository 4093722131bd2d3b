"""Where images lie on the map: tags, world files and .aux.xml; rasterio missing; hostile files."""
# ruff: noqa: F811 - `run` is a fixture

import socket
import sys
import threading

import numpy as np
import pytest
import tifffile
from scipy import ndimage
from test_predict import photo, run  # noqa: F401
from test_raster import GEO

from segtrain.data.read import raster
from segtrain.data.read.classes import ClassFile, SegClass
from segtrain.data.read.find import Window
from segtrain.data.read.georeference import copy_place, place_of
from segtrain.data.read.image import read_values
from segtrain.data.read.image_formats import read_info
from segtrain.desk.annotations.geojson import read
from segtrain.desk.annotations.polygons import write_polygons
from segtrain.desk.annotations.regions import Findings
from segtrain.errors import ConfigError, DataError
from segtrain.predict import georaster, raster_inputs

WORLD = "0.5\n0\n0\n-0.5\n100.25\n199.75\n"
# As a world file says it by the middle of the first pixel.
PLACE = (0.5, 0.0, 100.0, 0.0, -0.5, 200.0)
AUX = "<PAMDataset><GeoTransform>100, 0.5, 0, 200, 0, -0.5</GeoTransform></PAMDataset>"
TAB = """!table
Definition Table
  File "x.tif"
  Type "RASTER"
  (100,200) (0,0) Label "1",
  (115,200) (30,0) Label "2",
  (100,190) (0,20) Label "3"
"""
STATISTICS = '<PAMDataset><Metadata><MDI key="STATISTICS_MEAN">3</MDI></Metadata></PAMDataset>'


def write(path, way, pixels=None):
    pixels = photo(20, 30) if pixels is None else pixels
    extra = ["unassalpha"] if pixels.shape[2] == 4 else []
    tags = GEO if way == "tags" else ()
    tifffile.imwrite(path, pixels, photometric="rgb", extrasamples=extra, extratags=tags)
    beside = {
        "world": (path.with_suffix(".tfw"), WORLD),
        "WORLD": (path.with_suffix(".TFW"), WORLD),
        "tab": (path.with_suffix(".tab"), TAB),
    }
    beside |= {"aux": (path.with_name(f"{path.name}.aux.xml"), AUX)}
    beside |= {"statistics": (path.with_name(f"{path.name}.aux.xml"), STATISTICS)}
    if way in beside:
        file, text = beside[way]
        file.write_text(text)
    return path


def place(path):
    return place_of(path, read_info(path))


@pytest.mark.parametrize("way", ["tags", "world", "WORLD", "aux"])
def test_a_georeference_without_rasterio_is_refused_with_the_line_to_install_it(
    run, tmp_path, monkeypatch, way
):
    path = write(tmp_path / "x.tif", way)
    monkeypatch.setitem(sys.modules, "rasterio", None)
    words = r"x\.tif: .* read by rasterio and shapely, .* pip install '\.\[geo\]'"
    with pytest.raises(ConfigError, match=words):
        place(path)
    with pytest.raises(ConfigError, match=words):
        run(path)
    assert not (tmp_path / "out/labels").exists()


@pytest.mark.parametrize("way", ["plain", "statistics"])
def test_a_file_without_a_georeference_needs_no_rasterio(run, tmp_path, monkeypatch, way):
    path = write(tmp_path / "x.tif", way)
    monkeypatch.setitem(sys.modules, "rasterio", None)
    assert place(path) is None
    assert run(path, table=tmp_path / "t.csv") == 0
    assert not (tmp_path / "out/labels/x.tif").exists()


@pytest.mark.parametrize("way", ["world", "WORLD", "aux", "tab"])
def test_files_beside_an_image_tell_its_place_and_that_of_its_prediction(run, tmp_path, way):
    path = write(tmp_path / "x.tif", way)
    assert place(path) == (PLACE, None)
    assert run(path, probabilities="tif") == 0
    for kind in "labels", "probabilities":
        assert place(tmp_path / f"out/{kind}/x.tif") == (PLACE, None)


def test_a_system_that_no_tag_of_a_tiff_can_say_is_kept_beside_a_prediction(run, tmp_path):
    rasterio = pytest.importorskip("rasterio")
    path = write(tmp_path / "x.tif", "world")
    system = rasterio.crs.CRS.from_proj4("+proj=eqearth +lon_0=10")
    with rasterio.open(path, "r+") as file:
        file.crs = system
    assert path.with_name("x.tif.aux.xml").exists()
    labels = tmp_path / "out/labels"
    run(path)
    assert place(labels / "x.tif") == (PLACE, system)
    assert {one.name for one in labels.iterdir()} == {"x.png", "x.tif", "x.tif.aux.xml"}
    path.with_name("x.tif.aux.xml").unlink()
    with rasterio.Env(TIFF_USE_OVR=True), rasterio.open(labels / "x.tif", "r+") as file:
        file.build_overviews([2])
    assert (labels / "x.tif.ovr").exists()
    run(path, overwrite=True)
    assert place(labels / "x.tif") == (PLACE, None)
    assert {one.name for one in labels.iterdir()} == {"x.png", "x.tif"}


@pytest.mark.parametrize("in_parts", [False, True])
def test_zeros_of_a_map_that_no_tag_marks_are_named(run, tmp_path, monkeypatch, capsys, in_parts):
    if in_parts:
        monkeypatch.setattr(raster, "_MIN_BYTES", 0)
        monkeypatch.setattr(raster_inputs, "MAX_PHOTO_PIXELS", 3000)
        monkeypatch.setattr(georaster, "BLOCK_PX", 48)
        monkeypatch.setattr(georaster, "MARGIN_PX", 16)
    (folder := tmp_path / "in").mkdir()
    whole = photo(70, 110).clip(1)
    bordered, dark, small = whole.copy(), whole.copy(), whole.copy()
    bordered[np.tri(70, 110, -40, dtype=bool)] = 0  # beside a turned scene
    dark[::3, ::3] = 0  # shadows
    small[:7, :11] = 0  # exactly a hundredth
    no_data = {name: (42113, "s", 0, name, True) for name in ("0", "255")}
    files = {"bordered": (bordered, GEO), "plain": (bordered, ()), "dark": (dark, GEO)}
    files |= {"small": (small, GEO), "band": (whole * np.uint8([0, 1, 1]), GEO)}
    files |= {name: (bordered, [*GEO, tag]) for name, tag in no_data.items()}
    for name, (pixels, tags) in files.items():
        tifffile.imwrite(folder / f"{name}.tif", pixels, photometric="rgb", extratags=tags)
    assert run(folder) == 0
    (line,) = (x for x in capsys.readouterr().out.splitlines() if "areas of 0" in x)
    square, zeros = np.ones((9, 9)), (bordered == 0).all(axis=2)
    inside = ndimage.binary_dilation(ndimage.binary_erosion(zeros, square, border_value=1), square)
    assert zeros.sum() == 465 > inside.sum() > 440  # of 7,700; corners of the triangle are thin
    first, second = (f"{folder}/{x}.tif ({inside.mean():.1%})" for x in ("255", "bordered"))
    assert line == (
        "warning: 2 maps have areas of 0 in all bands (of so many pixels), which were given "
        f"classes: {first}, {second}; if 0 "
        "means no data there, gdal_translate -a_nodata 0 FILE NEW.tif declares it"
    )


@pytest.mark.parametrize("keys", [[GEO[2]], []])
def test_control_points_are_copied(tmp_path, keys):
    points = [(x, y, 0, 500000 + 10 * x + y, 5000000 - 10 * y, 0) for x in (0, 9) for y in (0, 8)]
    tags = [(33922, "d", 24, tuple(np.ravel(points)), True), *keys]
    for name, extra in (("x.tif", tags), ("y.tif", ())):
        tifffile.imwrite(tmp_path / name, photo(8, 9), photometric="rgb", extratags=extra)
    assert place(tmp_path / "x.tif") is None
    copy_place(tmp_path / "x.tif", tmp_path / "y.tif")
    with tifffile.TiffFile(tmp_path / "y.tif") as file:
        found = np.reshape(file.pages[0].tags[33922].value, (-1, 6))
    np.testing.assert_allclose(found, points)


@pytest.mark.parametrize(("way", "is_missing"), [("tags", 1), ("world", 1), ("statistics", 0)])
def test_transparent_pixels_of_a_map_have_no_value_in_windows_too(tmp_path, way, is_missing):
    pixels = np.concatenate([photo(20, 30), np.full((20, 30, 1), 255, np.uint8)], axis=2)
    pixels[:7, :, 3] = 0
    path = write(tmp_path / "x.tif", way, pixels)
    for window in (None, Window(0, 0, 20, 30)):
        missing = np.isnan(read_values(path, window)[..., 0])
        assert missing.sum() == 7 * 30 * is_missing


@pytest.fixture
def address():
    """A URL on this machine, and what has asked it."""
    asked = []
    with socket.create_server(("127.0.0.1", 0)) as server:

        def serve():
            while True:
                try:
                    connection, _ = server.accept()
                except OSError:
                    return
                with connection:
                    asked.append(connection.recv(100))

        thread = threading.Thread(target=serve)
        thread.start()
        yield f"http://127.0.0.1:{server.getsockname()[1]}/x", asked
        server.shutdown(socket.SHUT_RDWR)
        thread.join()


VRT = (
    '<VRTDataset rasterXSize="4" rasterYSize="4"><GeoTransform>0,1,0,0,0,-1</GeoTransform>'
    '<VRTRasterBand dataType="Byte" band="1"><SimpleSource><SourceFilename>/vsicurl/{}.tif'
    "</SourceFilename><SourceBand>1</SourceBand></SimpleSource></VRTRasterBand></VRTDataset>"
)
WMS = (
    '<GDAL_WMS><Service name="TMS"><ServerUrl>{}</ServerUrl></Service><DataWindow><UpperLeftX>0'
    "</UpperLeftX><UpperLeftY>9</UpperLeftY><LowerRightX>9</LowerRightX><LowerRightY>0"
    "</LowerRightY><SizeX>9</SizeX><SizeY>9</SizeY></DataWindow><BandsCount>1</BandsCount>"
    "</GDAL_WMS>"
)
ONE = ClassFile("one", (SegClass("a", (200, 0, 10), (1,)),), (0,), (0, 0, 0))


@pytest.mark.parametrize("text", [VRT, WMS])
def test_a_vrt_or_wms_by_the_name_of_a_tiff_is_refused_and_asks_no_address(
    run, tmp_path, address, text
):
    path = write(tmp_path / "x.tif", "world")
    path.write_text(text.format(address[0]))
    info = read_info(write(tmp_path / "y.tif", "plain"))
    with pytest.raises(DataError, match=r"x\.tif: damaged raster: .*not recognized as being in"):
        place_of(path, info)
    with pytest.raises(DataError, match=r"x\.tif: damaged TIFF"):
        write_polygons([path], ONE, tmp_path / "a.geojson")
    with pytest.raises(DataError, match=r"x\.tif"):
        run(path)
    assert not address[1]


def test_files_beside_an_image_and_systems_by_address_ask_none(tmp_path, address):
    url, asked = address
    path = write(tmp_path / "x.tif", "aux")
    overviews = f'<Metadata domain="OVERVIEWS"><MDI key="OVERVIEW_FILE">{url}</MDI></Metadata>'
    text = AUX.replace("<PAMDataset>", f"<PAMDataset><SRS>{url}</SRS>{overviews}")
    path.with_name("x.tif.aux.xml").write_text(text)
    assert place(path) == (PLACE, None)
    square = '{"type": "Polygon", "coordinates": [[[0, 0], [0, 1], [1, 1], [0, 0]]]}'
    system = f'{{"type": "name", "properties": {{"name": "{url}"}}}}'
    (tmp_path / "a.geojson").write_text(
        f'{{"type": "Feature", "properties": null, "geometry": {square}, "crs": {system}}}'
    )
    with pytest.raises(ValueError, match=r"crs http.*: expected a code such as EPSG:32633"):
        read(tmp_path / "a.geojson", Findings())
    assert not asked
