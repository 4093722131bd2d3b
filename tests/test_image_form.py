"""Images of any number of channels and type, from the file to the network, against numpy."""

import json

import numpy as np
import pytest
import tifffile
import torch
from PIL import Image

from segtrain.api import Predictor
from segtrain.cli import main as segtrain
from segtrain.config import AugmentConfig, Config, DataConfig, ModelConfig, load_config
from segtrain.data import open_dataset
from segtrain.data.check.checks import check_data
from segtrain.data.check.image_findings import find_darkness
from segtrain.data.check.values import image_values
from segtrain.data.read.find import Window
from segtrain.data.read.image import ImageForm, read_image
from segtrain.data.sample.geometry import Placement, Span, resample_image
from segtrain.data.sample.transforms import TrainTransform
from segtrain.desk.survey.image_facts import image_facts
from segtrain.errors import ConfigError, DataError
from segtrain.models import build_model
from segtrain.models.blocks import Normalize, normalize
from segtrain.models.stem import widened
from segtrain.run.pictures import as_rgb

SIZE = 24, 40


def values(channels, dtype, high, size=SIZE, seed=0):
    return np.random.default_rng(seed).uniform(0, high, (*size, channels)).astype(dtype)


def write_set(root, image_of, num=3):
    """Pairs of `image_of(i)` and a label with class 1 in its lower half."""
    for split in ("train", "val"):
        for i in range(num):
            for kind in ("images", "labels"):
                (root / kind / split).mkdir(parents=True, exist_ok=True)
            path = root / "images" / split / f"{i}.tif"
            image = image_of(i + 100 * (split == "val"))
            options = {"planarconfig": "contig"} if image.shape[2] > 1 else {}
            tifffile.imwrite(path, image, photometric="minisblack", **options)
            label = np.repeat([0, 1], SIZE[0] // 2)[:, None].repeat(SIZE[1], 1)
            Image.fromarray(label.astype(np.uint8)).save(root / f"labels/{split}/{i}.png")
    (root / "c.yaml").write_text("classes: [sky, road]\n")
    return root


def data_of(root, **options):
    return DataConfig(layout="folders", root=str(root), classes=str(root / "c.yaml"), **options)


FILES = [
    (1, np.uint16, 3, (0, 0, 0)),
    (3, np.uint16, 3, (0, 1, 2)),
    (4, np.uint8, 4, (0, 1, 2, 3)),
    (5, np.uint16, 5, (0, 1, 2, 3, 4)),
    (1, np.int16, 1, (0,)),
]


@pytest.mark.parametrize(("found", "dtype", "wanted", "bands"), FILES)
def test_channels_are_those_of_the_file_and_grey_becomes_rgb(tmp_path, found, dtype, wanted, bands):
    image = values(found, dtype, 200)
    np.save(tmp_path / "x.npy", image)
    kept = dtype if dtype != np.int16 else np.float32
    read = read_image([tmp_path / "x.npy"], ImageForm(wanted, np.dtype(kept)))
    assert read.dtype == kept
    np.testing.assert_array_equal(read, image[..., bands])


@pytest.mark.parametrize(("found", "wanted"), [(4, 3), (3, 4), (5, 3), (3, 1), (2, 1)])
def test_other_numbers_of_channels_are_refused_with_the_option(tmp_path, found, wanted):
    np.save(tmp_path / "x.npy", values(found, np.uint8, 255))
    message = rf"x\.npy: {found} channels, data\.channels is {wanted}; set data\.channels: {found}"
    with pytest.raises(DataError, match=message):
        read_image([tmp_path / "x.npy"], ImageForm(wanted))


def test_bands_in_files_of_their_own_are_joined_in_their_order(tmp_path):
    image, paths = values(3, np.uint16, 4095), []
    for i in (2, 0, 1):
        paths.append(tmp_path / f"b{i}.tif")
        tifffile.imwrite(paths[-1], image[..., i])
    form = ImageForm(3, np.dtype(np.uint16))
    np.testing.assert_array_equal(read_image(paths, form), image[..., [2, 0, 1]])
    tifffile.imwrite(paths[0], image[:-1, :, 0])
    for window in (None, Window(0, 0, 8, 8)):  # which lies in all of them
        with pytest.raises(DataError, match="files of this image have sizes 23x40, 24x40, 24x40"):
            read_image(paths, form, window)


def test_pixels_without_a_value_are_ignored_and_become_the_mean(tmp_path):
    """NaN, infinity, and the number by which GDAL marks them."""
    image = values(2, np.float32, 3)
    image[0, 0, 1], image[1, 1, 0], image[2, 2] = np.nan, np.inf, -9999
    write_set(tmp_path, lambda _: image)
    for path in tmp_path.glob("images/*/*.tif"):
        tag = (42113, "s", 0, "-9999", True)
        planes = np.moveaxis(image, -1, 0)
        options = {"photometric": "minisblack", "planarconfig": "separate", "extratags": [tag]}
        tifffile.imwrite(path, planes, **options)
    options = {"channels": 2, "value_range": (0.0, 3.0), "mean": (85.0, 170.0), "std": (60.0, 60.0)}
    read, label = open_dataset(data_of(tmp_path, **options), "train")[0]
    ignored = [[0, 0], [1, 1], [2, 2]]
    assert np.argwhere(label == 255).tolist() == ignored
    assert (read[0, 0, 1], read[1, 1, 0]) == (2.0, 1.0)
    assert read[2, 2].tolist() == [1.0, 2.0]
    keep = np.isfinite(image) & (image != -9999)
    np.testing.assert_array_equal(read[keep], image[keep])


@pytest.mark.parametrize("angle", [0.0, 20.0])
@pytest.mark.parametrize(("dtype", "high"), [(np.uint8, 255), (np.uint16, 65535), (np.float32, 2)])
def test_a_crop_of_many_channels_is_that_of_each_channel_alone(dtype, high, angle):
    rows, columns = Span(24, 31, 36, pad=2), Span(40, 52, 33, start=3)
    placement = Placement(rows, columns, angle_deg=angle, flip=True)
    image, fill = values(7, dtype, high), tuple(range(7))
    crop = resample_image(image, placement, fill=fill)
    assert crop.dtype == dtype
    for i in range(7):
        alone = resample_image(image[..., i : i + 1].copy(), placement, fill=fill[i : i + 1])
        np.testing.assert_array_equal(crop[..., i], alone[..., 0])


def test_an_image_without_any_value_is_not_a_dark_one():
    form = ImageForm(2)
    bright, dark = (image_values(values(2, np.uint8, top), form, "a") for top in (255, 9))
    empty = image_values(np.full((*SIZE, 2), np.nan, np.float32), form, "b")
    assert find_darkness([empty, bright]) is None
    assert find_darkness([empty, dark]) is not None


NO_DATA = [(np.uint8, 0), (np.uint16, 65535), (np.uint8, 256)]


@pytest.mark.filterwarnings("ignore:Dataset has no geotransform")
@pytest.mark.parametrize(("dtype", "number"), NO_DATA)
def test_whole_numbers_have_no_value_where_gdals_mask_says_so(tmp_path, capsys, dtype, number):
    """Where all bands are the number, whether read whole or by windows."""
    rasterio = pytest.importorskip("rasterio")
    image = values(2, dtype, 200) + dtype(1)
    image[:, :9] = image[3, 20, 0] = number % 256 if dtype == np.uint8 else number
    write_set(tmp_path, lambda _: image)
    options = {"photometric": "minisblack", "planarconfig": "contig", "tile": (16, 16)}
    for path in tmp_path.glob("images/*/*.tif"):
        tifffile.imwrite(path, image, extratags=[(42113, "s", 0, str(number), True)], **options)
    data = {"channels": 2, "value_range": (0.0, 255.0), "mean": (60.0, 90.0), "std": (9.0, 9.0)}
    read, label = open_dataset(data_of(tmp_path, **data), "train")[0]
    with rasterio.open(path) as file:
        missing = file.dataset_mask() == 0
    np.testing.assert_array_equal(label == 255, missing)
    assert read.dtype == dtype
    np.testing.assert_array_equal(read, np.where(missing[..., None], dtype([60, 90]), image))
    form, window = ImageForm(2, np.dtype(dtype)), Window(2, 5, 20, 30)
    whole = read_image([path], form)
    np.testing.assert_array_equal(read_image([path], form, window), whole[2:22, 5:35])
    assert ("warning", "white") not in kinds(tmp_path, **data)
    assert image_facts((path,)).has_nan == missing.any()
    config = tmp_path / "x.yaml"
    config.write_text(json.dumps({"data": data_of(tmp_path, **data).model_dump(mode="json")}))
    code = segtrain(["data", "pack", str(config), "--output", str(tmp_path / "pack")])
    assert code == (3 if missing.any() else 0)
    assert ("pixels marked as no data" in capsys.readouterr().err) == missing.any()


@pytest.mark.parametrize("dtype", [np.float32, np.uint8])
@pytest.mark.parametrize("rotate_deg", [0.0, 30.0])
def test_nan_spreads_into_no_pixel_that_counts(rotate_deg, dtype):
    """What a NaN takes part in is ignored and the mean; without rotation all else is the image."""
    image, label = np.full((*SIZE, 2), 100, np.float32), np.zeros(SIZE, np.uint8)
    image[10:14, 10:14] = np.nan
    form = ImageForm(2, np.dtype(dtype), (0.0, 200.0), (0.0, 255.0))
    augment = AugmentConfig(crop_size=(28, 40), scale_range=(1.3, 1.3), rotate_deg=rotate_deg)
    for seed in range(4):
        crop, classes = TrainTransform(augment, form=form)(
            image, label, np.random.default_rng(seed)
        )
        assert np.isfinite(crop).all()
        assert crop.dtype == dtype
        if not rotate_deg:
            assert (crop[classes == 255] == [0, 200]).all()
            assert (crop[classes == 0] == 100).all()


SCALES = [
    (np.uint8, None, 1.0, 0.0),
    (np.uint16, None, 255 / 65535, 0.0),
    (np.uint16, (100.0, 4195.0), 255 / 4095, -100.0),
    (np.float32, (-1.0, 1.0), 127.5, 1.0),
]


@pytest.mark.parametrize(("dtype", "value_range", "factor", "shift"), SCALES)
def test_one_scale_makes_units_of_255_before_mean_and_std(dtype, value_range, factor, shift):
    image = values(2, dtype, 200)
    mean, std = (10.0, 20.0), (3.0, 4.0)
    tensor = torch.from_numpy(image).permute(2, 0, 1)[None]
    found = normalize(tensor, mean, std, value_range=value_range)[0].permute(1, 2, 0)
    exact = ((image.astype(float) + shift) * factor - mean) / std
    np.testing.assert_allclose(found, exact, rtol=2e-6, atol=2e-5)
    form = ImageForm(2, np.dtype(dtype), value_range, mean)
    filled = (np.array(form.fill, float) + shift) * factor
    np.testing.assert_allclose(filled, mean, atol=0 if dtype == np.float32 else factor / 2 + 1e-9)


def test_values_beyond_the_range_become_its_ends_where_that_is_said():
    image = torch.from_numpy(values(2, np.float32, 200)).permute(2, 0, 1)[None]
    assert image.min() < 50 < 90 < image.max()
    how = {"value_range": (50.0, 90.0)}
    expected = normalize(image.clip(50, 90), (10.0, 20.0), (3.0, 4.0), **how)
    assert torch.equal(normalize(image, (10.0, 20.0), (3.0, 4.0), clip=True, **how), expected)
    module = Normalize((10.0, 20.0), (3.0, 4.0), (50.0, 90.0), clip=True)
    torch.testing.assert_close(module(image), expected)


def test_the_module_normalizes_bytes_and_floats_alike_and_keeps_type_and_layout():
    mean, std = (123.675, 116.28, 103.53), (58.395, 57.12, 57.375)
    images = torch.from_numpy(values(3, np.uint8, 255)).permute(2, 0, 1)[None]  # channels last
    module = Normalize(mean, std)
    assert torch.equal(module(images), normalize(images, mean, std))
    assert torch.equal(module(images.float()), module(images))
    assert not module.state_dict()
    found = module.double()(images)
    assert found.is_contiguous(memory_format=torch.channels_last)
    expected = normalize(images, mean, std, dtype=torch.float64)
    torch.testing.assert_close(found, expected, rtol=1e-6, atol=1e-6)  # of the type too


@pytest.mark.parametrize("channels", [1, 2, 4, 13])
def test_kernels_for_rgb_are_widened_as_timm_does(channels):
    from timm.models._manipulate import adapt_input_conv

    kernels = torch.randn(8, 3, 3, 3, generator=torch.Generator().manual_seed(0))
    expected = adapt_input_conv(channels, kernels)
    torch.testing.assert_close(widened(kernels, channels), expected, rtol=1e-6, atol=1e-6)


@pytest.mark.parametrize("backbone", ["resnet18", "mobilenet_v2", "timm/convnext_atto"])
def test_pretrained_weights_of_rgb_serve_other_channels(tmp_path, backbone):
    from segtrain.models.pretrained import load_backbone

    model = ModelConfig(backbone=backbone, arch="deeplabv3", output_stride=16)
    rgb = build_model(model, num_classes=2).backbone
    state = getattr(rgb, "weights", rgb).state_dict()
    torch.save(dict(state), tmp_path / "w.pth")
    grey = build_model(model, num_classes=2, in_channels=1).backbone
    lines = load_backbone(grey, str(tmp_path / "w.pth")).lines()
    assert any("kernels for 1 channel from RGB: their sum" in line for line in lines)
    image = torch.randn(1, 1, 64, 64)
    with torch.no_grad():
        one, three = grey.eval()(image).out, rgb.eval()(image.expand(-1, 3, -1, -1)).out
    torch.testing.assert_close(one, three, rtol=1e-3, atol=1e-3)


def test_other_images_are_shown_by_their_first_channels_on_one_scale():
    image = np.array([[[0, 2000, 4095, 9], [4095, 9000, 0, 9]]], np.uint16)
    shown = as_rgb(image, (0.0, 4095.0))
    assert shown.tolist() == [[[0, 125, 255], [255, 255, 0]]]
    assert as_rgb(np.array([[[1.0]]], np.float32), (0.0, 2.0)).tolist() == [[[128, 128, 128]]]


# What the values of a set say about how its files were made.


def kinds(root, **options):
    found = check_data(data_of(root, **options), jobs=1).findings
    return {(one.severity, one.kind) for one in found if one.split == "train"}


def burnt_in(image):
    """A pixel that is brighter than the sensor can be hides nothing."""
    image[0, 0, 0] = 65535
    return image


WAYS = [
    ("12 bits in 16", lambda i: burnt_in(values(3, np.uint16, 4096, seed=i)), ("error", "faint")),
    ("cut", lambda i: values(3, int, 4096, seed=i).clip(0, 255).astype("u1"), ("warning", "white")),
    ("floats", lambda i: values(3, np.float32, 1, seed=i), ("error", "range")),
    ("good", lambda i: values(3, np.uint8, 255, seed=i), None),
]


@pytest.mark.parametrize(("way", "image_of", "expected"), WAYS, ids=[w[0] for w in WAYS])
def test_conversions_that_lose_values_are_found(tmp_path, way, image_of, expected):
    write_set(tmp_path, image_of)
    assert kinds(tmp_path) == ({expected} if expected else set())


@pytest.mark.parametrize("axes", [(0, 1), None], ids=["channels", "images"])
def test_images_that_were_stretched_one_by_one_are_found(tmp_path, axes):
    def stretched(i):
        image = np.random.default_rng(i).normal(size=(*SIZE, 3))
        low, high = image.min(axes), image.max(axes)
        return ((image - low) / (high - low) * 255).round().astype(np.uint8)

    write_set(tmp_path, stretched, num=8)
    assert ("warning", "stretched") in kinds(tmp_path)


def test_a_fourth_band_that_varies_is_not_dropped_without_a_word(tmp_path):
    write_set(tmp_path, lambda i: values(3, np.uint8, 255, seed=i))
    for path in list(tmp_path.glob("images/*/*.tif")):
        path.unlink()
        Image.fromarray(values(4, np.uint8, 255)).save(path.with_suffix(".png"))
    assert ("warning", "dropped band") in kinds(tmp_path)
    numbers = {"mean": (1.0,) * 4, "std": (1.0,) * 4}
    assert ("warning", "dropped band") not in kinds(tmp_path, channels=4, **numbers)
    for path in tmp_path.glob("images/*/*.png"):
        opaque = values(4, np.uint8, 255)
        opaque[..., 3] = 255
        Image.fromarray(opaque).save(path)
    assert ("warning", "dropped band") not in kinds(tmp_path)


# From the command line.


@pytest.fixture
def five_bands(tmp_path):
    """12 bits in uint16, five channels, as TIFF; and a config without mean, std and range."""
    write_set(tmp_path, lambda i: values(5, np.uint16, 4096, seed=i))
    config = tmp_path / "x.yaml"
    config.write_text(
        f"data: {{layout: folders, root: {tmp_path}, classes: {tmp_path}/c.yaml, channels: 5}}\n"
        "augment: {crop_size: [32, 32], class_mix_prob: 0.5, blur_prob: 0.5}\n"
        "model: {backbone: resnet18, num_stages: 2, output_stride: 8, head_channels: 8, "
        "aux_channels: 8}\ntrain: {batch_size: 2, steps: 2}\noptim: {lr: 0.01}\n"
        "log: {every_steps: 1, charts: false}\n"
    )
    return config


def sets(**data):
    """The words that set these options of the data."""
    return [f"--set=data.{key}={json.dumps(value)}" for key, value in data.items()]


NUMBERS = {"value_range": (0.0, 4095.0), "mean": (120.0,) * 5, "std": (70.0,) * 5}


def test_stats_print_what_a_set_of_other_values_needs(five_bands, lab):
    said = lab.refused("train", five_bands, "--output", five_bands.parent / "no")
    assert "'segtrain data stats' prints them" in said
    text = lab.done("data", "stats", five_bands).out
    lines = [
        line for line in text.splitlines() if line.startswith(("  value_r", "  mean", "  std"))
    ]
    assert lines[0] == "  value_range: [0, 4095]"
    assert "values: uint16 from 0 to 4095; by a sample 0.1 % up to" in text
    root = five_bands.parent
    images = np.stack([tifffile.imread(p) for p in sorted(root.glob("images/train/*"))])
    means = json.loads(lines[1].partition(":")[2])
    np.testing.assert_allclose(means, images.mean((0, 1, 2)) * 255 / 4095, atol=6e-4)
    five_bands.write_text(
        five_bands.read_text().replace("data: {", "data: {\n" + ",".join(lines) + ",")
    )
    config = load_config(five_bands)
    assert (config.data.value_range, len(config.data.std)) == ((0.0, 4095.0), 5)


def test_five_channels_of_12_bits_train_score_predict_and_export(five_bands, lab, monkeypatch):
    root, run = five_bands.parent, five_bands.parent / "run"
    options = sets(num_workers=0, **NUMBERS)
    lab.done("train", five_bands, "--output", run, "--device", "cpu", *options)
    lab.done("eval", run, "--device", "cpu", "--overlays", root / "o")
    predict = ("predict", run, root / "images/val", "--output", root / "p")
    lab.done(*predict)
    assert len(list((root / "p").rglob("*.png"))) == 3 * 3 + 1
    monkeypatch.setattr("segtrain.predict.raster_inputs.MAX_PHOTO_PIXELS", 100)
    monkeypatch.setattr("segtrain.data.read.raster._MIN_BYTES", 0)
    lab.done(*predict, "--overwrite")
    for path in (root / "p/labels").glob("*.tif"):
        label = np.array(Image.open(path.with_suffix(".png")))
        np.testing.assert_array_equal(tifffile.imread(path), label)
    Image.new("RGB", (40, 24)).save(root / "rgb.png")
    tifffile.imwrite(root / "rgb.tif", np.zeros((40, 24, 3), np.uint16))  # read by windows
    as_bands = {"photometric": "minisblack", "planarconfig": "contig"}
    tifffile.imwrite(root / "bytes.tif", np.zeros((40, 24, 5), np.uint8), **as_bands)
    wrong = [root / name for name in ("rgb.png", "rgb.tif", "bytes.tif")]
    code, _, said = lab.command("predict", run, *wrong, "--output", root / "q")
    assert code == 3
    assert said.count("3 channels, and the model was trained on 5: it needs the same bands") == 2
    assert "bytes.tif: values of uint8, and the model was trained on values of [0.0, 4095" in said
    images = [tifffile.imread(x).astype(np.float32) for x in sorted(root.glob("images/val/*"))]
    tifffile.imwrite(root / "dn.tif", images[0], **as_bands)  # whole numbers, stored as floats
    words = "0 of 1 rasters", "0 of 1 images"
    for i, (dtype, limit) in enumerate(((np.float32, 100), (np.float64, 1 << 20))):
        monkeypatch.setattr("segtrain.predict.raster_inputs.MAX_PHOTO_PIXELS", limit)
        lab.done("predict", run, root / "dn.tif", "--output", root / f"dn{i}")
        tifffile.imwrite(root / f"r{i}.tif", (images[0] / 4096).astype(dtype), **as_bands)
        code, out, said = lab.command("predict", run, root / f"r{i}.tif", "--output", root / "r")
        assert (code, words[i] in out, [*(root / "r").rglob("r*.*")]) == (3, True, [])
        assert f"r{i}.tif: fractions from 0" in said
        assert "and the model was trained on whole numbers of [0, 4095]: convert them" in said
    with pytest.raises(DataError, match=r"image: fractions from 0\S* to 0\.\d*, and the model was"):
        Predictor(run, device="cpu")(images[0] / 4096)
    (root / "drive.mp4").write_bytes(b"")
    said = lab.refused("predict", run, root / "drive.mp4", "--output", root / "v", code=3)
    assert "was trained on 5 channels of values of [0, 4095]: predict images of such values" in said
    export = ("export", run, "--format", "torchscript", "--output", root / "m.ts")
    lab.refused(*export, "--normalize", "uint8")
    lab.done(*export, "--normalize", "float32")


def test_training_and_statistics_see_the_clipped_values(five_bands, lab, monkeypatch):
    seen, forward = [], Normalize.forward

    def kept(self, images):
        seen.append((images.float().max(), forward(self, images)))
        return seen[-1][1]

    monkeypatch.setattr(Normalize, "forward", kept)
    numbers = {"value_range": [1000, 2000], "mean": [100] * 5, "std": [50] * 5}
    options = sets(num_workers=0, clip=True, **numbers)
    short = "--set=train.steps=1", "--set=schedule.warmup_steps=0", "--device=cpu"
    lab.done("train", five_bands, "--output", five_bands.parent / "run", *options, *short)
    assert max(stored for stored, _ in seen) > 2000
    assert max(found.max() for _, found in seen) == pytest.approx((255 - 100) / 50)
    images = [tifffile.imread(p) for p in sorted(five_bands.parent.glob("images/train/*"))]
    lab.done("data", "stats", five_bands, "--json", five_bands.parent / "s.json", *options)
    found = json.loads((five_bands.parent / "s.json").read_text())["mean"]
    expected = np.stack(images).clip(1000, 2000).mean((0, 1, 2))
    np.testing.assert_allclose(found, (expected - 1000) * 255 / 1000, rtol=1e-5)
    said = lab.refused("config", "show", five_bands, "--set", "data.clip=true")
    assert "clip: has no effect with value_range null" in said


def test_a_pack_gives_the_same_pixels(five_bands, lab):
    from test_pack import assert_same_items

    root = five_bands.parent
    lab.done("data", "pack", five_bands, "--output", root / "pack", *sets(**NUMBERS))
    files = open_dataset(data_of(root, channels=5, **NUMBERS), "val")
    packed = open_dataset(data_of(root, channels=5, pack=str(root / "pack"), **NUMBERS), "val")
    assert_same_items(packed, files)
    assert packed[0][0].dtype == np.uint16


def test_colours_change_in_8_bit_rgb_alone(five_bands, lab):
    augment = AugmentConfig(color_prob=0.5)
    with pytest.raises(ConfigError, match=r"augment\.color_prob: takes 8-bit images"):
        TrainTransform(augment, form=ImageForm(3, np.dtype(np.uint16)))
    check, extra = ("data", "check", five_bands, *sets(**NUMBERS)), "augment.extra"
    wrong = lab.command(*check, f"--set={extra}=[{{name: InvertImg}}]")  # as training says
    assert (wrong.code, f"{extra}: takes 8-bit images" in wrong.out) == (3, True)
    assert extra not in lab.done(*check).out
    data = DataConfig(layout="camvid", root="x", classes="x", channels=4)
    with pytest.raises(ValueError, match="are those of RGB"):
        Config(data=data, augment=augment)
