"""Batch norm with what follows it: the oracle is F.batch_norm in float64 on the whole batch."""

from contextlib import contextmanager
from functools import partial
from itertools import product

import pytest
import torch
import torch.nn.functional as F
from covering import covering
from cuda_standins import cuda_arithmetic
from memory import saved_bytes
from torch import nn

from segtrain import kernels
from segtrain.config import ModelConfig
from segtrain.distributed import collectives as dist
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.models import build_model
from segtrain.models.mobilenet import MobileNet
from segtrain.models.resnet import _Block, _Conv
from segtrain.norm import (
    SyncBatchNorm2d,
    fused,
    norm_activation,
    norm_relu,
    norm_relu_together,
    normalize_together,
    tracked_together,
)
from segtrain.norm.cuda_kernels import NormInput

SLOW = pytest.mark.slow("kernels", "norm", "models")
CUTS = {"relu": F.relu, "relu6": F.relu6, "none": lambda y: y}


def image(*shape, dtype=torch.float32, shift=0.0, scale=1.0, seed=0):
    """Channels-last values, reproducible."""
    generator = torch.Generator().manual_seed(seed)
    x = torch.randn(shape, generator=generator, dtype=torch.float64) * scale + shift
    return x.to(dtype).contiguous(memory_format=torch.channels_last)


def near(got, wanted, tolerance):
    """Whether the largest error is at most `tolerance` of the largest value."""
    assert got.shape == wanted.shape
    error = (got.double() - wanted.double()).abs().max().item()
    assert error <= tolerance * wanted.double().abs().max().item(), error


def of_layer(shape, dtype=torch.float32):
    """A layer's input, gradient of the output, and shortcut."""
    return [
        image(*shape, dtype=dtype, shift=shift, scale=2, seed=seed)
        for seed, shift in enumerate((3, 0, 0))
    ]


@pytest.fixture
def few_programs(monkeypatch):
    """So that each has several tiles of pixels."""
    from segtrain.kernels import norm

    monkeypatch.setattr(norm, "_SUMMING", 2)
    monkeypatch.setattr(norm, "_ELEMENTWISE", 2)


