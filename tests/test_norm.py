"""The oracle is F.batch_norm in float64 on the whole batch in one process."""

import copy
import os
import pickle

import pytest
import torch
import torch.nn.functional as F
from cuda_standins import ranks_as_on_cuda
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.norm import (
    PartialBatchNorm2d,
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    convert,
    normalize_together,
    untracked,
)
from segtrain.norm.kernels import local_moments

C = 5


@pytest.fixture(params=["cpu", "cuda"], scope="session")
def either_ranks(request, run_ranks):
    """As `run_ranks`; and with the arithmetic of CUDA, whose kernels are replaced by formulas."""
    return run_ranks if request.param == "cpu" else ranks_as_on_cuda(run_ranks)


def tensors(shapes, dtype=torch.float64, mean=2.0, std=3.0, seed=0):
    generator = torch.Generator().manual_seed(seed)
    return [
        (torch.randn(shape, generator=generator, dtype=torch.float64) * std + mean).to(dtype)
        for shape in shapes
    ]


def layer(dtype=torch.float64, **options):
    module = SyncBatchNorm(C, dtype=dtype, **options)
    with torch.no_grad():
        if module.weight is not None:
            module.weight.copy_(torch.linspace(0.5, 2.0, C))
        if module.bias is not None:
            module.bias.copy_(torch.linspace(-1.0, 1.0, C))
    return module


def strides(x):
    """Those that mean something: not of dimensions of one."""
    return [stride for stride, size in zip(x.stride(), x.shape, strict=True) if size > 1]


def run_layer(parts, grads, module, memory_format=torch.preserve_format, device="cpu"):
    """One training step on this rank's part; everything the oracle is compared with."""
    module = module.to(device)
    x = parts[dist.rank()].to(device, memory_format=memory_format).requires_grad_()
    y = module(x)
    y.backward(grads[dist.rank()].to(device))
    assert strides(y) == strides(x.grad) == strides(x)
    parameters = [p for p in (module.weight, module.bias) if p is not None]
    summed = [dist.all_reduce_sum(p.grad.clone()).cpu() for p in parameters]
    buffers = {name: buffer.cpu() for name, buffer in module.named_buffers()}
    return y.detach().cpu(), x.grad.cpu(), summed, buffers


