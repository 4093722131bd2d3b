"""TIFFs that are too large to be read at once: windows against the whole file, and rasterio."""

import numpy as np
import pytest
import tifffile
import torch
from torch import nn

from segtrain.config import DataConfig
from segtrain.data import open_dataset
from segtrain.data.check.checks import check_data
from segtrain.data.read import raster
from segtrain.data.read.find import Window
from segtrain.data.read.image import ImageForm
from segtrain.data.read.image_formats import open_stored
from segtrain.data.read.raster import windows
from segtrain.desk.survey.contents import label_facts
from segtrain.desk.survey.image_facts import image_facts
from segtrain.errors import DataError
from segtrain.inference.predictor import Predictor
from segtrain.inference.settings import InferenceSettings, SettingsBySize
from segtrain.predict import georaster as raster_prediction
from segtrain.predict.georaster import predict_raster
from segtrain.types import SegLogits

SIZE = 200, 330
# A pixel of 10 m at a corner in UTM zone 33 N (EPSG 32633).
GEO = [
    (33550, "d", 3, (10.0, 10.0, 0.0), True),
    (33922, "d", 6, (0.0, 0.0, 0.0, 500000.0, 5000000.0, 0.0), True),
    (34735, "H", 12, (1, 1, 0, 2, 1024, 0, 1, 1, 3072, 0, 1, 32633), True),
]


def values(channels, dtype, seed=0):
    return np.random.default_rng(seed).integers(0, 250, (*SIZE, channels)).astype(dtype)


WAYS = [
    ("uint16", {"tile": (64, 48), "compression": "deflate", "predictor": True}),
    ("float32", {"tile": (64, 48), "compression": "deflate", "predictor": True}),
    ("uint8", {"rowsperstrip": 37, "compression": "lzw"}),
    ("uint8", {}),
    ("uint16", {"byteorder": ">", "bigtiff": True}),
    ("float32", {"planarconfig": "separate", "tile": (64, 64), "compression": "zstd"}),
]


@pytest.mark.parametrize(("dtype", "options"), WAYS)
def test_a_window_is_that_part_of_the_whole(tmp_path, dtype, options):
    whole = values(5, dtype)
    options = {"photometric": "minisblack", "planarconfig": "contig"} | options
    stored = np.moveaxis(whole, -1, 0) if options["planarconfig"] == "separate" else whole
    tifffile.imwrite(tmp_path / "x.tif", stored, **options)
    for window in (Window(0, 0, 200, 330), Window(60, 47, 70, 51), Window(199, 329, 1, 1)):
        found = open_stored(tmp_path / "x.tif", window).pixels()
        top, left, height, width = window
        assert found.dtype == dtype
        np.testing.assert_array_equal(found, whole[top : top + height, left : left + width])


@pytest.fixture
def small_limits(monkeypatch):
    """Files of more than 40,000 pixels are rasters, with windows of 64 pixels and blocks of 80."""
    monkeypatch.setattr(raster, "_MIN_BYTES", 0)
    monkeypatch.setattr(raster.raster_size, "__defaults__", (40_000,))
    monkeypatch.setattr(raster.windows, "__defaults__", (64,))
    monkeypatch.setattr(raster_prediction, "BLOCK_PX", 80)
    monkeypatch.setattr(raster_prediction, "MARGIN_PX", 16)


def write_scene(root, split, image, label, **options):
    for kind, pixels in (("images", image), ("labels", label)):
        (root / kind / split).mkdir(parents=True, exist_ok=True)
        tifffile.imwrite(root / kind / split / "scene.tif", pixels, **options)


