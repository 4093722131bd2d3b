"""Resizing is F.interpolate's, bit for bit, and its own gradient is the same."""

import pytest
import torch
import torch.nn.functional as F
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.utils._python_dispatch import TorchDispatchMode

from segtrain.config import ModelConfig
from segtrain.models import build_model
from segtrain.models.resizing import _Resize, enlarge, resize, resize_gradient

# Height and width in, height and width out: up, down, both, odd and even, by one, from and to one.
SIZES = [
    ((5, 7), (33, 50)),
    ((33, 50), (5, 7)),
    ((9, 4), (4, 9)),
    ((8, 8), (8, 9)),
    ((1, 3), (6, 1)),
    ((90, 45), (713, 360)),
]


def random(*shape, **options):
    generator = torch.Generator().manual_seed(0)
    return torch.randn(*shape, generator=generator, dtype=torch.float64).to(**options)


@pytest.fixture
def deterministic():
    torch.use_deterministic_algorithms(True)
    yield
    torch.use_deterministic_algorithms(False)


@pytest.mark.parametrize("align_corners", [False, True])
@pytest.mark.parametrize(("size", "out"), SIZES)
def test_the_gradient_is_that_of_interpolate(size, out, align_corners):
    x = random(2, 3, *size).requires_grad_()
    y = F.interpolate(x, size=out, mode="bilinear", align_corners=align_corners)
    grad = random(*y.shape) * 2 + 1
    (wanted,) = torch.autograd.grad(y, x, grad)
    got = resize_gradient(grad, size, align_corners=align_corners)
    assert (got - wanted).abs().max() <= 1e-12 * max(1, wanted.abs().max())


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
def test_the_result_has_the_bits_of_interpolate(dtype, layout):
    x = random(2, 3, 9, 11, dtype=dtype, memory_format=layout)
    for align_corners in (False, True):
        wanted = F.interpolate(x, size=(33, 40), mode="bilinear", align_corners=align_corners)
        assert torch.equal(resize(x, (33, 40), align_corners=align_corners), wanted)
        assert torch.equal(_Resize.apply(x, 33, 40, align_corners), wanted)


@pytest.mark.parametrize("dtype", [torch.float64, torch.float32, torch.bfloat16])
@pytest.mark.parametrize("layout", ["contiguous", "channels-last", "a slice of channels"])
def test_on_a_cpu_the_gradient_of_any_layout_is_that_of_interpolate(layout, dtype):
    x = random(2, 3, 9, 11, dtype=dtype).requires_grad_()
    grad = random(2, 5, 33, 40, dtype=dtype)
    if layout != "contiguous":
        grad = grad.contiguous(memory_format=torch.channels_last)
    grad = grad[:, :3] if "slice" in layout else grad[:, :3].clone()
    exact = x.detach().double().requires_grad_()
    wanted = F.interpolate(exact, size=grad.shape[-2:], mode="bilinear")
    (wanted,) = torch.autograd.grad(wanted, exact, grad.double())
    # Backward passes may run inside of autocast.
    with torch.autocast("cpu", torch.bfloat16, enabled=dtype == torch.float32):
        (found,) = torch.autograd.grad(resize(x, grad.shape[-2:], align_corners=False), x, grad)
    assert (found.dtype, found.shape) == (dtype, x.shape)
    error = (found.double() - wanted).abs().max() / wanted.abs().max()
    assert error <= {torch.float64: 1e-14, torch.float32: 1e-6, torch.bfloat16: 4e-3}[dtype]


@pytest.mark.parametrize("size", [(33, 40), (32, 41), (3, 1)])
def test_values_stay_over_their_pixels_where_sides_are_no_multiples(size):
    x = random(2, 3, *(-(-side // 4) for side in size))
    wanted = F.interpolate(x, scale_factor=4, mode="bilinear")[..., : size[0], : size[1]]
    assert torch.equal(enlarge(x, size, 4, align_corners=False), wanted)
    with pytest.raises(ValueError, match=f"for {size[0]}x{size[1]}: the stride is not 2"):
        enlarge(x, size, 2, align_corners=False)


class Operations(TorchDispatchMode):
    """The names of all operations, and the dtypes of what they concatenate."""

    def __init__(self):
        super().__init__()
        self.names, self.concatenated = [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        name = func.overloadpacket.__name__
        self.names.append(name)
        if name == "cat":
            self.concatenated += [tensor.dtype for tensor in args[0] if tensor.dim() == 4]
        return func(*args, **(kwargs or {}))


def test_the_deterministic_way_on_a_device_has_no_scattering(deterministic):
    context = type("Context", (), {})()
    with FakeTensorMode(), Operations() as operations:
        x = torch.ones(2, 3, 5, 7, device="cuda")
        y = resize(x, (9, 20), align_corners=True)
        assert "upsample_bilinear2d" in operations.names
        with torch.no_grad():
            _Resize.forward(context, x, 9, 20, True)
            grad_x, *_ = _Resize.backward(context, torch.ones_like(y))
    assert (y.shape, grad_x.shape, grad_x.device) == ((2, 3, 9, 20), x.shape, x.device)
    scattering = ("index", "scatter", "gather", "upsample_bilinear2d_backward")
    assert [n for n in operations.names if any(part in n for part in scattering)] == []


@pytest.mark.parametrize("arch", ["pspnet", "deeplabv3plus"])
def test_features_are_concatenated_in_the_type_of_mixed_precision(monkeypatch, arch):
    """On CUDA autocast resizes in float32: the input of the largest convolution would be that."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    options = {"arch": arch, "backbone": "resnet18", "head_channels": 8, "aux_head": False}
    with FakeTensorMode(), torch.device("cuda"):
        # In evaluation: torch's batch norm in training asks cuDNN for its version.
        model = build_model(ModelConfig(**options), num_classes=3).eval()
        images = torch.randn(2, 3, 65, 65)
        with torch.autocast("cuda", torch.bfloat16), Operations() as operations, torch.no_grad():
            logits = model(images)
    assert len(operations.concatenated) > 1
    assert set(operations.concatenated) == {torch.bfloat16}
    assert logits.out.dtype == torch.float32  # widened before the last resizing
