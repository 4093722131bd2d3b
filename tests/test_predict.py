import argparse
import os
import re
import resource
import signal

import cv2
import numpy as np
import pytest
import tifffile
import torch
from PIL import Image
from torch import nn

from segtrain import cli, predict
from segtrain.checkpoint import ready
from segtrain.checkpoint.trained import LoadedModel
from segtrain.config import Config, DataConfig
from segtrain.data.read.classes import ClassFile, SegClass
from segtrain.data.read.georeference import place_of
from segtrain.data.read.image_formats import read_info
from segtrain.errors import ConfigError, DataError, ExecutionError, MemoryLimitError
from segtrain.inference import settings
from segtrain.predict import raster_inputs
from segtrain.predict.video import overlay_video
from segtrain.run.pictures import write_stored
from segtrain.task.tasks import task_of
from segtrain.types import SegLogits

CLASSES = ClassFile(
    name="three",
    classes=(
        SegClass("reddish", (200, 0, 10), (7,)),
        SegClass("greenish", (0, 150, 20), (23, 24)),
        SegClass("bluish", (30, 0, 250), (11,)),
    ),
    ignore_ids=(0,),
    ignore_color=(0, 0, 0),
)
RAW_IDS = np.array([7, 23, 11])
PALETTE = [(200, 20, 30), (20, 200, 30), (30, 20, 200)]


class StrongestChannel(nn.Module):
    """Its class is 0, 1 or 2 where red, green or blue is largest, so the result is known."""

    def forward(self, images):
        return SegLogits(images)


class Brightness(nn.Module):
    """Its class depends on the mean of what it is given, so whole images and windows differ."""

    def __init__(self):
        super().__init__()
        self.sizes = set()

    def forward(self, images):
        self.sizes.add(tuple(images.shape[2:]))
        return SegLogits(images - images.mean((2, 3), keepdim=True))


@pytest.fixture
def run(tmp_path, monkeypatch):
    """Runs the command on inputs, writing to tmp_path/out."""
    units = {"mean": (0.0, 0.0, 0.0), "std": (1.0, 1.0, 1.0)}
    config = Config(data=DataConfig(layout="folders", root="x", classes="three", **units))

    def command(*inputs, classes=CLASSES, model=None, crop=(512, 512), eval_crop=None, **changes):
        model = StrongestChannel() if model is None else model
        about = {
            "augment": config.augment.model_copy(update={"crop_size": crop}),
            "eval": config.eval.model_copy(update={"crop_size": eval_crop}),
        }
        loaded = LoadedModel(model.eval(), config.model_copy(update=about), classes, step=3)
        monkeypatch.setattr(ready, "load_model", lambda *sources, device: loaded)
        words = ["predict", "run", *map(str, inputs), "--output", str(tmp_path / "out")]
        args = vars(cli._parser().parse_args([*words, "--device", "cpu"])) | changes
        return predict.main(argparse.Namespace(**args))

    return command


def photo(height, width, seed=0):
    return np.random.default_rng(seed).integers(0, 256, (height, width, 3), dtype=np.uint8)


def save(path, image):
    path.parent.mkdir(parents=True, exist_ok=True)
    Image.fromarray(image).save(path)
    return path


NO_VALUE_255 = 42113, "s", 0, "255", True  # GDAL_NODATA


def save_tiff(path, image, *tags):
    tifffile.imwrite(path, image, photometric="rgb", extratags=tags)


def read(path):
    return np.array(Image.open(path))


def names(folder):
    return sorted(path.relative_to(folder).as_posix() for path in folder.rglob("*.png"))


