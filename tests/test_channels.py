"""Bands and grey levels: what a checkpoint knows of them, and what it says of other ones."""

import json
from dataclasses import replace

import numpy as np
import pytest
import tifffile
from experiments import write_config, write_data
from pydantic import ValidationError

from segtrain.checkpoint.format import load, parse_channels
from segtrain.config import DataConfig, load_config
from segtrain.data import open_dataset
from segtrain.data.check.channels import (
    Channels,
    channel_findings,
    channels_from_json,
    channels_to_json,
    measure_channels,
)
from segtrain.data.check.checks import check_split
from segtrain.data.check.values import image_values
from segtrain.data.read.image import RGB, read_image
from segtrain.data.read.image_formats import read_info
from segtrain.errors import DataError

NAMES = "Red", "Green", "Blue", "NIR"
COLORS = np.array([(90, 60, 30, 30), (20, 140, 70, 220), (60, 90, 200, 10), (200, 190, 90, 120)])


def bands(path, pixels, names=(), offset=0, of=range(3)):
    """A TIFF (H, W, C) with GDAL's names of its bands, and an offset of some."""
    item = '<Item name="{}" sample="{}" role="{}">{}</Item>'
    found = [item.format("DESCRIPTION", i, "description", name) for i, name in enumerate(names)]
    found += [item.format("OFFSET", i, "offset", offset) for i in of if offset]
    metadata = f"<GDALMetadata>{''.join(found)}</GDALMetadata>"
    tags = [(42112, "s", 0, metadata, True)] if found else []
    path.parent.mkdir(parents=True, exist_ok=True)
    tifffile.imwrite(path, pixels, photometric="minisblack", planarconfig="contig", extratags=tags)
    return path


def scene(seed):
    """An image (32, 40, 4) and its label."""
    rng = np.random.default_rng(seed)
    label = rng.choice(4, (16, 20), p=[0.1, 0.7, 0.1, 0.1]).repeat(2, 0).repeat(2, 1)
    image = COLORS[label] + rng.normal(0, 5, (32, 40, 4))
    return image.clip(0, 255).astype(np.uint8), label.astype(np.uint8)


@pytest.fixture
def config(tmp_path):
    """A config of images with four named bands."""
    root = tmp_path / "data"
    root.mkdir()
    write_data(root, 0, num_val=0)
    for split, seeds in (("train", range(8)), ("val", (8, 9))):
        for seed in seeds:
            image, label = scene(seed)
            bands(root / f"images/{split}/{seed}.tif", image, NAMES)
            tifffile.imwrite(root / f"labels/{split}/{seed}.tif", label)
    data = {"channels": 4, "mean": [100.0] * 4, "std": [50.0] * 4}
    data |= {"layout": "folders", "root": str(root), "classes": str(root / "classes.yaml")}
    options = {"data": data | {"num_workers": 0}, "augment": {"crop_size": [33, 41]}}
    options["model"] = {"backbone": "resnet18", "head_channels": 8, "num_stages": 2}
    options["model"] |= {"output_stride": 8, "aux_channels": 8, "pretrained": None}
    options |= {"train": {"steps": 1, "batch_size": 2}, "log": {"charts": False}}
    return write_config(tmp_path / "c.yaml", options)