@contextmanager
def interpreting(by_kernels):
    """Inside, kernels compute, or else torch's own operations; ranks begin without kernels."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "interpreted", by_kernels)
        yield


@contextmanager
def counted():
    """Yields how many layers each call of the kernels had, in the order of calls."""
    found, compute = [], fused.fused_norms

    def counting(inputs, *args, **options):
        found.append(len(inputs))
        return compute(inputs, *args, **options)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(fused, "fused_norms", counting)
        yield found


SHAPES = {
    "19 channels": (3, 19, 7, 5),
    "1 channel": (2, 1, 3, 5),
    "24 channels": (1, 24, 9, 8),
    "two blocks of channels": (1, 96, 5, 3),
}
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}
# Of float32 the rounding of sums; bfloat16 has 8 bits, which the interpreter cuts off.
MOST = {torch.float32: 3e-6, torch.bfloat16: 8e-3, torch.float16: 1e-3}
FORMS = [(*CUTS,), (*SHAPES,), (*DTYPES,), ("affine", "without parameters"), ("alone", "shortcut")]


def is_form(row):
    """A shortcut is added before an activation."""
    return not {"none", "shortcut"} <= {*row}


# In full, with one of each; a row of `covering` leaves out what meets nothing new.
ALL = [pytest.param(row, marks=SLOW) for row in product(*FORMS) if is_form(row)]


@pytest.mark.parametrize("row", [*covering(FORMS, is_form, seed=0), *ALL], ids=", ".join)
def test_a_layer_is_batch_norm_with_what_follows(few_programs, row):
    torch.manual_seed(0)
    cut, shape, dtype = (next((x for x in group if x in row), group[0]) for group in FORMS[:3])
    (x, grad, shortcut), parameters = of_layer(SHAPES[shape], DTYPES[dtype]), [None, None]
    if is_affine := "without parameters" not in row:
        parameters = [torch.rand(x.shape[1]) + 0.5, torch.randn(x.shape[1])]
    has_shortcut = "shortcut" in row
    given = [t for t in (x, shortcut if has_shortcut else None, *parameters) if t is not None]
    for tensor in given:
        tensor.requires_grad_()
    layer = NormInput(x, *parameters, 1e-3)
    options = {"shortcut": shortcut} if has_shortcut else {}
    (y,), ((mean, var, count),) = fused.fused_norms([layer], None, cut, **options)
    got = torch.autograd.grad(y, given, grad)

    wide = [t.detach().double().requires_grad_() for t in given]
    weight, bias = wide[-2:] if is_affine else (None, None)
    z = F.batch_norm(wide[0], None, None, weight, bias, True, 0.0, 1e-3)
    wanted = CUTS[cut](z + wide[1] if has_shortcut else z)
    wanted_grads = torch.autograd.grad(wanted, wide, grad.double())
    assert (y.dtype, y.stride()) == (x.dtype, x.stride())
    near(y, wanted, MOST[x.dtype])
    for tensor, one, other in zip(given, got, wanted_grads, strict=True):
        assert (one.dtype, one.stride()) == (tensor.dtype, tensor.stride())
        near(one, other, 2 * MOST[x.dtype])
    near(mean, x.double().mean((0, 2, 3)), 1e-6)
    near(var, x.double().var((0, 2, 3), correction=0), 1e-6)
    assert count == x.numel() // x.shape[1]


KINDS = ["normal", "a black border", "an outlier", "constant"]
FAR = [*zip((1e4, 1e4, 0, 1e2), KINDS, strict=True)]
OTHERS = [pytest.param(*row, marks=SLOW) for row in product((0, 1e2, 1e4), KINDS) if row not in FAR]


@pytest.mark.parametrize(("ratio", "kind"), FAR + OTHERS)
def test_the_variance_survives_a_mean_far_from_zero(few_programs, ratio, kind):
    """A sum of float32 squares is wrong by 19 % at a ratio of 1000."""
    from segtrain.kernels import norm

    x = image(2, 24, 24, 20, shift=ratio)
    if kind == "a black border":  # what sums are about is far from the rest
        x[0, :, :4] = 0
    if kind == "an outlier":
        x[0, :, 0, 0] += 1e4
    if kind == "constant":
        x[:] = x[0, :, :1, :1].clone()
    mean, var, inv_std = norm.finished(norm.packed_moments([x]), 1e-5)
    wanted = x.double().var((0, 2, 3), correction=0)
    error = (mean - x.double().mean((0, 2, 3))).abs()
    assert (error <= 1e-6 * wanted.sqrt() + 1e-7 * mean.abs()).all()
    # The last term: two float64 squares of the mean cancel.
    assert ((var - wanted).abs() <= 6e-6 * wanted + 1e-14 * (1 + ratio) ** 2).all()
    near(inv_std, (wanted + 1e-5).rsqrt(), 2e-6)


def test_one_pixel_gives_the_bias():
    x = image(1, 5, 1, 1, shift=7.0).requires_grad_()
    bias = torch.linspace(0.5, 2.0, 5)
    (y,), ((_, var, count),) = fused.fused_norms([NormInput(x, None, bias, 1e-5)], None, "none")
    # Rounding of the mean, times 1 / sqrt(eps).
    torch.testing.assert_close(y.flatten(), bias, rtol=0, atol=1e-3)
    assert count == 1
    assert torch.equal(var, torch.zeros(5))
    (grad,) = torch.autograd.grad(y.sum(), x)
    assert torch.equal(grad, torch.zeros_like(grad))


@pytest.mark.parametrize("format", [torch.contiguous_format, torch.channels_last], ids=str)
def test_no_values_anywhere_have_moments_of_zero(format):
    x = torch.empty(0, 4, 3, 3).contiguous(memory_format=format).requires_grad_()
    assert fused.takes(x)
    weight = torch.ones(4, requires_grad=True)
    (y,), ((mean, var, count),) = fused.fused_norms([NormInput(x, weight, None, 0.1)], None, "relu")
    grads = torch.autograd.grad(y.sum(), [x, weight])
    assert y.shape == grads[0].shape == x.shape
    for zeros in (mean, var, grads[1]):
        assert torch.equal(zeros, torch.zeros(4))
    assert count == 0


@pytest.mark.parametrize("cut", ["none", "relu", "relu6"])
def test_what_is_no_number_stays_and_is_seen_in_the_statistics(cut):
    x = image(2, 3, 4, 4)
    x[1, 1, 2, 2] = torch.nan
    x.requires_grad_()
    (y,), ((mean, var, _),) = fused.fused_norms([NormInput(x, None, None, 1e-5)], None, cut)
    (grad,) = torch.autograd.grad(y.sum(), x)
    for tensor in (y[0, :, 0, 0], grad[0, :, 0, 0], mean, var):
        assert tensor.isnan().tolist() == [False, True, False]


def test_a_shortcut_that_is_no_number_stays_and_has_a_gradient():
    x, _, shortcut = of_layer((2, 3, 4, 4))
    shortcut[0, 2, 1, 1] = torch.nan
    shortcut.requires_grad_()
    layer = NormInput(x, None, None, 1e-5)
    (y,), _ = fused.fused_norms([layer], None, "relu6", shortcut=shortcut)
    assert y.isnan().nonzero().tolist() == [[0, 2, 1, 1]]
    (grad,) = torch.autograd.grad(y.sum(), shortcut)
    assert grad[0, 2, 1, 1] == 1  # as by torch's ReLU


def test_of_a_layer_with_relu_its_input_alone_is_kept():
    """The plain way keeps the output too, and ReLU6 a third tensor."""
    x = image(2, 16, 8, 8).requires_grad_()
    layer, vectors = SyncBatchNorm2d(16), 16 * 4 * 8
    for function in (norm_relu, partial(norm_activation, activation=nn.ReLU6())):
        kept, _ = saved_bytes(partial(function, x, layer))
        assert x.nbytes <= kept <= x.nbytes + vectors
    kept, _ = saved_bytes(partial(norm_relu, x, layer, torch.rand_like(x)))
    assert 2 * x.nbytes <= kept <= 2 * x.nbytes + vectors


def one_step(module, x):
    """Outputs, gradients and buffers of a step that starts from the module's present state."""
    state = {name: tensor.clone() for name, tensor in module.state_dict().items()}
    x = x.detach().clone().requires_grad_()
    module.zero_grad()
    y = module(x)
    y.backward(image(*y.shape, *[1] * (4 - y.dim()), dtype=y.dtype, seed=3).view_as(y))
    results = {
        "y": y.detach(),
        "input": x.grad,
        **{name: p.grad.clone() for name, p in module.named_parameters()},
        **{name: buffer.clone() for name, buffer in module.named_buffers()},
    }
    module.load_state_dict(state)
    return results