def test_images_of_any_size_get_label_map_colours_and_overlay(run, tmp_path):
    image = photo(37, 53)
    save(tmp_path / "in" / "my street" / "first photo.png", image)
    assert run(tmp_path / "in") == 0
    out = tmp_path / "out"
    expected = image.argmax(2)
    label = read(out / "labels" / "my street" / "first photo.png")
    assert label.dtype == np.uint8
    assert np.array_equal(label, RAW_IDS[expected])
    colors = read(out / "colors" / "my street" / "first photo.png")
    assert np.array_equal(colors, np.array(CLASSES.palette)[expected])
    overlay = out / "overlays" / "my street" / "first photo.png"
    assert np.abs(read(overlay) - (image / 2 + colors / 2)).max() <= 1
    assert (out / "legend.png").is_file()
    # Of any opacity, with classes that stay clear.
    assert run(tmp_path / "in", opacity=0.25, clear=("greenish",), overwrite=True) == 0
    mixed = np.where((expected == 1)[..., None], image, 0.75 * image + 0.25 * colors)
    assert np.abs(read(overlay) - mixed).max() <= 1
    with pytest.raises(ConfigError, match=r"--clear: no class sky; there are reddish"):
        run(tmp_path / "in", clear=("sky",), overwrite=True)


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_probabilities_are_those_of_every_class(run, tmp_path, mode):
    """Of logits, softmax; of windows, their mean, which is the same for this model."""
    image = photo(20, 30)
    save(tmp_path / "a.png", image)
    how = {"set": [f"eval.mode={mode}", "eval.crop_size=[16, 16]"], "overwrite": True}
    expected = np.exp(image.astype(np.float64) - image.max(2, keepdims=True))
    expected = (expected / expected.sum(2, keepdims=True)).transpose(2, 0, 1)
    assert run(tmp_path / "a.png", probabilities="npz", **how) == 0
    with np.load(tmp_path / "out/probabilities/a.npz") as file:
        assert file["probabilities"].dtype == np.float16
        assert np.abs(file["probabilities"] - expected).max() < 1e-3
        assert file["classes"].tolist() == list(CLASSES.names)
    assert run(tmp_path / "a.png", probabilities="tif", **how) == 0
    found = tifffile.imread(tmp_path / "out/probabilities/a.tif")
    assert found.dtype == np.float32
    assert np.abs(found - expected).max() < 1e-5


def video_of(path):
    """The frames in a second, and the frames in RGB."""
    video, found = cv2.VideoCapture(str(path)), []
    rate = video.get(cv2.CAP_PROP_FPS)
    while (frame := video.read())[0]:
        found.append(frame[1][..., ::-1])
    video.release()
    return rate, found


def write_video(path, frames):
    path.parent.mkdir(parents=True, exist_ok=True)
    writer = cv2.VideoWriter(str(path), cv2.VideoWriter.fourcc(*"mp4v"), 12.0, (64, 48))
    for color in frames:
        writer.write(np.full((48, 64, 3), color[::-1], np.uint8))
    writer.release()
    return path


def test_what_a_kind_of_input_cannot_honour_is_refused(run, tmp_path, monkeypatch):
    video = write_video(tmp_path / "drive.mp4", PALETTE[:1])
    image, large = (save(tmp_path / name, photo(8, 9)) for name in ("a.png", "large.tif"))
    with pytest.raises(ConfigError, match=r"--probabilities: not for a video: .*drive\.mp4"):
        run(image, video, probabilities="npz")
    size_of = raster_inputs.raster_size
    monkeypatch.setattr(
        raster_inputs, "raster_size", lambda p, most: (8, 9) if p == large else size_of(p, most)
    )
    with pytest.raises(ConfigError, match=r"--probabilities: not for .*: .*large\.tif"):
        run(large, image, probabilities="tif")
    for option in ({"clear": ("greenish",)}, {"opacity": 0.2}):
        with pytest.raises(
            ConfigError,
            match=r"--(opacity|clear): not for a raster that is read in parts: .*large",
        ):
            run(large, **option)
    with pytest.raises(ConfigError, match=r"--set data\.slice_axis: not for images: "):
        run(image, set=["data.slice_axis=z"])
    assert not list((tmp_path / "out").rglob("*.mp4"))


