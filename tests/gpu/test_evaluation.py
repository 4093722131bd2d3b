"""eval, predict and export of one model on the device, beside the CPU's."""

import json

import cv2
import numpy as np
import pytest
from commands import DEMO, draw_scenes, segtrain, settings

from segtrain.run.pictures import LABELS

pytestmark = pytest.mark.gpu(limit_s=180)

# Of the pixels: where two classes are almost equally likely, rounding decides.
MOST_MOVED = 1e-4


@pytest.fixture(scope="module")
def scenes(device, tmp_path_factory):
    """A data set, and a run that has trained on it a little."""
    folder, is_cuda = tmp_path_factory.mktemp("evaluation"), device.type == "cuda"
    size = (256, 512) if is_cuda else (64, 128)
    data = draw_scenes(folder / "scenes", 16, 8 if is_cuda else 2, size)
    options = settings(
        data__root=data,
        augment__crop_size=size,
        train__steps=60 if is_cuda else 2,
        train__precision="float32",  # as the CPU computes
        schedule__warmup_steps=1,
    )
    where = ["--device", device.type, "--nproc", 1, "--output", folder / "run"]
    segtrain("train", DEMO, *where, *options)
    return data, folder / "run"


def test_eval_and_predict_say_what_they_say_on_a_cpu(device, figures, scenes, tmp_path):
    data, run = scenes
    matrices, maps = [], []
    for number, where in enumerate(("cpu", device.type)):
        file, folder = tmp_path / f"{number}.json", tmp_path / str(number)
        segtrain("eval", run, "--device", where, "--nproc", 1, "--json", file)
        photos = data / "leftImg8bit/val"
        segtrain("predict", run, photos, "--device", where, "--output", folder)
        matrices.append(np.array(json.loads(file.read_text())["confusion_matrix"]))
        files = sorted((folder / LABELS).rglob("*.png"), key=lambda path: path.name)
        maps.append([cv2.imread(str(path), cv2.IMREAD_UNCHANGED) for path in files])
    one, other = maps
    assert len(one) == len(other) > 0
    figures["eval: part of the pixels that are counted elsewhere"] = float(
        abs(matrices[0] - matrices[1]).sum() / 2 / matrices[0].sum()
    )
    moved = sum(int((a != b).sum()) for a, b in zip(one, other, strict=True))
    figures["predict: part of the pixels of another class"] = moved / sum(a.size for a in one)
    assert max(figures.values()) <= MOST_MOVED


@pytest.mark.parametrize(
    ("name", "packages"),
    [("safetensors", ()), ("pt2", ()), ("onnx", ("onnx", "onnxscript", "onnxruntime"))],
)
def test_a_model_trained_there_is_exported(scenes, tmp_path, name, packages):
    """The command itself runs the file and compares it with the model."""
    for package in packages:
        pytest.importorskip(package)
    file = tmp_path / f"model.{name}"
    segtrain("export", scenes[1], "--format", name, "--output", file)
    assert file.stat().st_size > 0