def reference(parts, grads, module):
    """The same by F.batch_norm on all values of all ranks side by side."""

    def flat(tensors: list[Tensor]) -> Tensor:
        return torch.cat([t.transpose(0, 1).reshape(C, -1) for t in tensors], dim=1).T.double()

    x = flat(parts).requires_grad_()
    weight, bias = (
        None if p is None else p.detach().double().clone().requires_grad_()
        for p in (module.weight, module.bias)
    )
    mean, var = torch.zeros(C, dtype=torch.float64), torch.ones(C, dtype=torch.float64)
    y = F.batch_norm(x, mean, var, weight, bias, True, module.momentum, module.eps)
    y.backward(flat(grads))
    counts = [t.numel() // C for t in parts]
    return y.detach().split(counts), x.grad.split(counts), [weight, bias], mean, var


def back_to_shape(rows: Tensor, like: Tensor) -> Tensor:
    shape = like.transpose(0, 1).shape
    return rows.T.reshape(shape).transpose(0, 1)


def assert_equals_full_batch(run_ranks, parts, *, layout=(), **options):
    """In float64; `layout` is the memory format and the device, if they are not the usual ones."""
    grads = tensors([p.shape for p in parts], mean=0.3, std=1.0, seed=1)
    module = layer(**options)
    results = run_ranks(len(parts), run_layer, parts, grads, module, *layout)
    ys, dxs, parameters, mean, var = reference(parts, grads, module)
    for rank, (y, dx, summed, buffers) in enumerate(results):
        for got, expected in ((y, ys[rank]), (dx, dxs[rank])):
            expected = back_to_shape(expected, parts[rank])
            torch.testing.assert_close(got, expected, rtol=0, atol=1e-12)
        expected = [p.grad for p in parameters if p is not None]
        for got, wanted in zip(summed, expected, strict=True):
            torch.testing.assert_close(got, wanted, rtol=1e-12, atol=1e-12)
        if module.track_running_stats:
            torch.testing.assert_close(buffers["running_mean"], mean, rtol=0, atol=1e-14)
            torch.testing.assert_close(buffers["running_var"], var, rtol=1e-14, atol=0)
            assert buffers["num_batches_tracked"] == 1


SPLITS = {
    "even": [(2, C, 3, 4), (2, C, 3, 4)],
    "even on four ranks": [(2, C, 3, 4)] * 4,
    "uneven images": [(5, C, 3, 4), (1, C, 3, 4)],
    "uneven sizes": [(2, C, 3, 4), (1, C, 7, 2), (3, C, 1, 5)],
    "one rank empty": [(3, C, 3, 4), (0, C, 3, 4), (2, C, 3, 4)],
    "one value a rank": [(1, C, 1, 1)] * 4,
    "uneven on four ranks": [(1, C, 3, 4), (2, C, 3, 4), (3, C, 3, 4), (4, C, 3, 4)],
}


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_equals_the_full_batch(either_ranks, split):
    assert_equals_full_batch(either_ranks, tensors(SPLITS[split]))


@pytest.mark.parametrize(
    ("shapes", "memory_format"),
    [
        (SPLITS["uneven images"], torch.channels_last),
        (SPLITS["uneven sizes"], torch.channels_last),
        (SPLITS["one rank empty"], torch.channels_last),
        ([(2, C, 2, 3, 4), (1, C, 3, 5, 2)], torch.channels_last_3d),
        ([(4, C), (3, C)], torch.preserve_format),
        ([(2, C, 7), (1, C, 3)], torch.preserve_format),
        ([(2, C, 2, 3, 4), (1, C, 2, 3, 4)], torch.preserve_format),
    ],
)
def test_every_layout_equals_the_full_batch_and_is_kept(either_ranks, shapes, memory_format):
    assert_equals_full_batch(either_ranks, tensors(shapes), layout=[memory_format])


@pytest.mark.parametrize(
    "options",
    [
        {"affine": False},
        {"bias": False},
        {"track_running_stats": False},
        {"momentum": 0.0},
        {"momentum": 1.0},
        {"eps": 0.5},
    ],
)
def test_options_equal_the_full_batch(either_ranks, options):
    assert_equals_full_batch(either_ranks, tensors(SPLITS["uneven images"]), **options)


NARROW = [(torch.float32, 1e-5), (torch.bfloat16, 0.15), (torch.float16, 0.02)]


@pytest.mark.parametrize(("dtype", "atol"), NARROW)
@pytest.mark.parametrize("split", ["uneven images", "one rank empty"])
def test_narrow_types_are_near_the_full_batch_in_float64(either_ranks, split, dtype, atol):
    assert_near_full_batch(either_ranks, tensors(SPLITS[split], dtype), atol)


def assert_near_full_batch(run_ranks, parts, atol, layout=()):
    """Outputs up to 8 are rounded to the type: 2**-8 of that and the gradients for bfloat16."""
    dtype = parts[0].dtype
    grads = tensors([p.shape for p in parts], dtype, mean=0.3, std=1.0, seed=1)
    module = layer(torch.float32)
    results = run_ranks(len(parts), run_layer, parts, grads, module, *layout)
    ys, dxs, _, mean, var = reference(parts, grads, module)
    for rank, (y, dx, _, buffers) in enumerate(results):
        assert y.dtype == dx.dtype == dtype
        for got, wanted in ((y, ys[rank]), (dx, dxs[rank])):
            wanted = back_to_shape(wanted, parts[rank])
            torch.testing.assert_close(got.double(), wanted, rtol=0, atol=atol)
        # The statistics are float32 whatever the input is.
        torch.testing.assert_close(buffers["running_mean"].double(), mean, rtol=0, atol=1e-6)
        torch.testing.assert_close(buffers["running_var"].double(), var, rtol=1e-6, atol=1e-6)


def running_var(parts, device="cpu"):
    module = SyncBatchNorm(C, momentum=1.0, affine=False, device=device)
    module(parts[dist.rank()].to(device))
    return module.running_var.cpu()


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4])
def test_variance_survives_a_mean_far_from_zero(run_ranks, ratio, memory_format):
    """The sums of float32 squares that others send are wrong by 19 % at a ratio of 1000."""
    parts = tensors([(2, C, 32, 45)] * 2, torch.float32, mean=ratio, std=1.0)
    parts = [part.contiguous(memory_format=memory_format) for part in parts]
    got = run_ranks(2, running_var, parts)[0].double()
    wanted = torch.cat(parts).double().transpose(0, 1).reshape(C, -1).var(dim=1)
    torch.testing.assert_close(got, wanted, rtol=2e-6, atol=0)


