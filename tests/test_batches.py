"""Batches change neither results nor what fits into memory."""

from dataclasses import replace
from pathlib import Path

import pytest
import torch
from memory import LiveBytes
from test_inference import WAYS, TinyModel, settings

from segtrain.config import load_config
from segtrain.inference import settings as evaluation_settings
from segtrain.inference import windows
from segtrain.inference.class_scores import predict_label, predict_labels
from segtrain.inference.settings import BatchLimits, batch_limits, fitting_pixels
from segtrain.inference.windows import num_windows
from segtrain.models import build_model
from segtrain.score.scoring import group_size
from segtrain.types import SegLogits

CONFIGS = Path(__file__).resolve().parent.parent / "configs"
CLASSES = 5
CPU, CUDA = torch.device("cpu"), torch.device("cuda")


class Recording(TinyModel):
    """The one with a kernel of 3x3."""

    def __init__(self):
        super().__init__(3)

    @property
    def shapes(self):
        return [tuple(images.shape) for images in self.inputs]


def images(sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(0, 256, (1, 3, *size), generator=generator, dtype=torch.uint8)
        for size in sizes
    ]


SIZES = [(21, 34), (9, 13), (21, 34), (5, 34), (34, 21), (3, 4), (21, 34)]
OUT_SIZES = [(21, 34), (9, 13), (10, 17), (5, 34), (34, 21), (6, 8), (21, 34)]


@pytest.mark.parametrize("way", WAYS)
def test_a_group_is_predicted_as_its_images_are_alone(way):
    model, how = Recording(), settings(**way)
    group = images(SIZES)
    alone = [
        predict_label(model, image, how, size) for image, size in zip(group, OUT_SIZES, strict=True)
    ]
    for limit in (2, 100):
        found = predict_labels(model, group, how, OUT_SIZES, BatchLimits(limit, limit))
        for one, expected in zip(found, alone, strict=True):
            assert torch.equal(one.label, expected)
            assert one.is_finite


@pytest.mark.parametrize("scales", [(1.0,), (0.5, 1.75)])
def test_windows_of_a_view_fill_batches(scales):
    model, how = Recording(), settings(mode="slide", scales=scales, flip=True)
    done, group = [], images(SIZES)
    predict_labels(model, group, how, OUT_SIZES, BatchLimits(4, 4), on_windows=done.append)
    sizes = [shape[0] for shape in model.shapes[::2]]
    assert sizes == [shape[0] for shape in model.shapes[1::2]] == done  # each and its mirror image
    views = [num_windows(size, replace(how, scales=(s,))) for size in SIZES for s in scales]
    assert sizes == [n for views in views for n in [4] * (views // 4) + [views % 4] if n]
    assert {shape[1:] for shape in model.shapes} == {(3, 8, 12)}


def test_a_batch_holds_no_more_pixels_than_the_limit():
    """Images of one size share a batch, wherever they are."""
    model = Recording()
    predict_labels(model, images(SIZES), settings(), OUT_SIZES, BatchLimits(2, 2))
    counts = [(shape[0], *shape[2:]) for shape in model.shapes]
    assert counts == [(2, 21, 34), (1, 21, 34), *((1, *SIZES[i]) for i in (1, 3, 4, 5))]
    model = Recording()
    limits = BatchLimits(8, 8, 2.5 * 21 * 34)
    predict_labels(model, images(SIZES), settings(), OUT_SIZES, limits)
    assert max(n for n, _, height, width in model.shapes if (height, width) == (21, 34)) == 2
    scaled = Recording()
    predict_labels(scaled, images(SIZES), settings(scales=(0.5, 2.0)), OUT_SIZES, limits)
    assert all(shape[0] == 1 for shape in scaled.shapes if shape[2:] == (42, 68))
    assert limits.of((1000, 1000)) == 1  # one always goes


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_an_image_without_finite_scores_is_marked(mode, monkeypatch):
    """Of one pixel, in one of many tiles."""

    class Broken(Recording):
        def forward(self, images):
            logits = super().forward(images).out
            logits[images.amax((1, 2, 3)) > 2, :, -1, 0] = torch.nan
            return SegLogits(logits)

    monkeypatch.setattr(windows, "TILE_ELEMENTS", CLASSES * 34)
    group = [image.clamp(max=100 if i != 1 else 255) for i, image in enumerate(images(SIZES))]
    found = predict_labels(Broken(), group, settings(mode=mode), OUT_SIZES, BatchLimits(3, 3))
    assert [bool(one.is_finite) for one in found] == [i != 1 for i in range(len(SIZES))]


def test_a_cpu_takes_small_windows_of_one_image_and_a_device_what_its_memory_holds(monkeypatch):
    monkeypatch.setattr(evaluation_settings, "memory_bytes", lambda device: 80 * 10**9)
    assert batch_limits(settings(), CPU, 19).num_images == 1
    assert batch_limits(settings(), CPU, 19).of((96, 128)) == 4
    assert batch_limits(settings(), CPU, 19).of((512, 1024)) == 1
    assert batch_limits(settings(), CUDA, 19).num_images == 8
    assert batch_limits(settings(batch_size=3), CUDA, 19).of((10_000, 10_000)) == 3
    assert batch_limits(settings(), CUDA, 19).of((713, 713)) == 8
    assert 1 < batch_limits(settings(), CUDA, 150).of((1024, 2048)) < 5
    monkeypatch.setattr(evaluation_settings, "memory_bytes", lambda device: 8 * 10**9)
    assert batch_limits(settings(), CUDA, 19).of((713, 713)) == 2
    # Beside the process, and five copies of 400 MB of weights.
    model = torch.nn.Linear(10**4, 10**4, bias=False, device="meta")
    left = 8 * 10**9 - 0.75 * 2**30 - 5 * 4 * 10**8
    assert fitting_pixels(model, CUDA, 19, ranks=1) == left / (1536 + 16 * 19)
    # Of few images the ranks share fewer at a time, unless the user says so.
    sizes = [group_size(n, settings(), BatchLimits(8, 8)) for n in (10, 64, 320)]
    assert [*sizes, group_size(10, settings(batch_size=3), BatchLimits(8, 8))] == [1, 2, 8, 3]


@pytest.mark.parametrize(
    ("recipe", "num_classes"),
    [("cityscapes_deeplabv3plus_mobilenet_v2", 19), ("camvid_deeplabv3plus_r18", 150)],
)
def test_a_pixel_takes_no_more_memory_than_is_reckoned_with(recipe, num_classes):
    """A kernel's workspace comes on top, as do weights.

    The peak of the first is in its features, that of the second in its classes.
    """
    config, size = load_config(CONFIGS / f"{recipe}.yaml"), (128, 128)
    model = config.model.model_copy(update={"pretrained": None})
    model = build_model(model, num_classes=num_classes).eval()
    group, how = (
        [torch.zeros(1, 3, *size, dtype=torch.uint8)] * 2,
        settings(mode="whole", flip=True),
    )
    with LiveBytes([]) as memory:
        predict_labels(model, group, how, [size] * 2, BatchLimits(2, 2))
    a_pixel = memory.peak / (2 * size[0] * size[1])
    most = evaluation_settings._FEATURES + evaluation_settings._CLASS * num_classes
    assert most / 2 < a_pixel < most