def compared(module, x, calls, tolerance=2e-5):
    """Checks a step by kernels, which have so many layers in each call, beside the plain way."""
    module.train().to(memory_format=torch.channels_last)
    with interpreting(False):
        wanted = one_step(module, x)
    with counted() as found:
        got = one_step(module, x)
    assert found == calls
    assert got.keys() == wanted.keys()
    for name, value in got.items():
        error = (value.double() - wanted[name].double()).norm()
        # Gradients behind statistics of two values, of ASPP's mean, nearly cancel.
        assert error <= tolerance * wanted[name].double().norm().clamp(min=1.0), name
    return got


def lively(module):
    """Weights and biases that no layer could do without."""
    torch.manual_seed(1)
    for layer in module.modules():
        if isinstance(layer, SyncBatchNorm2d):
            nn.init.uniform_(layer.weight, 0.5, 1.5)
            nn.init.normal_(layer.bias)
    return module


def basic_block(channels, stride=1, recompute="none"):
    torch.manual_seed(0)
    convs = [_Conv(8, 3, stride), _Conv(8, 3)]
    options = {"norm": SyncBatchNorm2d, "recompute": recompute, "pooled_shortcut": False}
    return lively(_Block(channels, convs, **options))


@pytest.mark.parametrize(
    ("channels", "stride", "calls"), [(8, 1, [1, 1]), (6, 2, [1, 2])], ids=["same", "downsample"]
)
def test_a_residual_block_is_the_plain_one_to_rounding(channels, stride, calls):
    compared(basic_block(channels, stride), image(2, channels, 7, 9), calls)


@pytest.mark.parametrize("recompute", ["blocks", "norm"])
def test_a_block_that_is_computed_again_is_the_same(recompute):
    """Blocks bit for bit: also their statistics, which follow one batch."""
    x, again = image(2, 8, 7, 9), basic_block(8, recompute=recompute)
    if recompute == "norm":
        compared(again, x, [1])
        return
    plain = compared(basic_block(8), x, [1, 1])
    with counted() as found:
        got = one_step(again.train().to(memory_format=torch.channels_last), x)
    assert found == [1, 1] * 2
    torch.testing.assert_close(got, plain, rtol=0, atol=0)


def test_autocast_gives_what_the_plain_way_gives():
    with torch.autocast("cpu", torch.bfloat16):
        got = compared(basic_block(8), image(2, 8, 7, 9), [1, 1], tolerance=0.02)
    assert got["y"].dtype == torch.bfloat16


def test_relu6_and_linear_layers_of_a_mobilenet_are_the_plain_ones_to_rounding():
    torch.manual_seed(0)
    config = ModelConfig(backbone="mobilenet_v2", aux_head=False)
    network = lively(MobileNet(config, norm=SyncBatchNorm2d).features[:2])
    compared(network, image(2, 3, 13, 11), [1] * 3)