@pytest.mark.parametrize("ratio", [0.0, 10.0, 1e3, 1e5])
@pytest.mark.parametrize(
    "shape",
    # One run of pixels, several, several and a rest; rows of one image and of many; few values.
    [(2, 7, 30, 30), (2, 4, 64, 80), (1, 5, 71, 73), (3, 2, 8, 20, 20), (2, 3, 5000), (4, 6)],
    ids=str,
)
def test_local_statistics_are_exact_in_every_layout(shape, ratio):
    """batch norm's own channels-last kernel is wrong by a factor of 9 for the worst of these."""
    (x,) = tensors([shape], torch.float32, mean=ratio, std=1.0)
    last = {4: torch.channels_last, 5: torch.channels_last_3d}.get(x.dim())
    for part in [x] if last is None else [x, x.contiguous(memory_format=last)]:
        mean, var = local_moments(part)
        values = part.double().transpose(0, 1).reshape(shape[1], -1)
        torch.testing.assert_close(var, values.var(dim=1, correction=0), rtol=1e-5, atol=0)
        torch.testing.assert_close(mean, values.mean(dim=1), rtol=2e-6, atol=2e-6)


def test_constant_channels_have_no_variance():
    for memory_format in (torch.contiguous_format, torch.channels_last):
        x = torch.full((2, 3, 50, 50), 0.1).contiguous(memory_format=memory_format)
        mean, var = local_moments(x)
        assert (var < 1e-15).all()
        torch.testing.assert_close(mean, x[0, :, 0, 0].double(), rtol=1e-6, atol=0)


def empty_step(dtype, device="cpu"):
    module = layer(torch.float32).to(device)
    x = torch.empty(0, C, 3, 4, dtype=dtype, device=device, requires_grad=True)
    y = module(x)
    y.float().sum().backward()
    buffers = {name: buffer.cpu() for name, buffer in module.named_buffers()}
    return y.shape, x.grad.shape, module.weight.grad.cpu(), buffers


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_empty_on_all_ranks_leaves_no_trace(either_ranks, dtype):
    assert_no_trace(either_ranks(2, empty_step, dtype))


def assert_no_trace(results):
    for y_shape, dx_shape, grad, buffers in results:
        assert y_shape == dx_shape == (0, C, 3, 4)
        assert torch.equal(grad, torch.zeros(C))
        assert torch.equal(buffers["running_mean"], torch.zeros(C))
        assert torch.equal(buffers["running_var"], torch.ones(C))
        assert buffers["num_batches_tracked"] == 0


def one_value_in_all(on_one_value, device="cpu"):
    module = layer(torch.float32, on_one_value=on_one_value).to(device)
    y = module(torch.full((1 - dist.rank(), C, 1, 1), 7.0, device=device))
    return y.detach().cpu(), module.running_var.cpu(), module.bias.detach().cpu()


def test_one_value_in_the_group_gives_the_bias_and_finite_buffers(either_ranks):
    assert_the_bias(either_ranks(2, one_value_in_all, "normalize"))


