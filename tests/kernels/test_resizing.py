import pytest
import torch
import torch.nn.functional as F
from torch import nn

from segtrain import kernels
from segtrain.config import ModelConfig
from segtrain.models.pspnet import PyramidPooling
from segtrain.models.resizing import resize

SLOW = pytest.mark.slow("kernels", "models")
# Height and width in, height and width out: up, down, both, odd and even, by one, from and to one.
SIZES = [
    ((3, 4), (17, 25)),
    ((7, 9), (3, 4)),
    ((5, 3), (3, 5)),
    ((4, 4), (4, 5)),
    ((1, 3), (6, 1)),
    ((1, 1), (7, 5)),
    ((2, 3), (2, 3)),
    ((3, 3), (22, 23)),
]
# The interpreter cuts the last bits of bfloat16 off instead of rounding.
BOUNDS = {torch.float32: 2e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}


def random(*shape, **options):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(**options)


def gradient_of(x, grad, align_corners):
    """By torch in float64."""
    x = x.double().requires_grad_()
    y = F.interpolate(x, size=grad.shape[-2:], mode="bilinear", align_corners=align_corners)
    return torch.autograd.grad(y, x, grad.double())[0]


def error_of(found, wanted):
    return ((found.double() - wanted).abs().max() / wanted.abs().max().clamp(min=1)).item()


@pytest.fixture
def launched(monkeypatch):
    """The dtypes of the gradients that the kernel was called with, and "forward" for each input."""
    from segtrain.kernels import bilinear

    seen, gradient, resized = [], bilinear.resize_gradient, bilinear.resized

    def watched(grad, *args, **kwargs):
        seen.append(grad.dtype)
        return gradient(grad, *args, **kwargs)

    def watched_forward(*args, **kwargs):
        seen.append("forward")
        return resized(*args, **kwargs)

    monkeypatch.setattr(bilinear, "resize_gradient", watched)
    monkeypatch.setattr(bilinear, "resized", watched_forward)
    return seen


ROWS = [(*sizes, bool(i % 2), torch.float32) for i, sizes in enumerate(SIZES)]
ROWS += [(*SIZES[0], True, torch.bfloat16), (*SIZES[0], False, torch.float16)]
OTHERS = [pytest.param(*row[:2], not row[2], row[3], marks=SLOW) for row in ROWS]


@pytest.mark.parametrize(("size", "out", "align_corners", "dtype"), ROWS + OTHERS)
def test_values_and_gradient_are_those_of_interpolate(launched, size, out, align_corners, dtype):
    x = random(1, 3, *size, dtype=dtype, memory_format=torch.channels_last).requires_grad_()
    grad = (random(1, 3, *out) * 2 + 1).to(dtype, memory_format=torch.channels_last)
    y = resize(x, out, align_corners=align_corners)
    options = {"mode": "bilinear", "align_corners": align_corners}
    assert (y.dtype, launched.pop()) == (dtype, "forward")
    assert y.is_contiguous(memory_format=torch.channels_last)
    assert error_of(y.detach(), F.interpolate(x.detach().double(), out, **options)) <= BOUNDS[dtype]
    (found,) = torch.autograd.grad(y, x, grad)
    assert (found.dtype, found.shape, launched) == (dtype, x.shape, [dtype])
    assert found.is_contiguous(memory_format=torch.channels_last)
    assert error_of(found, gradient_of(x.detach(), grad, align_corners)) <= BOUNDS[dtype]


def test_wide_rows_and_a_gradient_of_another_layout(launched):
    """More than one block of columns; a slice of channels, as of what was concatenated."""
    x = random(1, 600, 3, 2, dtype=torch.float32, memory_format=torch.channels_last)
    grad = random(1, 700, 9, 8, dtype=torch.float32, memory_format=torch.channels_last)[:, 50:650]
    y = resize(x.requires_grad_(), (9, 8), align_corners=False)
    wanted = F.interpolate(x.detach().double(), (9, 8), mode="bilinear")
    assert error_of(y.detach(), wanted) <= BOUNDS[torch.float32]
    (found,) = torch.autograd.grad(y, x, grad)
    assert launched == ["forward", torch.float32]
    assert error_of(found, gradient_of(x.detach(), grad, False)) <= BOUNDS[torch.float32]


def test_nothing_is_resized_to_nothing(launched):
    x = torch.empty(0, 3, 4, 5).requires_grad_()
    (found,) = torch.autograd.grad(resize(x, (8, 9), align_corners=False).sum(), x)
    assert found.shape == x.shape
    assert launched == [torch.float32]


def test_not_a_number_stays_where_it_counts():
    x = random(1, 2, 4, 4, dtype=torch.float32).requires_grad_()
    grad = torch.ones(1, 2, 16, 16)
    grad[0, 1, 0, 0] = torch.nan
    (found,) = torch.autograd.grad(resize(x, (16, 16), align_corners=False), x, grad)
    assert found.isnan().nonzero().tolist() == [[0, 1, 0, 0]]


def test_float64_and_very_long_sides_go_the_other_way(launched):
    for x, size in (
        (random(1, 1, 2, 3), (4, 6)),
        (random(1, 1, 1, 2, dtype=torch.float32), (1, 23_001)),
    ):
        y = resize(x.requires_grad_(), size, align_corners=False)
        (found,) = torch.autograd.grad(y.sum(), x)
        wanted = gradient_of(x.detach(), torch.ones_like(y), False)
        assert error_of(found, wanted) <= 1e-3
    assert launched == []


@pytest.mark.parametrize("align_corners", [False, pytest.param(True, marks=SLOW)])
def test_pyramid_pooling_trains_as_without_a_kernel(monkeypatch, launched, align_corners):
    config = ModelConfig(align_corners=align_corners, ppm_channels=4, ppm_bins=(1, 3))
    pool = PyramidPooling(config, 8, norm=nn.BatchNorm2d)
    x = random(2, 8, 7, 6, dtype=torch.float32, memory_format=torch.channels_last)
    results = []
    for interpreted in (True, False):
        monkeypatch.setattr(kernels, "interpreted", interpreted)
        y = pool(x.requires_grad_())
        weights = torch.linspace(0, 1, y.numel()).view_as(y)
        grads = torch.autograd.grad((y * weights).sum(), [x, *pool.parameters()])
        results.append([y, *grads])
        assert len(launched) == 2 * len(config.ppm_bins)
    for found, wanted in zip(*results, strict=True):
        torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4 * wanted.abs().max().item())