def test_a_video_becomes_a_video_of_overlays(run, tmp_path, capsys):
    """Of plain frames, which survive the compression."""
    write_video(tmp_path / "drive.mp4", PALETTE)
    save(tmp_path / "b.png", photo(5, 6))
    assert run(tmp_path / "drive.mp4", tmp_path / "b.png", opacity=1.0) == 0
    assert "1 of 1 videos" in capsys.readouterr().out
    rate, shown = video_of(tmp_path / "out/videos/drive.mp4")
    assert (rate, len(shown)) == (12, 3)
    for frame, color in zip(shown, CLASSES.palette, strict=True):
        assert np.abs(frame.mean((0, 1)) - color).max() < 12
    assert sorted(path.name for path in (tmp_path / "out/videos").iterdir()) == ["drive.mp4"]
    assert run(tmp_path / "drive.mp4", output=tmp_path / "alone") == 0
    assert (tmp_path / "alone/legend.png").is_file()
    with pytest.raises(ConfigError, match="exists already"):
        run(tmp_path / "drive.mp4")
    whole = (tmp_path / "drive.mp4").read_bytes()
    (tmp_path / "cut.mp4").write_bytes(whole[:200])
    with pytest.raises(DataError, match=r"cut\.mp4: damaged, or no video"):
        run(tmp_path / "cut.mp4")


def test_after_damaged_frames_a_video_goes_on_at_its_times(run, tmp_path, capsys):
    """The first, and two after another; the end that is missing is none of them."""
    file = write_video(tmp_path / "drive.mp4", [(i * 30,) * 3 for i in range(8)])
    content = bytearray(file.read_bytes())
    starts = [one.start() for one in re.finditer(b"\x00\x00\x01\xb6", content)]
    for i in (0, 3, 4, 7):
        content[starts[i] : starts[i] + 8] = bytes(8)
    file.write_bytes(content)
    assert run(file, opacity=0.0, frames=True) == 0
    said = capsys.readouterr().out
    assert "drive.mp4: 4 of 8 frames can be read; 3 are damaged" in said
    assert "frames after that come too early" in said
    assert names(tmp_path / "out/labels/drive") == [f"{i:06d}.png" for i in (1, 2, 5, 6)]
    _, shown = video_of(tmp_path / "out/videos/drive.mp4")
    grey = [frame.mean() / 30 for frame in shown]
    assert grey == pytest.approx([1, 1, 2, 2, 2, 5, 6], abs=0.4)


def test_a_video_for_which_the_disk_has_no_room_is_an_error(tmp_path):
    write_video(tmp_path / "drive.mp4", PALETTE[:2])
    limits = resource.getrlimit(resource.RLIMIT_FSIZE)
    handler = signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    try:
        resource.setrlimit(resource.RLIMIT_FSIZE, (300, limits[1]))
        with pytest.raises(ExecutionError, match=r"x\.mp4: cannot be written: 0 of 2 frames"):
            overlay_video(tmp_path / "drive.mp4", tmp_path / "x.mp4", lambda _, frame: frame)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, limits)
        signal.signal(signal.SIGXFSZ, handler)
    assert [path.name for path in tmp_path.iterdir()] == ["drive.mp4"]


def test_pixels_that_a_tiff_marks_as_no_data_are_written_as_ignored(run, tmp_path):
    """With the georeference, whose words are in any encoding; probabilities there are NaN."""
    image = photo(20, 30)
    image[:, :7] = 255
    where = [(33550, "d", 3, (10.0, 20.0, 0.0), True)]
    where += [(33922, "d", 6, (0.0, 0.0, 0.0, 5e5, 5e6, 0.0), True)]
    keys = 1, 1, 0, 3, 1024, 0, 1, 1, 1026, 34737, 12, 0, 3072, 0, 1, 32633
    words = "Gauß-Krüger|".encode("latin-1") + b"\0"
    where += [(34735, "H", len(keys), keys, True), (34737, "s", 0, words, True)]
    save_tiff(tmp_path / "x.tif", image, *where, NO_VALUE_255)
    assert run(tmp_path / "x.tif", probabilities="tif") == 0
    label, expected = read(tmp_path / "out/labels/x.png"), RAW_IDS[image.argmax(2)]
    expected[:, :7] = CLASSES.ignore_ids[0]
    np.testing.assert_array_equal(label, expected)
    with tifffile.TiffFile(tmp_path / "out/labels/x.tif") as written:
        np.testing.assert_array_equal(written.asarray(), label)
        tags = written.pages[0].tags
        assert tags["GDAL_NODATA"].value == str(CLASSES.ignore_ids[0])
    for kind in "labels", "probabilities":
        path = tmp_path / f"out/{kind}/x.tif"
        to_map, crs = place_of(path, read_info(path))
        assert (to_map, crs.to_epsg()) == ((10.0, 0.0, 5e5, 0.0, -20.0, 5e6), 32633)
    with tifffile.TiffFile(path) as written:
        found = written.asarray()
        assert written.pages[0].tags["GDAL_NODATA"].value == "nan"
    assert np.isnan(found[:, :, :7]).all()
    np.testing.assert_allclose(found[:, :, 7:].sum(0), 1, atol=1e-5)