def test_a_model_warns_of_bands_in_another_order_and_refuses_them_by_their_names(config, lab):
    lab.done("train", config, "--output", lab.folder / "run", "--device", "cpu")
    known = parse_channels(load(lab.folder / "run/checkpoints/last.pt"), config)
    pixels = np.stack([scene(seed)[0] for seed in range(8)]).astype(np.float64)
    assert known.bands == NAMES
    np.testing.assert_allclose(known.mean, pixels.mean((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(known.std, pixels.std((0, 1, 2)), rtol=1e-9)
    np.testing.assert_allclose(known.spread, pixels.mean((1, 2)).std(0, ddof=1), rtol=1e-9)

    image, first = scene(20)[0], [3, 0, 1, 2]
    predict = "predict", lab.folder / "run", "--device", "cpu", "--output", lab.folder / "out"
    named = bands(lab.folder / "named.tif", image, NAMES)
    assert "warning" not in lab.done(*predict, named).out
    unnamed = bands(lab.folder / "a.tif", image[..., first])
    assert "1 image fits the channels of the training much better in the order 2, 3, 4, 1" in (
        lab.done(*predict, unnamed).out
    )
    bands(named, image[..., first], np.array(NAMES)[first])
    words = "named.tif: bands NIR, Red, Green, Blue, and those of the others, or of the training"
    assert words in lab.command(*predict, "--overwrite", named).err
    darker = bands(lab.folder / "b.tif", image // 8)
    assert "1 image has channels whose mean is far from that of the training" in (
        lab.done(*predict, "--overwrite", darker).out
    )


def test_a_pack_knows_the_names_and_the_offsets_of_its_bands(config, lab):
    for path in (lab.folder / "data/images").glob("*/*.tif"):
        bands(path, tifffile.imread(path), NAMES, offset=-5, of=[2])
    lab.done("data", "pack", config, "--output", lab.folder / "pack", "--jobs", "1")
    away = [f"data.pack={lab.folder / 'pack'}", f"data.root={lab.folder / 'nowhere'}"]
    form = open_dataset(load_config(config, away).data, "train").form
    assert (form.bands, form.scaling) == (NAMES, (("offset", -5.0, 2),))


def test_bands_of_one_set_in_different_orders_are_refused(config, lab):
    image, _ = scene(3)
    bands(lab.folder / "data/images/train/3.tif", image, NAMES[::-1])
    said = lab.refused("train", config, "--output", lab.folder / "run", "--device", "cpu", code=3)
    assert "bands NIR, Blue, Green, Red, and those of the others" in said
    checked = lab.command("data", "check", config, "--jobs", "1")
    assert checked.code == 3
    assert "bands NIR, Blue, Green, Red, and those of the others" in checked.out


def test_other_offsets_within_a_set_are_told_and_refused_where_every_file_has_one(config, lab):
    image, _ = scene(3)
    train = lab.folder / "data/images/train"
    bands(train / "3.tif", image, offset=-1000)
    words = "by different scales or offsets what their numbers mean"
    checked = lab.done("data", "check", config, "--jobs", "1").out
    assert f"warning: split 'train': images say {words}" in checked
    assert "  offset -1000 of band 1, 2, 3: 3" in checked
    for one, other in (({"offset": 20}, {}), ({"offset": -1000, "of": [1]}, {"of": [0]})):
        for path in train.iterdir():
            of = {"offset": -1000} | (one if path.stem != "3" else other)
            bands(path, tifffile.imread(path), **of)
        assert words in lab.refused("train", config, "--output", "run", "--device", "cpu", code=3)


def test_names_of_bands_count_only_where_some_are_equal(tmp_path):
    image, _ = scene(0)
    path = bands(tmp_path / "a.tif", image[..., :3], ["B&amp;4", "B3", "B2"])
    assert read_info(path).bands == ("B&4", "B3", "B2")
    for wanted in (("b&4", "b3", "b2"), ("Red", "Green", "Blue"), ()):
        read_image([path], RGB._replace(bands=wanted))
    with pytest.raises(DataError, match=r"bands B&4, B3, B2, and .* B2, B3, B8"):
        read_image([path], RGB._replace(bands=("B2", "B3", "B8")))


@pytest.mark.parametrize("spread", ["[1.0, 2.0]", "[NaN]", '["x"]'])
def test_damaged_channels_of_a_checkpoint_are_refused(spread):
    fields = f'"bands": [], "mean": [1.0], "std": [1.0], "spread": {spread}'
    with pytest.raises(ValidationError):
        channels_from_json(f"{{{fields}}}")


def values(mean, std=40.0, seed=0, channels=1):
    rng = np.random.default_rng(seed)
    pixels = rng.normal(mean, std, (30, 40, channels)).clip(0, 255).astype(np.uint8)
    return image_values(pixels, RGB._replace(channels=channels), "x")


def test_photographs_of_other_colours_are_not_taken_for_another_order():
    trained = Channels((), (115.0, 110.0, 100.0), (60.0,) * 3, (25.0,) * 3)
    tints = [(60, 90, 150), (160, 110, 70), (40, 40, 60), (200, 205, 210)]
    assert not [*channel_findings([values(tint, channels=3) for tint in tints], trained)]


def test_grey_levels_after_another_normalization_are_told():
    trained = Channels((), (35.0,), (20.0,), (3.0,))
    assert not [*channel_findings([values(35, 20), values(60, 20)], trained)]
    unlike = values(35, 20)
    unlike = unlike._replace(form=unlike.form._replace(scaling=(("scale", 0.1, 0),)))
    (found,) = channel_findings([unlike], trained)
    assert "(scale 0.1 of band 1 here, none there)" in found.text
    (found,) = channel_findings([values(35, 20), values(128, 40), values(220, 20)], trained)
    assert found.text.startswith("2 images have channels whose mean is far from")


def test_one_channel_of_several_is_told_where_no_image_of_the_training_was_grey():
    """And one of a scan whose channels are equal, too."""
    trained = Channels((), (30.0, 60.0, 90.0), (20.0,) * 3, (9.0,) * 3)
    plane = np.random.default_rng(0).normal(60, 20, (30, 40, 1)).clip(0, 255).astype(np.uint16)
    for pixels in (plane, plane.astype(np.float32)):
        form = RGB._replace(dtype=pixels.dtype, value_range=(0, 255))
        grey = image_values(pixels.repeat(3, 2), form, "one.tif")
        (found,) = channel_findings([grey], trained)
        assert "1 image is grey, and no image of the training that was looked at" in found.text
        assert found.lines()[0].endswith(": one.tif")
        for other in ({"grey": 0.1}, {"mean": (60.0,) * 3}):
            assert not [*channel_findings([grey], replace(trained, **other))]
    blank = image_values(np.full((30, 40, 3), 60, np.uint8), RGB, "blank")
    assert not [*channel_findings([blank, values((30, 60, 90), 20, channels=3)], trained)]


def test_a_checkpoint_knows_whether_images_were_grey_and_what_numbers_they_held(tmp_path):
    rng, root = np.random.default_rng(0), tmp_path / "images/train"
    write_data(tmp_path, 0, num_val=0)
    for i in range(4):
        shape = (32, 40) if i == 0 else (32, 40, 3)
        root.mkdir(parents=True, exist_ok=True)
        pixels = rng.integers(0, 4096, shape, np.uint16)
        tifffile.imwrite(root / f"{i}.tif", pixels, photometric="minisblack" if i == 0 else "rgb")
        tifffile.imwrite(tmp_path / f"labels/train/{i}.tif", rng.integers(0, 4, (32, 40), np.uint8))
    data = {"layout": "folders", "root": str(tmp_path), "classes": str(tmp_path / "classes.yaml")}
    data = DataConfig(**data, value_range=(0, 4095))
    known = measure_channels(open_dataset(data, "train"))
    assert (known.dtype, known.grey) == ("uint16", 0.25)
    (found,) = (x for x in check_split(open_dataset(data, "train")) if "grey" in x)
    assert "1 image is grey, and others are not: one channel is taken three times" in found
    assert found.endswith("such as 0")
    # Of before there was such a field.
    text = json.loads(channels_to_json(known))
    del text["dtype"], text["grey"]
    assert channels_from_json(json.dumps(text)) == replace(known, dtype=None, grey=0.0)