def test_a_raster_is_many_images_of_a_data_set(tmp_path, small_limits):
    image, label = values(3, np.uint8), (values(1, np.uint8, 1) % 2)[..., 0]
    write_scene(tmp_path, "train", image, label, tile=(48, 48), compression="deflate")
    write_scene(tmp_path, "val", image[:50, :50], label[:50, :50])
    (tmp_path / "c.yaml").write_text("classes: [sky, road]\n")
    data = DataConfig(layout="folders", root=str(tmp_path), classes=str(tmp_path / "c.yaml"))
    dataset = open_dataset(data, "train")
    assert [len(dataset), len(open_dataset(data, "val"))] == [24, 1]
    assert dataset.name(1) == "scene_y0_x55"
    for i, window in enumerate(windows(SIZE, 64)):
        rows = slice(window.top, window.top + window.height)
        columns = slice(window.left, window.left + window.width)
        np.testing.assert_array_equal(dataset[i][0], image[rows, columns])
        np.testing.assert_array_equal(dataset[i][1], label[rows, columns])
    with pytest.raises(DataError, match="which have no short side of their own"):
        open_dataset(data.model_copy(update={"short_side_px": 100}), "train")
    (scan, _) = check_data(data, jobs=1).scans
    assert scan.pixels.sum() == label.size
    tifffile.imwrite(tmp_path / "labels/train/scene.tif", label[:-1])
    with pytest.raises(DataError, match=r"scene\.tif: the label of a raster of 200x330 must be"):
        open_dataset(data, "train")


@pytest.mark.parametrize("kind", ["ids", "colors"])
def test_the_values_of_a_raster_are_counted_by_windows(tmp_path, small_limits, kind):
    """Every pixel once; areas of 20 pixels, because noise is no label."""
    rng = np.random.default_rng(0)
    label = rng.integers(0, 3, (10, 17)).repeat(20, 0).repeat(20, 1)[: SIZE[0], : SIZE[1]]
    colors = np.array([(200, 0, 0), (0, 200, 10), (1, 2, 200)], np.uint8)
    stored = colors[label] if kind == "colors" else label.astype(np.uint8)
    tifffile.imwrite(tmp_path / "x.tif", stored, tile=(64, 64))
    found = label_facts(tmp_path, "x.tif")
    assert (found.kind, found.size) == (kind, SIZE)
    values = [tuple(color) for color in colors.tolist()] if kind == "colors" else range(3)
    assert {v: one.pixels for v, one in found.values.items()} == {
        v: int((label == i).sum()) for i, v in enumerate(values)
    }
    assert {one.files for one in found.values.values()} == {1}
    facts = image_facts([tmp_path / "x.tif"])
    assert max(facts.high) <= stored.max()


class Local(nn.Module):
    """Class 1 where the mean of 9x9 pixels is high: 4 pixels of context."""

    def forward(self, images):
        mean = nn.functional.avg_pool2d(images, 9, 1, 4, count_include_pad=False)
        return SegLogits(torch.cat([-mean, mean], dim=1))


def predicted(tmp_path, image, form, **options):
    path, output = tmp_path / "x.tif", tmp_path / "labels.tif"
    tifffile.imwrite(path, image, **options)
    usual = InferenceSettings(mean=(125.003 * 255 / 250,), std=(1.0,), value_range=(0.0, 250.0))
    assert predict_raster(
        Predictor(Local().eval(), SettingsBySize(usual, usual), torch.device("cpu"), 2),
        path,
        SIZE,
        output,
        form=form,
        stored=lambda label: np.array([7, 300, *[9] * 254], np.uint16)[label],
        no_data=9,
        on_block=lambda *_: None,
    )
    return output


@pytest.mark.parametrize("dtype", [np.uint16, np.float32])
def test_blocks_are_predicted_as_the_whole_and_keep_the_georeference(tmp_path, small_limits, dtype):
    rasterio = pytest.importorskip("rasterio")
    image = values(1, dtype)[..., 0] + dtype(1)
    image[:, 70:90] = 0
    form = ImageForm(1, image.dtype, (0.0, 250.0), (125.0,))
    tags = [*GEO, (42113, "s", 0, "0", True)]
    output = predicted(tmp_path, image, form, extratags=tags)
    whole = np.where(image == 0, form.fill[0], image).astype(np.float32)
    whole = torch.from_numpy(whole)[None, None] - 125.003
    expected = np.array([7, 300])[Local()(whole).out.argmax(1)[0]]
    expected[:, 70:90] = 9
    with rasterio.open(tmp_path / "x.tif") as given, rasterio.open(output) as found:
        assert found.crs == given.crs == rasterio.CRS.from_epsg(32633)
        assert found.transform == given.transform
        assert found.transform.c == 500000
        assert found.nodata == 9
        np.testing.assert_array_equal(found.read(1), expected)
