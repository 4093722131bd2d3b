"""Label maps from the logits of a head, beside those of logits at full size."""

from dataclasses import replace
from functools import partial

import pytest
import torch

from segtrain import kernels
from segtrain.config import ModelConfig
from segtrain.inference.class_scores import predict_labels
from segtrain.inference.settings import BatchLimits, InferenceSettings
from segtrain.models import SegModel, build_model
from segtrain.models.enlarged import enlarged
from segtrain.models.resizing import enlarge

SETTINGS = InferenceSettings(mean=(120.0, 110.0, 100.0), std=(60.0, 50.0, 40.0))
K = 5


@pytest.fixture
def launched(monkeypatch):
    """The shapes of the logits that the kernel was called with."""
    from segtrain.kernels import small_logits

    seen, function = [], small_logits.labels_of

    def watched(small, *args):
        seen.append(tuple(small.shape))
        return function(small, *args)

    monkeypatch.setattr(small_logits, "labels_of", watched)
    return seen


@pytest.fixture(scope="module")
def model():
    torch.manual_seed(0)
    options = {"backbone": "resnet18", "num_stages": 2, "output_stride": 8, "head_channels": 8}
    built = build_model(ModelConfig(ppm_channels=4, **options), num_classes=K).eval()
    torch.nn.init.normal_(built.head.classifier.conv.weight)
    return built


def images(*sizes):
    generator = torch.Generator().manual_seed(1)
    return [
        torch.randint(256, (1, 3, *size), generator=generator, dtype=torch.uint8) for size in sizes
    ]


def predicted(model, chosen, settings=SETTINGS, out_sizes=None, probabilities="highest", batch=2):
    sizes = out_sizes or [tuple(image.shape[-2:]) for image in chosen]
    limits = BatchLimits(8, batch)
    return predict_labels(model, chosen, settings, sizes, limits, probabilities=probabilities)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    ("shape", "size", "stride"),
    [((1, 3, 2, 3), (15, 20), 8), ((2, 19, 1, 2), (3, 5), 3), ((1, 150, 1, 1), (4, 4), 4)],
)
def test_the_highest_logit_and_its_probability_are_those_at_full_size(shape, size, stride, dtype):
    generator = torch.Generator().manual_seed(0)
    small = (4 * torch.randn(shape, generator=generator)).to(dtype)
    label, probability = enlarged(small, size, stride, align_corners=False).labels()
    full = enlarge(small.double(), size, stride, align_corners=False)
    wanted = full.softmax(1).max(1)
    # Where two are almost equal, rounding may choose the other.
    chosen = full.softmax(1).gather(1, label.long()[:, None])[:, 0]
    torch.testing.assert_close(chosen, wanted.values, rtol=1e-5, atol=1e-6)
    assert (label != wanted.indices).double().mean() < 0.05
    torch.testing.assert_close(probability.double(), wanted.values, rtol=1e-5, atol=1e-6)


def test_of_equal_logits_the_lowest_class_is_chosen():
    small = torch.zeros(1, 7, 2, 2)
    small[:, 2] = small[:, 5] = 1
    label, _ = enlarged(small, (8, 8), 4, align_corners=False).labels()
    assert set(label.unique().tolist()) == {2}


@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_a_probability_is_not_a_number_where_a_logit_is_not_finite(value):
    small = torch.zeros(2, 3, 2, 2)
    small[1, 1, 0, 0] = value
    _, probability = enlarged(small, (8, 8), 4, align_corners=False).labels()
    assert probability[0].isfinite().all()
    assert probability[1, 0, 0].isnan()
    assert probability[1, 7, 7].isfinite()


@pytest.mark.parametrize("classes", [1, 3, 19])
def test_a_label_is_a_class_even_if_no_logit_is_a_number(classes):
    """The confusion matrix counts it, and a warning tells of such images."""
    small = torch.full((1, classes, 2, 2), torch.nan)
    label, probability = enlarged(small, (8, 8), 4, align_corners=False).labels()
    assert label.max() < classes
    assert probability.isnan().all()


def test_predictions_of_images_are_those_without_kernels(model, launched, monkeypatch):
    chosen = images((21, 30), (16, 24), (21, 30), (21, 30))
    found = predicted(model, chosen)
    # Images of equal sizes share batches of two.
    assert launched == [(2, K, 3, 4), (1, K, 3, 4), (1, K, 2, 3)]
    monkeypatch.setattr(kernels, "interpreted", False)
    for one, other in zip(found, predicted(model, chosen), strict=True):
        torch.testing.assert_close(one.probability, other.probability, rtol=1e-4, atol=1e-6)
        assert one.label.dtype == torch.uint8
        assert (one.label != other.label).double().mean() < 0.02
        assert one.is_finite
        assert other.is_finite
    assert len(launched) == 3


def test_an_image_whose_scores_are_not_finite_is_told(launched):
    spoilt = small_model()
    spoilt.head.classifier.conv.bias.data[0] = torch.nan
    (found,) = predicted(spoilt, images((16, 16)))
    assert not found.is_finite
    assert len(launched) == 1


class Own(SegModel):
    """A user's."""


def small_model(kind=SegModel, **options):
    sizes = {"num_stages": 2, "output_stride": 8, "head_channels": 8, "ppm_channels": 4}
    config = ModelConfig(backbone="resnet18", **sizes, **options)
    built = build_model(config, num_classes=2).eval()
    built.__class__ = kind
    return built


def hooked():
    built = small_model()
    built.register_forward_hook(lambda *_: None)
    return built


@pytest.mark.parametrize(
    ("make", "options"),
    [
        (small_model, {"settings": replace(SETTINGS, flip=True)}),
        (small_model, {"settings": replace(SETTINGS, mode="slide", crop_size=(16, 16))}),
        (small_model, {"settings": replace(SETTINGS, scales=(2.0,))}),
        (small_model, {"out_sizes": [(8, 12)]}),
        (small_model, {"probabilities": "all"}),
        (hooked, {}),
        (partial(small_model, Own), {}),
        (partial(small_model, align_corners=True), {}),
    ],
    ids=["flip", "slide", "scale", "other size", "all classes", "hook", "subclass", "aligned"],
)
def test_what_needs_logits_at_full_size_gets_them(launched, make, options):
    (found,) = predicted(make(), images((16, 24)), **options)
    assert found.is_finite
    assert launched == []