def test_unreadable_images_are_named_at_the_end_and_the_others_done(run, tmp_path):
    folder = tmp_path / "in"
    for i in range(8):
        save(folder / f"good {i}.png", photo(10 + i, 20, seed=i))
    whole = save(folder / "cut.png", photo(40, 50)).read_bytes()
    (folder / "cut.png").write_bytes(whole[: len(whole) // 2])
    (folder / "empty.jpg").touch()
    (folder / "text.tif").write_text("not a picture")
    for name in ("pipe.png", "pipe.bmp"):  # not waited for
        os.mkfifo(folder / name)
    with pytest.raises(DataError, match="5 of 13 files") as refusal:
        run(folder, folder / "pipe.png", folder / "pipe.bmp")
    assert str(refusal.value).count(": cannot be read: not a regular file") == 2
    assert all(name in str(refusal.value) for name in ("cut.png", "empty.jpg", "text.tif"))
    assert names(tmp_path / "out/labels") == [f"good {i}.png" for i in range(8)]


def test_images_that_share_batches_are_predicted_as_alone(run, tmp_path, monkeypatch):
    monkeypatch.setattr(settings, "MAX_WHOLE_PIXELS", 500)  # the second goes by windows
    sizes = [(16, 24), (40, 30), (16, 24), (16, 24), (5, 7), (16, 24), (16, 24)]
    for i, size in enumerate(sizes):
        save(tmp_path / f"in/{i}.png", photo(*size, seed=i))
    (tmp_path / "in/3.png").write_bytes(b"damaged")
    pictures, shapes = [], []
    for batch_size in (1, 3):
        model = Brightness()
        model.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape))
        options = [f"eval.batch_size={batch_size}"]
        with pytest.raises(DataError, match=r"1 of 7 files cannot be read.*3\.png"):
            run(tmp_path / "in", model=model, set=options, overwrite=True)
        written = sorted((tmp_path / "out/labels").iterdir())
        assert len(written) == 6
        pictures.append([read(path).tolist() for path in written])
    assert pictures[0] == pictures[1]
    assert max(shape[0] for shape in shapes) == 2


def test_images_without_finite_scores_are_warned_of(run, tmp_path, capsys):
    class Overflowing(nn.Module):
        def forward(self, images):
            return SegLogits(images / (images.amax((1, 2, 3), keepdim=True) > 200))

    for name, most in (("a", 255), ("b", 100), ("c", 255)):
        save(tmp_path / f"in/{name}.png", np.full((8, 9, 3), most, np.uint8))
    write_video(tmp_path / "in/dark.mp4", [(250, 250, 250), (90, 90, 90)])
    write_video(tmp_path / "in/light.mp4", [(250, 250, 250)])
    run(tmp_path / "in", model=Overflowing())
    assert "warning: the scores of 2 files are not finite" in capsys.readouterr().out


def test_images_with_one_name_get_names_of_their_own(run, tmp_path):
    one = save(tmp_path / "a" / "x.png", photo(8, 9))
    other = save(tmp_path / "b" / "x.png", photo(10, 11, seed=1))
    save(tmp_path / "b" / "X.bmp", photo(12, 13, seed=2))
    (tmp_path / "b" / "equal.png").symlink_to(one)
    assert run(one, tmp_path / "a", tmp_path / "b", other) == 0
    labels = tmp_path / "out/labels"
    sizes = {name: read(labels / name).shape for name in names(labels)}
    expected = {"x.png": (8, 9), "X_bmp.png": (12, 13), "x_png.png": (10, 11)}
    assert sizes == expected | {"equal.png": (8, 9)}


