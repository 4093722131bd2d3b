import pytest
import torch
from torch import nn
from torch.nn import functional

from segtrain.config import AugmentConfig, Config, DataConfig, EvalConfig, TrainConfig
from segtrain.inference import windows
from segtrain.inference.class_scores import predict_label, score_tiles
from segtrain.inference.forward import Forward
from segtrain.inference.settings import BatchLimits, InferenceSettings, SettingsBySize
from segtrain.inference.windows import slide, window_starts
from segtrain.models.blocks import normalize
from segtrain.types import SegLogits

MEAN, STD = (120.0, 110.0, 100.0), (60.0, 50.0, 40.0)
CLASSES = 5


class TinyModel(nn.Module):
    """One convolution, in float64; remembers what it was given."""

    def __init__(self, kernel: int) -> None:
        super().__init__()
        torch.manual_seed(kernel)
        self.conv = nn.Conv2d(3, CLASSES, kernel, padding=kernel // 2)
        self.double().eval()
        self.inputs: list[torch.Tensor] = []

    def forward(self, images):
        self.inputs.append(images)
        return SegLogits(self.conv(images))


@pytest.fixture
def pixelwise():
    return TinyModel(1)


@pytest.fixture
def local():
    return TinyModel(3)


def settings(**changes):
    return InferenceSettings(**{"mean": MEAN, "std": STD, "crop_size": (8, 12), **changes})


def image(height=21, width=34, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return torch.randint(0, 256, (1, 3, height, width), generator=generator, dtype=torch.uint8)


@torch.no_grad()
def predict_probabilities(model, picture, how, out_size):
    """(1, K, h, w), from the tiles of which `predict_label` takes the argmax."""
    limits = BatchLimits(1, how.batch_size or 1)
    ((_, tiles),) = score_tiles(Forward(model), [picture], how, [out_size], limits)
    parts = [tile for _, tile in tiles]
    assert max(map(torch.numel, parts)) <= windows.TILE_ELEMENTS
    scores = torch.cat(parts, 1).unsqueeze(0)
    if how.mode == "whole" and how.num_views == 1:
        return scores.softmax(1)  # of logits
    assert_close(scores.sum(1), torch.ones_like(scores[:, 0]), atol=1e-6)
    return scores


def assert_close(actual, expected, atol=1e-12):
    torch.testing.assert_close(actual, expected, rtol=0, atol=atol)


def view_of(picture):
    return normalize(picture, MEAN, STD, dtype=torch.float64)


SCALES = (0.5, 1.0, 1.75)
WAYS = [  # every pair of mode, flip and scales
    {"mode": "whole", "flip": False, "scales": (1.0,)},
    {"mode": "whole", "flip": True, "scales": SCALES},
    {"mode": "slide", "flip": False, "scales": SCALES},
    {"mode": "slide", "flip": True, "scales": (1.0,)},
]


@pytest.mark.parametrize("align_corners", [False, True])
def test_whole_image_is_softmax_of_the_resized_logits(local, align_corners):
    for size in ((21, 34), (40, 34), (21, 70), (47, 61), (9, 13), (1, 1)):
        how = {"mode": "bilinear", "align_corners": align_corners}
        logits = functional.interpolate(local(view_of(image())).out, size, **how)
        found = settings(align_corners=align_corners)
        found = predict_probabilities(local, image(), settings(align_corners=align_corners), size)
        assert_close(found, logits.softmax(1))


@pytest.mark.parametrize("way", WAYS)
def test_result_does_not_depend_on_the_size_of_tiles(local, way, monkeypatch):
    whole = predict_probabilities(local, image(), settings(**way), (47, 61))
    monkeypatch.setattr(windows, "TILE_ELEMENTS", 3 * CLASSES * 61)
    assert_close(predict_probabilities(local, image(), settings(**way), (47, 61)), whole)


@pytest.mark.parametrize("size", [(21, 34), (8, 12), (5, 34), (21, 7), (3, 4)])
def test_windows_of_a_pixelwise_model_equal_the_whole_image(pixelwise, size):
    picture = image(*size)
    whole = predict_probabilities(pixelwise, picture, settings(), size)
    assert_close(predict_probabilities(pixelwise, picture, settings(mode="slide"), size), whole)


def sums_in_one_map(model, view, how):
    """The plain way: all windows added into a map of the whole view, in float32."""
    (height, width), (crop_h, crop_w) = view.shape[-2:], how.crop_size
    tops, lefts = (window_starts(n, c, how.overlap) for n, c in ((height, crop_h), (width, crop_w)))
    places = [(t, x) for t in tops for x in lefts]
    total = torch.zeros(CLASSES, height, width)
    rows, columns = torch.zeros(height), torch.zeros(width)
    for i in range(0, len(places), how.batch_size):
        some = places[i : i + how.batch_size]
        windows = torch.cat([view[:, :, t : t + crop_h, x : x + crop_w] for t, x in some])
        means = model(windows).out.softmax(1)
        if how.flip:
            means = (means + model(windows.flip(3)).out.softmax(1).flip(3)) / 2
        for (t, x), probs in zip(some, means, strict=True):
            total[:, t : t + crop_h, x : x + crop_w] += probs
    for times, starts, crop in ((rows, tops, crop_h), (columns, lefts, crop_w)):
        for start in starts:
            times[start : start + crop] += 1
    return total / rows.view(-1, 1) / columns


@pytest.mark.parametrize("flip", [False, True])
@pytest.mark.parametrize("overlap", [0.0, 1 / 3, 0.8])
@pytest.mark.parametrize("size", [(21, 34), (45, 13), (8, 40)])
def test_rows_that_are_given_early_are_those_of_one_large_map(local, size, overlap, flip):
    """Bit for bit: the windows are added in the same order."""
    local.float()
    how = settings(mode="slide", overlap=overlap, batch_size=3, flip=flip)
    view = normalize(image(*size), MEAN, STD)
    with torch.no_grad():
        expected = sums_in_one_map(local, view, how)
        strips = list(slide(lambda x: local(x).out, view, how, how.batch_size, lambda _: None))
    assert torch.equal(torch.cat([tile for _, tile in strips], 1), expected)
    assert [rows.start for rows, _ in strips] == window_starts(size[0], 8, overlap)
    assert all(tile.shape[1] == rows.stop - rows.start <= 8 for rows, tile in strips)
    label = predict_label(local, image(*size), how, size)
    assert torch.equal(label, expected.argmax(0).to(torch.uint8))


def test_image_smaller_than_the_window_is_padded_with_the_mean_colour(local):
    predict_label(local, image(5, 7), settings(mode="slide"), (5, 7))
    (window,) = local.inputs
    assert window.shape == (1, 3, 8, 12)
    inner = view_of(image(5, 7))
    assert torch.equal(window[:, :, 1:6, 2:9], inner)
    assert window.count_nonzero() == inner.count_nonzero()


@pytest.mark.parametrize(
    ("length", "window", "overlap", "starts"),
    [
        (5, 8, 0.5, [0]),
        # As semseg has them.
        (2048, 713, 1 / 3, [0, 476, 952, 1335]),
        (1024, 713, 1 / 3, [0, 311]),
        # Rounding does not raise the stride: 10 * (1 - 0.7) is a little more than 3.
        (1500, 769, 1 / 3, [0, 513, 731]),
        (1500, 768, 1 / 3, [0, 512, 732]),
        (16, 10, 0.7, [0, 3, 6]),
    ],
)
def test_windows_stand_where_they_should(length, window, overlap, starts):
    assert window_starts(length, window, overlap) == starts


def test_flip_makes_the_mirrored_image_give_the_mirrored_result(local):
    how = settings(flip=True)
    result = predict_probabilities(local, image(), how, (21, 34))
    mirrored = predict_probabilities(local, image().flip(3), how, (21, 34))
    assert_close(mirrored.flip(3), result)
    plain = predict_probabilities(local, image(), settings(), (21, 34))
    assert (plain - result).abs().max() > 0.01


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_scales_are_averaged_with_equal_weight(local, mode):
    def probabilities(*scales):
        how = settings(mode=mode, flip=True, scales=scales)
        return predict_probabilities(local, image(), how, (25, 40))

    scales = 0.5, 1.0, 1.3
    assert_close(probabilities(*scales), torch.stack([*map(probabilities, scales)]).mean(0))


def test_views_are_resized_from_the_stored_image_once(local):
    predict_label(local, image(), settings(short_side_px=42, scales=(0.75,)), (21, 34))
    expected = functional.interpolate(view_of(image()), (32, 51), mode="bilinear")
    assert_close(local.inputs[0], expected)


@pytest.mark.parametrize("mode", ["whole", "slide"])
def test_autocast_computes_in_low_and_averages_in_full_precision(local, mode):
    seen = []
    local.float().conv.register_forward_hook(lambda _, __, out: seen.append(out.dtype))
    how = settings(mode=mode, flip=True, autocast=torch.bfloat16)
    actual = predict_probabilities(local, image(), how, (21, 34))
    assert set(seen) == {torch.bfloat16}
    assert actual.dtype == torch.float32
    full = predict_probabilities(local, image(), settings(mode=mode, flip=True), (21, 34))
    assert_close(actual, full, atol=0.02)


def config(**sections):
    data = DataConfig(layout="camvid", root="x", classes="camvid", short_side_px=360)
    return Config(data=data, augment=AugmentConfig(crop_size=(224, 288)), **sections)


@pytest.mark.parametrize("shape", [(3, 8, 9), (2, 3, 8, 9), (1, 4, 8, 9)])
def test_an_image_of_another_form_is_refused(local, shape):
    with pytest.raises(ValueError, match=r"image: expected \(1, 3, H, W\), got \("):
        predict_label(local, torch.zeros(shape, dtype=torch.uint8), settings(), (8, 9))


def test_settings_follow_the_config():
    windows = EvalConfig(mode="slide", scales=(0.5, 1.0), flip=True)
    low = TrainConfig(precision="bfloat16")
    how = InferenceSettings.from_config(config(eval=windows, train=low))
    assert (how.mode, how.scales, how.flip, how.short_side_px) == ("slide", (0.5, 1.0), True, 360)
    assert "with flip; bfloat16" in how.describe()
    assert how.autocast == torch.bfloat16
    assert how.mean == (123.675, 116.28, 103.53)
    assert InferenceSettings.from_config(config()).autocast is None
    # The window is the training crop unless the config says otherwise.
    assert how.crop_size == (224, 288)
    own = config(eval=EvalConfig(crop_size=(96, 128)))
    assert InferenceSettings.from_config(own).crop_size == (96, 128)


def test_images_go_by_windows_where_their_largest_view_does_not_fit():
    usual = settings(scales=(0.5, 2.0))
    by_size = SettingsBySize.that_fit(usual, 40 * 60)
    assert by_size.of((20, 30)) == usual
    assert by_size.of((20, 31)).mode == "slide"
    assert "above 2.0 megapixels" in SettingsBySize.that_fit(usual, 8e6).describe()
    # Large windows as well only where they fit.
    sizes = [SettingsBySize.that_fit(usual, 2**20 - n).large.crop_size for n in (0, 1)]
    assert sizes == [(1024, 1024), (8, 12)]
