"""An evaluation on a CUDA device that does not exist: the host must not wait inside the loop.

As in the other tests on a fake device: tensors without values, and a watch that refuses every
operation for which the host would wait. Streams, events and pinned memory are stubs.
"""

from contextlib import nullcontext
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import pytest
import torch
from fake_device import NoWaits
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode

from segtrain.checkpoint.ready import ReadyModel
from segtrain.data.read.classes import ClassFile, SegClass
from segtrain.data.read.image import RGB
from segtrain.data.read.image_formats import Info
from segtrain.data.read.photos import Photo, PhotoFile
from segtrain.inference import settings as evaluation_settings
from segtrain.inference.predictor import Predictor, for_scores
from segtrain.inference.settings import InferenceSettings, SettingsBySize
from segtrain.metrics import ConfusionMatrix
from segtrain.predict import photo_inputs
from segtrain.run.pictures import Tint
from segtrain.score import scoring
from segtrain.score.scoring import evaluate_dataset
from segtrain.types import SegLogits

K = 5
CUDA = torch.device("cuda", 0)
SETTINGS = InferenceSettings(
    mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0), crop_size=(48, 64), batch_size=2
)
SIZES = [(60, 90), (60, 90), (40, 70), (60, 90), (90, 60)]  # the third is less than a window


class Images:
    def __len__(self):
        return len(SIZES)

    def __getitem__(self, index):
        size = SIZES[index]
        return np.zeros((*size, 3), np.uint8), np.zeros(size, np.uint8)


class Mark:
    """An event; `asked` counts how much work the device had when each was waited for."""

    def __init__(self):
        self.work = None

    def record(self, _):
        self.work = Mark.forwards

    def query(self):
        Mark.waits.append((self.work, Mark.forwards))
        return True


@pytest.fixture
def device(monkeypatch):
    """Yields what watches the operations on the fake device."""
    Mark.forwards, Mark.waits = 0, []
    stream = SimpleNamespace(wait_stream=lambda _: None)
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    monkeypatch.setattr(torch.cuda, "Event", Mark)
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda _: stream)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "pin_memory", lambda tensor: tensor)
    monkeypatch.setattr(evaluation_settings, "memory_bytes", lambda _: 80 * 10**9)
    # What follows the loop: the host reads the result.
    monkeypatch.setattr(ConfusionMatrix, "sum_over_ranks", lambda _: None)
    monkeypatch.setattr(scoring, "_warn_of_infinite", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "numpy", lambda x: np.zeros(tuple(x.shape), np.uint8))
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield NoWaits()


class OneLayer(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, K, 3, padding=1)

    def forward(self, images):
        return SegLogits(self.conv(images))


def model_of():
    with torch.device("cuda"):
        model = OneLayer()

    def count(*_):
        Mark.forwards += 1

    model.register_forward_hook(count)
    return model


def evaluate(model, watch, settings, **options):
    with watch:
        return evaluate_dataset(for_scores(model, settings, CUDA, K), Images(), **options).matrix


WAYS = [
    {"mode": mode, "flip": (mode == "slide") != (len(scales) == 2), "scales": scales}
    for mode in ("whole", "slide")
    for scales in ((1.0,), (0.5, 1.75))
]
WAYS += [{"autocast": dtype} for dtype in (torch.float16, torch.bfloat16)]


@pytest.mark.parametrize("way", WAYS, ids=lambda way: "-".join(map(str, way.values())))
def test_no_way_to_predict_makes_the_host_wait(device, way):
    matrix = evaluate(model_of(), device, replace(SETTINGS, **way))
    assert matrix.counts.device.type == "cuda"
    assert "bincount" not in device.seen
    assert "scatter_add_" in device.seen


def test_predictions_for_callbacks_come_without_a_wait_while_the_next_are_computed(device):
    seen = []
    evaluate(model_of(), device, replace(SETTINGS, mode="slide"), callbacks=[seen.append])
    assert [prediction.index for prediction in seen] == list(range(len(SIZES)))
    assert [prediction.pred.shape for prediction in seen] == SIZES
    # Three groups; when the host waits for one, the forward passes of the next are asked for too.
    assert len(Mark.waits) == 3
    assert all(asked > awaited for awaited, asked in Mark.waits[:-1])


def test_predict_makes_no_wait_and_computes_while_it_writes(device, monkeypatch):
    written = []
    monkeypatch.setattr(photo_inputs.pictures, "write_legend", lambda *_: None)
    monkeypatch.setattr(
        photo_inputs.pictures, "write_prediction", lambda _, name, *__: written.append(name)
    )

    def read_info(path):
        return Info(SIZES[int(path.name)], 3, RGB.dtype)

    def read_photo(path, form):
        info = read_info(path)
        return Photo(np.zeros((*info.size, 3), np.uint8), form, info)

    monkeypatch.setattr(photo_inputs, "read_photo", read_photo)
    monkeypatch.setattr(photo_inputs, "read_info", read_info)
    sources = [PhotoFile(Path(str(i)), str(i)) for i in range(len(SIZES))]
    by_size, classes = (
        SettingsBySize(SETTINGS, SETTINGS),
        ClassFile(
            "some", tuple(SegClass(f"{i}", (i, i, i), (i,)) for i in range(K)), (), (9, 9, 9)
        ),
    )
    with device:
        loaded = SimpleNamespace(classes=classes)
        predictor = Predictor(model_of(), by_size, CUDA, K)
        ready = ReadyModel(predictor, loaded, SimpleNamespace(task="semantic"), RGB)
        photo_inputs.predict_images(ready, sources, Path("nowhere"), Tint([]))
    assert sorted(written) == ["0", "1", "2", "3", "4"]
    assert len(Mark.waits) == 3
    assert all(asked > awaited for awaited, asked in Mark.waits[:-1])


@pytest.mark.parametrize(("memory_bytes", "most"), [(10**6, 1), (80 * 10**9, 4)])
def test_batches_are_as_large_as_the_memory_of_the_device_lets_them(
    device, monkeypatch, memory_bytes, most
):
    monkeypatch.setattr(evaluation_settings, "memory_bytes", lambda _: memory_bytes)
    shapes, model = [], model_of()
    model.register_forward_hook(lambda _, inputs, __: shapes.append(inputs[0].shape[0]))
    evaluate(model, device, replace(SETTINGS, mode="slide", batch_size=None))
    assert max(shapes) == most  # few images are not divided into groups: windows of one image


def test_the_watch_sees_a_matrix_that_reads_its_counts(device):
    matrix = ConfusionMatrix(K, CUDA)
    with pytest.raises(AssertionError, match="the host waits"), device:
        matrix.scores()