class Both(nn.Module):
    """The logits of both heads of a model in a row."""

    def __init__(self, model):
        super().__init__()
        self.model = model

    def forward(self, images):
        return torch.cat([t.flatten() for t in self.model(images)])


@SLOW
def test_a_whole_model_is_the_plain_one_to_rounding():
    widths = {"head_channels": 8, "aux_channels": 8, "num_stages": 2, "output_stride": 8}
    options = {"backbone": "resnet18", "arch": "deeplabv3plus", "dropout": 0.0, **widths}
    torch.manual_seed(0)
    model = build_model(ModelConfig(**options), num_classes=3, norm=SyncBatchNorm2d)
    # The stem; of each block the first layer, and the last with or without that of the shortcut;
    # ASPP, its projection beside the low-level one, and the last layers of both heads.
    calls = [1, *[1, 1] * 2, 1, 2, 1, 1, 5, 2, 1, 2]
    compared(lively(Both(model)), image(2, 3, 33, 25), calls, tolerance=1e-3)


def sizes(rank):
    return [(2, 5, 3, 4), (0, 5, 3, 4), (1, 5, 6, 2)][rank]


def joined(parts):
    """All values of all ranks side by side, (1, C, n, 1)."""
    return torch.cat([p.transpose(0, 1).flatten(1) for p in parts], 1)[None, ..., None]


def of_rank(rank, contiguous=()):
    layout = torch.contiguous_format if rank in contiguous else torch.channels_last
    return [t.contiguous(memory_format=layout) for t in of_layer(sizes(rank))]


def two_layers():
    torch.manual_seed(0)
    return [lively(SyncBatchNorm2d(5, momentum=1.0)) for _ in range(2)]


def shared_step(contiguous):
    """On a rank: one layer with a shortcut, then that output beside x through two layers."""
    x, grad, shortcut = of_rank(dist.rank(), contiguous)
    x.requires_grad_()
    shortcut.requires_grad_()
    layers = two_layers()
    with interpreting(True), counted() as found:
        y = norm_relu(x, layers[0], shortcut)
        outputs = norm_relu_together([(y, layers[1]), (x, layers[0])])
        torch.autograd.backward(outputs, [grad, grad])
    sums = [dist.all_reduce_sum(p.grad.clone()) for one in layers for p in one.parameters()]
    buffers = [b for one in layers for b in one.buffers()]
    return found, [o.detach() for o in outputs], [x.grad, shortcut.grad], sums, buffers


def shared_step_as_on_cuda(contiguous):
    """What ranks that go the plain way send depends on the device."""
    with cuda_arithmetic():
        return shared_step(contiguous)


@pytest.mark.parametrize("contiguous", [(2,), pytest.param((), marks=SLOW)])
def test_uneven_ranks_equal_the_whole_batch(run_ranks, contiguous):
    """One has no images; another may be unable to use kernels."""
    step = shared_step_as_on_cuda if contiguous else shared_step
    results = run_ranks(3, step, contiguous)
    x, grad, shortcut = (joined(parts) for parts in zip(*map(of_rank, range(3)), strict=True))
    x, shortcut = (t.double().requires_grad_() for t in (x, shortcut))
    layers = [one.double() for one in two_layers()]
    with interpreting(False):
        y = F.relu(layers[0](x) + shortcut)
        outputs = [F.relu(layers[1](y)), F.relu(layers[0](x))]
    torch.autograd.backward(outputs, [grad.double()] * 2)
    found = [result[0] for result in results]
    assert found == [[] if rank in contiguous else [1, 2] for rank in range(3)]
    for i, wanted in enumerate(outputs):
        near(joined([result[1][i] for result in results]), wanted, 5e-6)
    for i, wanted in enumerate((x.grad, shortcut.grad)):
        near(joined([result[2][i] for result in results]), wanted, 1e-5)
    parameters = [p.grad for one in layers for p in one.parameters()]
    buffers = [b for one in layers for b in one.buffers()]
    for *_, sums, of_rank_buffers in results:
        for got, wanted in zip([*sums, *of_rank_buffers], [*parameters, *buffers], strict=True):
            near(got, wanted, 1e-5)