def test_existing_predictions_are_kept_unless_told_otherwise_and_not_predicted(run, tmp_path):
    save(tmp_path / "a.png", photo(8, 9))
    assert run(tmp_path) == 0
    with pytest.raises(ConfigError, match=r"labels/a\.png: exists already; .*--overw"):
        run(tmp_path)
    for name in ("labels/a.tif", "probabilities/a.npz"):  # of an earlier image, say
        path = tmp_path / "out" / name
        path.parent.mkdir(exist_ok=True)
        path.touch()
    assert run(tmp_path, overwrite=True) == 0
    assert [x.name for x in (tmp_path / "out/labels").iterdir()] == ["a.png"]
    assert not path.exists()
    path.touch()
    (tmp_path / "out/labels/a.png").unlink()
    with pytest.raises(ConfigError, match=r"probabilities/a\.npz: exists already"):
        run(tmp_path)
    with pytest.raises(ConfigError, match=r"--set optim\.lr=1: the checkpoint decides this"):
        run(tmp_path, set=["optim.lr=1"], overwrite=True)


def test_nothing_is_written_through_links_or_into_pipes(run, tmp_path):
    path, out = save(tmp_path / "a.png", photo(8, 9)), tmp_path / "out"
    run(path)
    (tmp_path / "important").write_text("precious")
    (out / "overlays" / "a.png").unlink()
    (out / "overlays" / "a.png").symlink_to(tmp_path / "important")
    assert run(path, overwrite=True) == 0
    assert (tmp_path / "important").read_text() == "precious"
    (out / "overlays" / "a.png").unlink()
    os.mkfifo(out / "overlays" / "a.png")
    with pytest.raises(ExecutionError, match=r"overlays/a\.png: .*: is a pipe; remove it"):
        run(path, overwrite=True)


def test_predictions_never_replace_the_labels_of_the_training(run, tmp_path, monkeypatch):
    """The data set lies in x; the prediction for a copy of an image would be a label of it."""
    monkeypatch.chdir(tmp_path)
    for kind in ("images", "labels"):
        save(tmp_path / "x" / kind / "train" / "0.png", photo(9, 9))
    save(tmp_path / "photos" / "train" / "0.png", photo(9, 9))
    before = (tmp_path / "x/labels/train/0.png").read_bytes()
    with pytest.raises(ConfigError, match=r"--output x: would write into x/labels, where images"):
        run("photos", output="x", overwrite=True)
    assert (tmp_path / "x/labels/train/0.png").read_bytes() == before
    assert run("x/images", output="x/predictions") == 0
    save(tmp_path / "out" / "a.png", photo(8, 9))
    with pytest.raises(DataError, match=r"out: no images \(.*\) in it, except in --output"):
        run(tmp_path / "out")


def test_inputs_without_images_are_refused_together(run, tmp_path):
    (tmp_path / "empty").mkdir()
    (tmp_path / "notes.txt").touch()
    with pytest.raises(DataError) as refusal:
        run(tmp_path / "empty", tmp_path / "notes.txt", tmp_path / "nowhere")
    assert "empty: no images" in str(refusal.value)
    assert "notes.txt: expected an image" in str(refusal.value)
    assert "nowhere: no such file or folder" in str(refusal.value)


WINDOWS = ["eval.crop_size=[16, 24]"]


