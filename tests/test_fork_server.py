"""What loader workers get that a fork server starts: all of it, or a refusal in words."""

import threading

import numpy as np
import pytest
import torch
from experiments import write_config
from folders import save, scene

from segtrain import plugins
from segtrain.cli import main as segtrain
from segtrain.config import AugmentConfig, DataConfig
from segtrain.data import open_dataset
from segtrain.data.sample.centroids import Centroids
from segtrain.data.sample.loader import TrainLoader
from segtrain.data.sample.stream import ClassUniform, TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.errors import ConfigError, ExecutionError

LAYOUTS = {
    "cityscapes": (
        "leftImg8bit/train/u/{}_leftImg8bit.png",
        "gtFine/train/u/{}_gtFine_labelIds.png",
    ),
    "camvid": ("train/{}.png", "trainannot/{}.png"),
    "voc": ("JPEGImages/{}.jpg", "SegmentationClass/{}.png"),
    "ade20k": ("images/training/{}.jpg", "annotations/training/{}.png"),
    "folders": ("images/train/{}.tif", "labels/train/{}.png"),
    "list": ("i/{}.png", "l/{}.png"),
}
GRAIN = """
import albumentations, numpy as np
from segtrain.plugins import transform

@transform("Grain")
class Grain(albumentations.ImageOnlyTransform):
    def apply(self, img, **_):
        return np.clip(img + self.random_generator.normal(0, 9, img.shape), 0, 255).astype(np.uint8)
"""
ONE_RANK = {
    "indices": [range(5)],
    "start_step": 0,
    "steps": 3,
    "pin_memory": False,
    "timeout_s": 99,
}
EXTRA = ({"name": "Grain", "args": {"p": 1.0}}, {"name": "GaussNoise", "args": {"p": 1.0}})


def augment(extra):
    return AugmentConfig(
        crop_size=(33, 41), rotate_deg=10.0, blur_prob=0.5, color_prob=0.5, extra=extra
    )


def stream(data, extra=()):
    dataset = open_dataset(data, data.train_split)
    centroids = [(k, i, 20 * i, 5) for k in range(4) for i in range(3)]
    return TrainStream(
        dataset,
        TrainTransform(augment(extra), form=dataset.form),
        stream_seed=3,
        batch_size=5,
        class_uniform=ClassUniform(Centroids(np.array(centroids, np.int32)), fraction=0.5),
        class_mix_prob=0.5,
        hashes=True,
    )


def batches(source, **options):
    return list(TrainLoader(source, **ONE_RANK, **options))


def is_equal(one, other):
    """Whether two batches are the same, but for the time that they took."""
    same = all(map(torch.equal, one.images, other.images)) and torch.equal(one.labels, other.labels)
    # The sum has the pixels, and what they are of.
    facts = [(b.names, b.pixels, b.images.dtype) for b in (one, other)]
    return same and facts[0] == facts[1]


def write(root, layout):
    images, labels = LAYOUTS[layout]
    for i in range(3):
        pixels, classes = scene(i)
        save(root / images.format(i), pixels)
        save(root / labels.format(i), classes)
    for name in ("train.txt", "ImageSets/Segmentation/train.txt"):
        (root / name).parent.mkdir(parents=True, exist_ok=True)
    (root / "ImageSets/Segmentation/train.txt").write_text("0\n1\n2\n")
    (root / "train.txt").write_text("".join(f"i/{i}.png l/{i}.png\n" for i in range(3)))
    (root / "classes.yaml").write_text("classes: [ground, plant, water, sand]\n")
    split = "train.txt" if layout == "list" else "train"
    return DataConfig(
        layout=layout,
        root=str(root),
        classes=str(root / "classes.yaml"),
        train_split=split,
        eval_split=split,
    )


def differences(root):
    """The sets of which workers make other batches than the rank itself."""
    (root / "grain.py").write_text(GRAIN)
    plugins.load(str(root / "grain.py"))
    sets = {layout: write(root / layout, layout) for layout in LAYOUTS}
    config = write_config(root / "c.yaml", {"data": sets["folders"].model_dump(mode="json")})
    assert segtrain(["data", "pack", str(config), "--output", str(root / "pack")]) == 0
    packed = sets["folders"].model_copy(update={"pack": str(root / "pack")})
    found = []
    for name, data in {**sets, "pack": packed}.items():
        source = stream(data, EXTRA)
        expected = batches(source, num_workers=0)
        assert len(expected) == 3
        assert expected[0].images.float().std() > 10
        for way in (None, "forkserver"):
            made = batches(source, num_workers=1, start_method=way)
            if not all(map(is_equal, made, expected)):
                found.append((name, way))
    return found


def test_workers_of_a_fork_server_make_the_batches_of_forks_and_of_no_workers(run_ranks, tmp_path):
    """Bit for bit, for each layout and a pack, with a plug-in of a file and albumentations' own."""
    assert run_ranks(1, differences, tmp_path)[0] == []


def changed_meanwhile(root):
    """What a loader says whose plug-in is another one when its workers start."""
    file = root / "grain.py"
    file.write_text(GRAIN)
    plugins.load(str(file))
    source = stream(write(root, "camvid"), EXTRA[:1])
    made = TrainLoader(source, **ONE_RANK, num_workers=1, start_method="forkserver")
    file.write_text(GRAIN.replace("0, 9", "0, 8"))
    try:
        return next(made)
    except ConfigError as error:
        return str(error)


def test_a_worker_refuses_a_plugin_that_changed_after_the_rank_has_imported_it(run_ranks, tmp_path):
    """Else its images would be others than those that the config and the checkpoint tell of."""
    (said,) = run_ranks(1, changed_meanwhile, tmp_path)
    assert said.startswith(f"plugins: the code of transform Grain of {tmp_path}/grain.py: SHA-256 ")
    assert said.endswith("it changed during the training: start again")


def test_a_transform_that_cannot_be_copied_is_refused_in_words(tmp_path):
    source = stream(write(tmp_path, "camvid"))
    source.transform.lock = threading.Lock()
    with pytest.raises(ConfigError, match=r"augment\.extra: .* cannot pickle .*num_workers: 0"):
        batches(source, num_workers=1, start_method="forkserver")


@pytest.mark.parametrize("start_method", [None, "forkserver"])
def test_a_folder_of_temporary_files_with_a_long_path_is_told_before_workers_start(
    tmp_path, monkeypatch, start_method
):
    """They hand over each batch through a socket there, whose path the system limits."""
    folder = tmp_path / ("x" * 100)
    folder.mkdir()
    monkeypatch.setattr("multiprocessing.util.get_temp_dir", lambda: str(folder))
    source = stream(write(tmp_path, "camvid"))
    with pytest.raises(ExecutionError, match="path too long; set TMPDIR to a short path"):
        batches(source, num_workers=1, start_method=start_method)