def test_layers_together_have_the_bits_of_layers_apart():
    layers = [lively(SyncBatchNorm2d(5)) for _ in range(4)]
    xs = [image(2, 5, 3 + i, 4, seed=i) for i in range(2)]
    with counted() as found:
        ys = norm_relu_together(zip(xs, layers, strict=False))
        apart = [norm_relu(x, layer) for x, layer in zip(xs, layers[2:], strict=True)]
        plain = normalize_together(zip(xs, layers, strict=False))
    assert found == [2, 1, 1, 2]
    torch.testing.assert_close(ys, apart, rtol=0, atol=0)
    torch.testing.assert_close([F.relu(y) for y in plain], ys, rtol=0, atol=0)
    for one, other in zip(layers[:2], layers[2:], strict=True):
        assert one.num_batches_tracked == 2
        assert other.num_batches_tracked == 1


def test_running_statistics_can_follow_at_the_end():
    x, layers = image(2, 5, 3, 4), [lively(SyncBatchNorm2d(5)) for _ in range(2)]
    norm_relu(x, layers[0])
    with tracked_together():
        norm_relu(x, layers[1])
    torch.testing.assert_close(*[list(layer.buffers()) for layer in layers], rtol=0, atol=0)


PLAIN = {
    "evaluation": (image(2, 5, 3, 4), lambda: SyncBatchNorm2d(5).eval()),
    "another kind": (image(2, 5, 3, 4), lambda: nn.BatchNorm2d(5)),
    "groups of images": (image(2, 5, 3, 4), lambda: SyncBatchNorm2d(5, images=1)),
    "float64": (image(2, 5, 3, 4, dtype=torch.float64), lambda: SyncBatchNorm2d(5).double()),
    "not channels-last": (image(2, 5, 3, 4).contiguous(), lambda: SyncBatchNorm2d(5)),
}


@pytest.mark.parametrize("name", PLAIN)
def test_other_layers_and_layouts_go_the_plain_way(name):
    x, make = PLAIN[name]
    layer, shortcut = make(), torch.rand_like(x)
    with counted() as found:
        got = norm_relu(x, layer, shortcut)
        (together,) = norm_relu_together([(x, layer)])
    assert found == []
    with interpreting(False):
        torch.testing.assert_close(got, F.relu(layer(x) + shortcut), rtol=0, atol=0)
        torch.testing.assert_close(together, F.relu(layer(x)), rtol=0, atol=0)


def test_virtual_ranks_go_the_plain_way():
    x, layer = image(2, 5, 3, 4), SyncBatchNorm2d(5)
    with counted() as found:
        VirtualRanks(2).run([lambda: norm_relu(x, layer)] * 2)
    assert found == []


def test_hooks_see_what_they_saw():
    """The layer's output before the ReLU; the kernels compute it alone."""
    seen, layer, x = [], SyncBatchNorm2d(5), image(2, 5, 3, 4)
    layer.register_forward_hook(lambda *args: seen.append(args[2].min().item()))
    y = norm_relu(x, layer)
    assert seen[0] < 0 <= y.min()
    activation = nn.ReLU6()
    activation.register_forward_hook(lambda *args: seen.append("activation"))
    norm_activation(x, SyncBatchNorm2d(5), activation)
    assert seen[1:] == ["activation"]


def test_shapes_that_would_be_broadcast_go_the_plain_way():
    layer, x = SyncBatchNorm2d(5), image(2, 5, 3, 4)
    shortcut = torch.rand(2, 5, 1, 1)
    with counted() as found:
        y = norm_relu(x, layer, shortcut)
    assert found == [1]  # the layer alone
    near(y, F.relu(F.batch_norm(x.double(), None, None, training=True) + shortcut), 1e-6)


def test_one_value_of_one_rank_is_refused_as_ever():
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        norm_relu(image(1, 5, 1, 1), SyncBatchNorm2d(5))


class Tripled(SyncBatchNorm2d):
    """A user's."""

    def forward(self, input):
        return 3 * super().forward(input)


def test_a_layer_with_a_forward_pass_of_its_own_keeps_it():
    x = image(2, 5, 3, 4)
    torch.testing.assert_close(norm_relu(x, Tripled(5)), 3 * norm_relu(x, SyncBatchNorm2d(5)))


def test_parameters_that_are_slices_of_others_are_read_as_such():
    x = image(2, 5, 3, 4)
    weight, bias = torch.randn(2, 10)
    for step in (1, 2):
        given = weight[: 5 * step : step], bias[: 5 * step : step]
        (y,), _ = fused.fused_norms([NormInput(x, *given, 1e-5)], None, "none")
        torch.testing.assert_close(y, F.batch_norm(x, None, None, *given, training=True))


def test_a_second_derivative_is_an_error():
    x = image(2, 5, 3, 4).requires_grad_()
    y = norm_relu(x, SyncBatchNorm2d(5))
    with pytest.raises(RuntimeError, match="create_graph=True"):
        torch.autograd.grad(y.sum(), x, create_graph=True)