def assert_the_bias(results):
    y, running_var, bias = results[0]
    # x * scale and bias - mean * scale cancel; the scale is 1 / sqrt(eps), 316.
    torch.testing.assert_close(y.flatten(), bias, rtol=0, atol=1e-3)
    assert running_var.isfinite().all()


@pytest.mark.fault(75)
def test_one_value_in_the_group_is_refused_on_request(run_ranks):
    with pytest.raises(pytest.fail.Exception, match="one value per channel over 2 ranks"):
        run_ranks(2, one_value_in_all, "raise")


# 72,200 values a channel and rank, more than the 65,504 that float16 can count.
MANY = (2, C, 190, 190)


def half_module(device="cpu"):
    module = layer(torch.float32, momentum=1.0).half().to(device)
    x = tensors([MANY], torch.float16, seed=dist.rank())[0]
    return [
        t.detach().cpu() for t in (module(x.to(device)), module.running_mean, module.running_var)
    ]


def test_a_half_precision_module_counts_beyond_the_range_of_float16(either_ranks):
    assert_normalized(either_ranks(2, half_module))


def assert_normalized(results):
    whole = torch.cat([tensors([MANY], torch.float16, seed=rank)[0] for rank in range(2)]).double()
    mean, var = torch.zeros(C).double(), torch.ones(C).double()
    module = layer()
    wanted = F.batch_norm(whole, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    # float16 keeps 11 bits of values up to 16.
    torch.testing.assert_close(
        torch.cat([y for y, *_ in results]).double(), wanted, rtol=0, atol=0.02
    )
    for _, *statistics in results:
        torch.testing.assert_close([t.double() for t in statistics], [mean, var], rtol=1e-3, atol=0)


def sliced_input():
    wide, grad = tensors([(2, C + 3, 3, 4), (2, C, 3, 4)], seed=dist.rank())
    wide = wide.to(memory_format=torch.channels_last)
    outcomes = []
    for x, dy in ((wide[:, 1 : C + 1], grad), (wide[:, 1 : C + 1].contiguous(), grad)):
        x = x.detach().requires_grad_()
        y = layer()(x)
        y.backward(dy.to(memory_format=torch.channels_last) if not x.is_contiguous() else dy)
        outcomes.append((y.detach(), x.grad))
    return outcomes


def test_slices_and_gradients_of_another_layout_give_the_same_numbers(either_ranks):
    for sliced, dense in either_ranks(2, sliced_input):
        for got, wanted in zip(sliced, dense, strict=True):
            torch.testing.assert_close(got, wanted, rtol=0, atol=1e-12)


def cumulative():
    module = SyncBatchNorm(C, momentum=None, dtype=torch.float64)
    for seed in range(3):
        module(tensors([(2, C, 3, 4)], seed=10 * seed + dist.rank())[0])
    return module.running_mean, module.running_var


def test_momentum_none_is_the_average_over_batches(run_ranks):
    batches = [
        torch.cat([tensors([(2, C, 3, 4)], seed=10 * seed + rank)[0] for rank in range(2)])
        for seed in range(3)
    ]
    plain = nn.BatchNorm2d(C, momentum=None, dtype=torch.float64)
    for batch in batches:
        plain(batch)
    mean, var = run_ranks(2, cumulative)[0]
    torch.testing.assert_close(mean, plain.running_mean, rtol=0, atol=1e-14)
    torch.testing.assert_close(var, plain.running_var, rtol=0, atol=1e-13)


def counted(function):
    """What `function` returns, and the number of all_reduces it took."""
    dist.use_shared_sum(None)  # where they could not be seen
    calls = []
    reduce = torch.distributed.all_reduce

    def count(*args, **kwargs):
        calls.append(1)
        return reduce(*args, **kwargs)

    torch.distributed.all_reduce = count
    try:
        return function(), len(calls)
    finally:
        torch.distributed.all_reduce = reduce


def count_collectives():
    """In turn: forward, backward, in evaluation with and without running statistics."""
    module = layer()
    x = tensors([(2, C, 3, 4)], seed=dist.rank())[0].requires_grad_()
    y, forward = counted(lambda: module(x))
    _, backward = counted(lambda: y.sum().backward())
    _, evaluated = counted(lambda: module.eval()(x))
    module.running_mean = module.running_var = None
    return forward, backward, evaluated, counted(lambda: module(x))[1]


def test_one_collective_forward_one_backward_and_none_in_evaluation(run_ranks):
    assert run_ranks(2, count_collectives) == [(1, 1, 0, 0)] * 2


def branch_step(together):
    """Three branches of different widths and types, one with an empty rank; the last is unused."""
    dtypes = (torch.float64, torch.float32, torch.float32)
    shapes = [(dist.rank(), 4, 3, 2), (2, 7, 1, 1), (3, 5, 2, 2)]
    layers = [
        SyncBatchNorm2d(shape[1], dtype=dtype, affine=i != 1)
        for i, (shape, dtype) in enumerate(zip(shapes, dtypes, strict=True))
    ]
    xs = [
        x.to(dtype).requires_grad_()
        for x, dtype in zip(tensors(shapes, seed=dist.rank()), dtypes, strict=True)
    ]
    pairs = list(zip(xs, layers, strict=True))
    ys = normalize_together(pairs) if together else [layer(x) for x, layer in pairs]
    (ys[0].square().sum() + ys[1].sin().sum()).backward()
    parameters = [p.grad for layer in layers[:2] for p in layer.parameters()]
    buffers = [b for layer in layers for b in layer.buffers()]
    return [*(y.detach() for y in ys), *(x.grad for x in xs[:2]), *parameters, *buffers]


def branches():
    return [counted(lambda together=together: branch_step(together)) for together in (False, True)]


def test_branches_that_share_a_collective_are_bitwise_those_of_separate_calls(run_ranks):
    for (separate, num_separate), (together, num_together) in run_ranks(3, branches):
        assert (num_separate, num_together) == (5, 2)
        for a, b in zip(separate, together, strict=True):
            torch.testing.assert_close(a, b, rtol=0, atol=0)


def unshared():
    """Layers with nothing to share go their own way: a hook, evaluation, another group."""
    x = tensors([(2, C, 3, 4)], dtype=torch.float32, seed=dist.rank())[0]
    seen = []
    hooked, plain, other = SyncBatchNorm2d(C), SyncBatchNorm2d(C), nn.BatchNorm2d(C)
    handle = hooked.register_forward_hook(lambda *_: seen.append("hook"))
    normalize_together([(x, hooked), (x, plain)])
    handle.remove()
    local = normalize_together([(x, other), (x, plain)])[0]
    alone = SyncBatchNorm2d(C, process_group=[dist.rank()])
    grouped = normalize_together([(x, alone), (x, plain)])[0]
    torch.testing.assert_close(grouped, local)
    quiet = normalize_together([(x, plain.eval()), (x, hooked.eval())])[0]
    torch.testing.assert_close(quiet, plain(x), rtol=0, atol=0)
    return seen


def test_layers_that_share_no_statistics_are_called_one_by_one(run_ranks):
    assert run_ranks(2, unshared) == [["hook"]] * 2


def frozen_input():
    x = tensors([(2, C, 3, 4)], seed=dist.rank())[0]
    x.requires_grad_(dist.rank() == 0)
    module = layer()
    module(x).square().sum().backward()
    return module.weight.grad.isfinite().all().item()


def test_a_rank_whose_input_needs_no_gradient_takes_part_all_the_same(run_ranks):
    assert run_ranks(2, frozen_input) == [True, True]


def mean_of_a_group(group):
    """Of this rank's group; "halves" are ranks 0 and 1, and the others."""
    if group == "halves":
        group = [0, 1] if dist.rank() < 2 else [2, 3]
    module = SyncBatchNorm(C, process_group=group, momentum=1.0, dtype=torch.float64)
    module(tensors([(2, C, 3, 4)], seed=dist.rank())[0])
    return module.running_mean


@pytest.mark.parametrize(("group", "ranks", "size"), [("halves", 4, 2), ("node", 2, 2)])
def test_groups_of_ranks_have_statistics_of_their_own(run_ranks, group, ranks, size):
    parts = [tensors([(2, C, 3, 4)], seed=rank)[0] for rank in range(ranks)]
    for rank, mean in enumerate(run_ranks(ranks, mean_of_a_group, group)):
        first = rank // size * size
        wanted = torch.cat(parts[first : first + size]).mean(dim=(0, 2, 3))
        torch.testing.assert_close(mean, wanted, rtol=0, atol=1e-13)


def group_of_one():
    """The world is larger, the group is this rank."""
    x = tensors([(2, C, 3, 4)], seed=dist.rank())[0]
    ours, plain = (
        SyncBatchNorm2d(C, process_group=[dist.rank()]).double(),
        nn.BatchNorm2d(C).double(),
    )
    torch.testing.assert_close(ours(x), plain(x), rtol=0, atol=0)
    torch.testing.assert_close(ours.state_dict(), plain.state_dict(), rtol=0, atol=0)
    return True


def test_a_group_of_one_rank_is_plain_batch_norm(run_ranks):
    assert run_ranks(2, group_of_one) == [True, True]


def explicit_group():
    """The ranks of a copied module's group, and whether a group of all is the one given."""
    everyone = torch.distributed.new_group()
    same = SyncBatchNorm(C, process_group=everyone)._group() is everyone
    group = dist.group_of((0, 1)) if dist.rank() < 2 else None
    module = SyncBatchNorm(C, process_group=group, dtype=torch.float64)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    return copied.process_group, same


def test_a_module_with_a_group_can_be_copied_and_pickled(run_ranks):
    assert run_ranks(3, explicit_group) == [((0, 1), True), ((0, 1), True), (None, True)]


def test_state_goes_to_plain_batch_norm_and_back():
    assert issubclass(SyncBatchNorm, nn.modules.batchnorm._BatchNorm)
    assert not issubclass(SyncBatchNorm, nn.SyncBatchNorm)  # refused by DDP on a CPU
    (x,) = tensors([(3, C, 3, 4)])
    ours, plain, back = layer(), nn.BatchNorm2d(C).double(), layer()
    ours(x)
    plain.load_state_dict(ours.state_dict())
    back.load_state_dict(plain.state_dict())
    for other in (plain, back):
        torch.testing.assert_close(other.eval()(x), ours.eval()(x), rtol=0, atol=0)
    assert back.num_batches_tracked == 1


def test_one_process_is_plain_batch_norm():
    x = tensors([(3, C, 3, 4)])[0]
    plain, ours = nn.BatchNorm2d(C).double(), SyncBatchNorm2d(C).double()
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    assert ours.state_dict().keys() == plain.state_dict().keys()


@pytest.mark.parametrize(
    ("kind", "shape"),
    [(SyncBatchNorm1d, (2, C, 3, 4)), (SyncBatchNorm2d, (2, C)), (SyncBatchNorm3d, (2, C, 3, 4))],
)
def test_a_wrong_number_of_dimensions_is_refused(kind, shape):
    with pytest.raises(ValueError, match="expected"):
        kind(C)(torch.zeros(shape))


def test_conversion_keeps_tensors_modes_hooks_and_sharing_and_comes_back():
    shared = nn.BatchNorm2d(4, eps=1e-3, momentum=None)
    net = nn.ModuleDict({"a": nn.Sequential(shared, nn.Conv2d(3, 4, 1), shared), "b": shared})
    shared.eval()
    shared.weight.requires_grad_(False)
    seen = []
    shared.register_forward_hook(lambda *_: seen.append(1))
    weight = shared.weight

    convert(net)
    converted = net["b"]
    convert(net)
    assert net["b"] is converted
    assert type(net["b"]) is SyncBatchNorm2d
    assert net["a"][0] is net["a"][2] is net["b"]
    assert net["b"].weight is weight
    assert not weight.requires_grad
    assert (net["b"].eps, net["b"].momentum, net["b"].training) == (1e-3, None, False)
    net["b"](torch.zeros(1, 4, 2, 2))
    assert seen == [1]

    convert(net, to="local")
    assert type(net["b"]) is nn.BatchNorm2d
    assert net["b"].weight is weight
    assert vars(net["b"]).keys() == vars(nn.BatchNorm2d(4)).keys()


def test_conversion_refuses_a_subclass_by_its_path_and_leaves_the_rest_alone():
    class Fused(nn.BatchNorm2d):
        pass

    class Special(SyncBatchNorm2d):
        pass

    for kind, to in ((Fused, "sync"), (Special, "sync"), (Special, "local")):
        net = nn.Sequential(nn.BatchNorm2d(4), SyncBatchNorm2d(4), kind(4))
        with pytest.raises(TypeError, match=rf"2 is a {kind.__name__}"):
            convert(net, to)
        assert [type(layer) for layer in net] == [nn.BatchNorm2d, SyncBatchNorm2d, kind]
    convert(nn.Sequential(Fused(4)), "local")


def test_what_is_misspelt_is_refused():
    with pytest.raises(ValueError, match=r'expected "sync" or "local", got \'sycn\''):
        convert(nn.BatchNorm2d(4), "sycn")
    with pytest.raises(ValueError, match="on_one_value: expected"):
        SyncBatchNorm2d(4, on_one_value="rasie")
    for group in ("world", [], object()):
        with pytest.raises(ValueError, match="process_group: expected a process group"):
            SyncBatchNorm2d(4, process_group=group)
    with pytest.raises(TypeError, match="no process_group"):
        PartialBatchNorm2d(4, process_group=[0])


def test_a_converted_layer_can_be_given_another_group():
    net = convert(nn.Sequential(nn.BatchNorm2d(4)), process_group=[0, 1])
    convert(net)
    assert net[0].process_group == (0, 1)
    convert(net, process_group=[0])
    assert net[0].process_group == (0,)


def machine_unknown():
    del os.environ["LOCAL_WORLD_SIZE"]
    try:
        SyncBatchNorm2d(4, process_group="node")(torch.zeros(2, 4, 1, 1))
    except RuntimeError as error:
        return str(error)


def test_the_ranks_of_a_machine_are_not_guessed(run_ranks):
    for said in run_ranks(2, machine_unknown):
        assert "set LOCAL_RANK and LOCAL_WORLD_SIZE" in said


def test_conversion_refuses_a_layer_that_does_not_know_its_width_yet():
    net = nn.Sequential(nn.LazyBatchNorm2d())
    with pytest.raises(TypeError, match=r"0 is a LazyBatchNorm2d"):
        convert(net)
    net(torch.zeros(2, 3, 1, 1))
    assert type(convert(net)[0]) is SyncBatchNorm2d


def statistics_of_a_repeated_step():
    layer, x = SyncBatchNorm2d(3), torch.randn(2, 3, 4, 5)
    once = layer(x)
    tracked = {name: value.clone() for name, value in layer.named_buffers()}
    with untracked():
        again = layer(x)
    same = {name: torch.equal(value, tracked[name]) for name, value in layer.named_buffers()}
    layer(x)
    return torch.equal(once, again), same, layer.num_batches_tracked.item()


@pytest.mark.parametrize("ranks", [1, 2])
def test_a_repeated_step_leaves_running_statistics_alone(run_ranks, ranks):
    """Alone the layer is torch's own, which knows nothing of repeated steps."""
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    wanted = (True, dict.fromkeys(buffers, True), 2)
    assert run_ranks(ranks, statistics_of_a_repeated_step) == [wanted] * ranks