def test_large_images_are_predicted_by_windows(run, tmp_path, monkeypatch, capsys):
    monkeypatch.setattr(settings, "MAX_WHOLE_PIXELS", 30 * 40)
    folder = tmp_path / "in"
    save(folder / "large.png", photo(31, 40))
    save(folder / "small.png", photo(30, 40))
    runs = {}
    for name in ("auto", "slide", "whole"):
        more = [] if name == "auto" else [f"eval.mode={name}"]
        model, output = Brightness(), tmp_path / name
        assert run(folder, model=model, set=WINDOWS + more, output=str(output)) == 0
        labels = [read(output / "labels" / f"{size}.png") for size in ("large", "small")]
        runs[name] = (*labels, model.sizes, capsys.readouterr().out)
    auto, slide, whole = runs["auto"], runs["slide"], runs["whole"]
    assert np.array_equal(auto[0], slide[0])
    assert np.array_equal(auto[1], whole[1])
    assert not np.array_equal(slide[0], whole[0])
    assert not np.array_equal(slide[1], whole[1])
    assert (auto[2], slide[2]) == ({(16, 24), (30, 40)}, {(16, 24)})
    assert whole[2] == {(31, 40), (30, 40)}
    how = "above 0.0 megapixels sliding window 16x24, overlap 0.33"
    assert auto[3].startswith(f"step 3; whole image; scale 1; no flip; {how}; cpu\n")
    said = "1 of them too large to be predicted as a whole: in parts\n"
    assert [said in one[3] for one in (auto, slide, whole)] == [True, False, False]
    assert "megapixels" not in slide[3] + whole[3]


@pytest.mark.parametrize(
    ("size", "options", "crops", "window"),
    [
        # A model trained on crops of 64 px took 6,510 windows for 12 megapixels.
        ((80, 90), [], {"crop": (8, 12)}, (32, 32)),
        ((80, 90), ["eval.mode=slide"], {"crop": (20, 40)}, (20, 40)),
        ((80, 90), ["eval.crop_size=[24, 16]"], {"crop": (8, 12)}, (24, 16)),
        # A border of the mean colour would change what the network sees.
        ((20, 90), [], {"crop": (8, 12)}, (20, 32)),
        # Small once it has the size of the training.
        ((60, 80), ["data.short_side_px=6"], {}, (6, 8)),
    ],
)
def test_windows_of_large_images_are_large_unless_the_user_says_otherwise(
    run, tmp_path, monkeypatch, size, options, crops, window
):
    assert settings.LARGE_WINDOW_PX == 1024
    monkeypatch.setattr(settings, "LARGE_WINDOW_PX", 32)
    monkeypatch.setattr(settings, "MAX_WHOLE_PIXELS", 100)
    model, path = Brightness(), save(tmp_path / "a.png", photo(*size))
    assert run(path, model=model, set=options, **crops) == 0
    assert model.sizes == {window}


@pytest.mark.parametrize("orientation", [1, 6])
def test_a_rotation_in_exif_is_ignored_and_said(run, tmp_path, capsys, orientation):
    exif = Image.Exif()
    exif[0x0112] = orientation
    image = np.repeat(np.repeat(photo(4, 6), 4, axis=0), 4, axis=1)
    for suffix in ("jpg", "png", "webp", "tif", "bmp"):
        lossless = {"lossless": True} if suffix == "webp" else {}
        Image.fromarray(image).save(tmp_path / f"{suffix}.{suffix}", exif=exif, **lossless)
    assert run(*sorted(tmp_path.glob("*.*"))) == 0
    assert read(tmp_path / "out/labels/jpg.png").shape == (16, 24)
    for suffix in ("png", "webp", "tif", "bmp"):
        label = read(tmp_path / "out/labels" / f"{suffix}.png")
        assert np.array_equal(label, RAW_IDS[image.argmax(2)])
    assert ("4 of them ask for a rotation" in capsys.readouterr().out) == (orientation != 1)


def test_an_image_too_large_for_the_device_is_named_with_a_way_out(run, tmp_path):
    class Greedy(nn.Module):
        def forward(self, images):
            return SegLogits(torch.empty(2**60, dtype=torch.uint8))

    path = save(tmp_path / "a.png", photo(8, 9))
    said = r"a\.png: an image of 8x9 px \(whole image\) does not fit .*eval\.mode=slide"
    with pytest.raises(MemoryLimitError, match=said):
        run(path, model=Greedy())


def test_what_is_skipped_in_folders_is_named(run, tmp_path, capsys):
    folder = tmp_path / "photos"
    save(folder / "a.png", photo(8, 9))
    assert run(folder) == 0
    assert "\nskipped" not in capsys.readouterr().out
    for name in ("b.EXR", "sub/c.exr", "notes.txt", "LICENCE", ".DS_Store"):
        (folder / name).parent.mkdir(exist_ok=True)
        (folder / name).touch()
    assert run(folder, overwrite=True) == 0
    said = capsys.readouterr().out
    assert f"\nskipped 4 files: {folder}/LICENCE, {folder}/b.EXR, {folder}/notes.txt, " in said
    assert "; convert .exr to PNG or JPEG\n" in said
    (folder / "a.png").rename(folder / "a.heic")  # as phones write them
    with pytest.raises(DataError, match=r"; convert \.exr, \.heic to PNG or JPEG"):
        run(folder, overwrite=True)


@pytest.mark.parametrize("large", [False, True])
def test_values_of_12_bits_in_files_of_16_are_warned_about(
    run, tmp_path, capsys, monkeypatch, large
):
    if large:  # each is a raster, of which blocks are read
        monkeypatch.setattr("segtrain.data.read.raster._MIN_BYTES", 0)
        monkeypatch.setattr(raster_inputs, "MAX_PHOTO_PIXELS", 50)
    values = np.random.default_rng(0).integers(0, 4096, (8, 9, 3)).astype(np.uint16)
    dark, full = tmp_path / "dark.tif", tmp_path / "full.tif"
    assert cv2.imwrite(str(dark), values)
    assert cv2.imwrite(str(full), values * 16)
    assert run(full) == 0
    assert "warning" not in capsys.readouterr().out
    assert run(full, dark, overwrite=True) == 0
    (line,) = [one for one in capsys.readouterr().out.splitlines() if "warning" in one]
    assert "warning: 1 image of 16 bits uses at most 12 of them" in line
    assert dark.name in line


def test_frames_of_a_video_become_label_maps(run, tmp_path, capsys):
    video = write_video(tmp_path / "in/street/drive.mp4", PALETTE)
    assert run(tmp_path / "in", frames=True) == 0
    folder = tmp_path / "out/labels/street/drive"
    assert "labels/street/drive: label maps of 3 frames of 48x64 px" in capsys.readouterr().out
    found = [read(folder / f"{i:06d}.png") for i in range(3)]
    assert len(list(folder.iterdir())) == 3
    for label, frame in zip(found, video_of(video)[1], strict=True):
        assert np.array_equal(label, RAW_IDS[frame.argmax(2)])
    assert {int(label[24, 32]) for label in found} == set(RAW_IDS)
    assert (tmp_path / "out/videos/street/drive.mp4").exists()

    # A shorter one in its place leaves no frame of the longer one behind.
    write_video(video, PALETTE[:1])
    (folder / "notes.txt").write_text("mine")
    (tmp_path / "out/videos/street/drive.mp4").unlink()
    with pytest.raises(ConfigError, match=r"drive/00000\d\.png and 2 more: exists already"):
        run(tmp_path / "in", frames=True)
    assert run(tmp_path / "in", frames=True, overwrite=True) == 0
    assert sorted(path.name for path in folder.iterdir()) == ["000000.png", "notes.txt"]


def test_frames_never_get_the_place_of_an_image(run, tmp_path):
    with pytest.raises(ConfigError, match="--frames: not for images: "):
        run(save(tmp_path / "a.png", photo(5, 6)), frames=True)
    write_video(tmp_path / "in/drive.mp4", PALETTE)
    save(tmp_path / "in/drive/000001.png", photo(5, 6))
    with pytest.raises(ConfigError, match="drive is a video, and drive/000001 an image"):
        run(tmp_path / "in", frames=True)
    assert run(tmp_path / "in") == 0


def test_label_maps_of_frames_have_a_band_for_each_class_that_overlaps(tmp_path):
    classes = ClassFile("two", CLASSES.classes[:2], (), (0, 0, 0), overlapping=True)
    label = np.random.default_rng(0).integers(0, 2, (5, 6, 2), dtype=np.uint8)
    stored = task_of("multilabel").stored(classes, label)
    write_stored(tmp_path / "labels/drive/000000", stored)
    bands = tifffile.imread(tmp_path / "labels/drive/000000.tif")
    assert np.array_equal(bands, (label * np.array([7, 23], np.uint8)).transpose(2, 0, 1))
