"""The oracle is F.batch_norm in float64 on the whole batch in one process.

As on CUDA: torch's kernels are replaced by their formulas (cuda_standins.py).
"""

import copy
import os
import pickle
from pathlib import Path
from typing import Any, NamedTuple
from unittest import mock

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from cuda_standins import as_on_cuda, calls, cuda_arithmetic, ranks_as_on_cuda
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.shares import ShareThreads
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.norm import (
    SyncBatchNorm,
    SyncBatchNorm2d,
    convert,
    make_groups,
    norm_relu_conv,
    normalize_together,
    untracked,
)
from segtrain.norm.kernels import local_moments, unbiased

C = 5
SLOW = pytest.mark.slow("norm", "distributed")


@pytest.fixture(scope="session")
def where():
    """The device of the ranks; tests/gpu has another."""
    return "cpu"


@pytest.fixture(params=["cpu", "cuda"], scope="session")
def either_ranks(request, run_ranks):
    """As `run_ranks`; and with the arithmetic of CUDA, whose kernels are replaced by formulas."""
    return run_ranks if request.param == "cpu" else ranks_as_on_cuda(run_ranks)


def results_of(calls):
    """What each (function, *arguments) returns, by its name: starting ranks costs a second."""
    return {name: function(*arguments) for name, (function, *arguments) in calls.items()}


def by_name(results):
    """The results of all ranks for each name."""
    return {name: [result[name] for result in results] for name in results[0]}


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


class Case(NamedTuple):
    """A training step of a layer. `shapes`: of the inputs of the ranks."""

    shapes: list[tuple[int, ...]]
    dtype: torch.dtype = torch.float64
    layout: torch.memory_format = torch.preserve_format
    options: dict[str, Any] | None = None


def reference(parts, grads, module):
    """y, dx, the gradients of weight and bias, running mean and variance by F.batch_norm.

    On all values of all ranks side by side, in rows of C.
    """
    x = torch.cat([rows(part) for part in parts]).requires_grad_()
    weight, bias = (
        None if p is None else p.detach().double().clone().requires_grad_()
        for p in (module.weight, module.bias)
    )
    mean, var = torch.zeros(C, dtype=torch.float64), torch.ones(C, dtype=torch.float64)
    momentum = 1.0 if module.momentum is None else module.momentum  # the mean over one step
    y = F.batch_norm(x, mean, var, weight, bias, True, momentum, module.eps)
    y.backward(torch.cat([rows(grad) for grad in grads]))
    return y.detach(), x.grad, [p.grad for p in (weight, bias) if p is not None], mean, var


def rows(x: Tensor) -> Tensor:
    return x.detach().cpu().double().transpose(0, 1).reshape(C, -1).T


def errors_of(case, device):
    """How far this rank is from the whole batch: outputs and gradients of x; other gradients, to
    the largest; running mean; running variance, relative (collective)."""
    parts = tensors(case.shapes, case.dtype)
    grads = tensors(case.shapes, case.dtype, mean=0.3, std=1.0, seed=1)
    module = layer(torch.promote_types(case.dtype, torch.float32), **case.options or {}).to(device)
    x = parts[dist.rank()].to(device, memory_format=case.layout).requires_grad_()
    y = module(x)
    y.backward(grads[dist.rank()].to(device))
    assert strides(y) == strides(x.grad) == strides(x)
    assert y.dtype == x.grad.dtype == case.dtype
    summed = [dist.all_reduce_sum(p.grad.clone()).cpu().double() for p in module.parameters()]
    all_y, all_dx, parameters, mean, var = reference(parts, grads, module.cpu())
    place = sum(len(rows(part)) for part in parts[: dist.rank()])
    mine = slice(place, place + len(rows(x)))
    pairs = [(rows(y), all_y[mine]), (rows(x.grad), all_dx[mine])]
    errors = [max((abs(got - wanted).max().item() for got, wanted in pairs if len(got)), default=0)]
    scaled = [abs(a - b).max() / abs(b).max() for a, b in zip(summed, parameters, strict=True)]
    errors.append(max(map(float, scaled), default=0.0))
    if module.track_running_stats:
        assert module.num_batches_tracked == 1
        errors.append(abs(module.running_mean.double() - mean).max().item())
        errors.append(abs(module.running_var.double() / var - 1).max().item())
    return errors


def errors_of_all(cases, device):
    return [errors_of(case, device) for case in cases]


# Of what `errors_of` returns. Outputs up to 8 are rounded to the type: 2**-8 of that and the
# gradients for bfloat16; the statistics are float32 at least.
MOST = {
    torch.float64: (1e-12, 1e-12, 1e-14, 1e-14),
    torch.float32: (1e-5, 1e-5, 1e-6, 1.5e-6),
    torch.bfloat16: (0.15, 0.01, 1e-6, 1.5e-6),
    torch.float16: (0.02, 0.001, 1e-6, 1.5e-6),
}
NARROW = [torch.float32, torch.bfloat16, torch.float16]
SPLITS = {
    "even": [(2, C, 3, 4), (2, C, 3, 4)],
    "even on four ranks": [(2, C, 3, 4)] * 4,
    "uneven images": [(5, C, 3, 4), (1, C, 3, 4)],
    "uneven sizes": [(2, C, 3, 4), (1, C, 7, 2), (3, C, 1, 5)],
    "one rank empty": [(3, C, 3, 4), (0, C, 3, 4), (2, C, 3, 4)],
    "one value a rank": [(1, C, 1, 1)] * 4,
    "uneven on four ranks": [(1, C, 3, 4), (2, C, 3, 4), (3, C, 3, 4), (4, C, 3, 4)],
}
LAYOUTS = [
    (SPLITS["uneven images"], torch.channels_last),
    (SPLITS["uneven sizes"], torch.channels_last),
    (SPLITS["one rank empty"], torch.channels_last),
    ([(2, C, 2, 3, 4), (1, C, 3, 5, 2)], torch.channels_last_3d),
    ([(4, C), (3, C)], torch.preserve_format),
    ([(2, C, 7), (1, C, 3)], torch.preserve_format),
    ([(2, C, 2, 3, 4), (1, C, 2, 3, 4)], torch.preserve_format),
]
OPTIONS = [
    {"affine": False},
    {"bias": False},
    {"track_running_stats": False},
    {"momentum": None},
    {"momentum": 0.0},
    {"momentum": 1.0},
    {"eps": 0.5},
]
CASES = [
    *(Case(shapes) for shapes in SPLITS.values()),
    *(Case(shapes, layout=layout) for shapes, layout in LAYOUTS),
    *(Case(SPLITS["uneven images"], options=options) for options in OPTIONS),
    *(Case(SPLITS[name], d) for name in ("uneven images", "one rank empty") for d in NARROW),
]


@pytest.mark.parametrize(
    ("either_ranks", "ranks"),
    [
        *(("cpu", 2), ("cuda", 2), ("cuda", 3), ("cpu", 4)),
        pytest.param("cpu", 3, marks=SLOW),
        pytest.param("cuda", 4, marks=SLOW),
    ],
    indirect=["either_ranks"],
)
def test_any_split_layout_option_and_type_equals_the_full_batch(either_ranks, where, ranks):
    """And the layout is kept."""
    cases = [case for case in CASES if len(case.shapes) == ranks]
    for errors_of_rank in either_ranks(ranks, errors_of_all, cases, where):
        for case, errors in zip(cases, errors_of_rank, strict=True):
            for error, most in zip(errors, MOST[case.dtype], strict=False):
                assert error <= most, case


FAR_RATIOS = (1.0, 1e2, 1e4)


def far_variances(device="cpu"):
    """The largest relative error for each of FAR_RATIOS of mean to deviation (collective)."""
    errors = dict.fromkeys(FAR_RATIOS, 0.0)
    for ratio in FAR_RATIOS:
        parts = tensors([(2, C, 32, 45)] * 2, torch.float32, mean=ratio, std=1.0)
        wanted = torch.cat([rows(part) for part in parts]).var(dim=0)
        for memory_format in (torch.contiguous_format, torch.channels_last):
            module = SyncBatchNorm(C, momentum=1.0, affine=False, device=device)
            module(parts[dist.rank()].to(device, memory_format=memory_format))
            error = abs(module.running_var.cpu().double() / wanted - 1).max().item()
            errors[ratio] = max(errors[ratio], error)
    return errors


@pytest.mark.parametrize("count", [1, 2, 3])
def test_bessels_factor_is_that_of_torch_and_1_for_one_value(count):
    values = torch.randn(count, C, generator=torch.Generator().manual_seed(0)).double()
    wanted = values.var(0) if count > 1 else torch.zeros(C).double()
    for number in (count, torch.tensor(count).double()):
        found = unbiased(values.var(0, correction=0), number)
        torch.testing.assert_close(found, wanted)
        assert (unbiased(torch.ones(C), number) >= 1).all()


def test_variance_survives_a_mean_far_from_zero(results):
    """The sums of float32 squares that others send are wrong by 19 % at a ratio of 1000."""
    assert max(results["far"][0].values()) <= 2e-6
    for ratio, error in results["far, as on CUDA"][0].items():  # where means are float32
        assert error <= max(2e-6, 4e-9 * ratio)


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


def empty_step(dtype, device):
    module = layer(torch.float32).to(device)
    x = torch.empty(0, C, 3, 4, dtype=dtype, device=device, requires_grad=True)
    y = module(x)
    y.float().sum().backward()
    buffers = {name: buffer.cpu() for name, buffer in module.named_buffers()}
    return y.shape, x.grad.shape, module.weight.grad.cpu(), buffers


def one_value_in_all(device):
    module = layer(torch.float32).to(device)
    y = module(torch.full((1 - dist.rank(), C, 1, 1), 7.0, device=device))
    return y.detach().cpu(), module.running_var.cpu(), module.bias.detach().cpu()


# 72,200 values a channel and rank, more than the 65,504 that float16 can count.
MANY = (2, C, 190, 190)


def half_module(device):
    module = layer(torch.float32, momentum=1.0).half().to(device)
    x = tensors([MANY], torch.float16, seed=dist.rank())[0]
    outputs = module(x.to(device)), module.running_mean, module.running_var
    return [t.detach().cpu().double() for t in outputs]


def sliced_input(device):
    wide, grad = tensors([(2, C + 3, 3, 4), (2, C, 3, 4)], seed=dist.rank())
    wide, grad = wide.to(device, memory_format=torch.channels_last), grad.to(device)
    outcomes = []
    for x, dy in ((wide[:, 1 : C + 1], grad), (wide[:, 1 : C + 1].contiguous(), grad)):
        x = x.detach().requires_grad_()
        y = layer().to(device)(x)
        y.backward(dy.to(memory_format=torch.channels_last) if not x.is_contiguous() else dy)
        outcomes.append((y.detach().cpu(), x.grad.cpu()))
    return outcomes


def odd_calls(device):
    return {
        "empty": (empty_step, torch.float32, device),
        "empty, narrow": (empty_step, torch.bfloat16, device),
        "one value": (one_value_in_all, device),
        "many values": (half_module, device),
        "sliced": (sliced_input, device),
    }


@pytest.fixture(scope="module")
def odd_inputs(either_ranks, where):
    return by_name(either_ranks(2, results_of, odd_calls(where)))


def test_a_batch_empty_on_all_ranks_leaves_no_trace(odd_inputs):
    results = odd_inputs["empty"] + odd_inputs["empty, narrow"]
    assert len(results) == 4
    for y_shape, dx_shape, grad, buffers in results:
        assert y_shape == dx_shape == (0, C, 3, 4)
        assert torch.equal(grad, torch.zeros(C))
        assert torch.equal(buffers["running_mean"], torch.zeros(C))
        assert torch.equal(buffers["running_var"], torch.ones(C))
        assert buffers["num_batches_tracked"] == 0


@pytest.mark.fault(75)
def test_one_value_in_the_group_gives_the_bias_and_finite_buffers(odd_inputs):
    y, running_var, bias = odd_inputs["one value"][0]
    # x * scale and bias - mean * scale cancel; the scale is 1 / sqrt(eps), 316.
    torch.testing.assert_close(y.flatten(), bias, rtol=0, atol=1e-3)
    assert running_var.isfinite().all()


def test_a_half_precision_module_counts_beyond_the_range_of_float16(odd_inputs):
    parts = [tensors([MANY], torch.float16, seed=rank)[0] for rank in range(2)]
    module = layer(momentum=1.0)
    y, _, _, mean, var = reference(parts, parts, module)
    found = odd_inputs["many values"]
    # float16 keeps 11 bits of values up to 16.
    torch.testing.assert_close(torch.cat([rows(out) for out, *_ in found]), y, rtol=0, atol=0.02)
    for _, *statistics in found:
        torch.testing.assert_close(statistics, [mean, var], rtol=1e-3, atol=0)


def test_slices_and_gradients_of_another_layout_give_the_same_numbers(odd_inputs):
    for sliced, dense in odd_inputs["sliced"]:
        torch.testing.assert_close(sliced, dense, rtol=0, atol=1e-12)


def counted(function):
    """What `function` returns, and the number of all_reduces it took."""
    dist.use_shared_sum(None)  # where they could not be seen
    reduce = torch.distributed.all_reduce
    with mock.patch("torch.distributed.all_reduce", side_effect=reduce) as watched:
        return function(), watched.call_count


BRANCH_DTYPES = (torch.float64, torch.float32, torch.float32)


def branch_step(together):
    """Three branches of different widths and types, one with an empty rank; the last is unused."""
    xs = tensors([(dist.rank(), 4, 3, 2), (2, 7, 1, 1), (3, 5, 2, 2)], seed=dist.rank())
    xs = [x.to(dtype).requires_grad_() for x, dtype in zip(xs, BRANCH_DTYPES, strict=True)]
    layers = [SyncBatchNorm2d(x.shape[1], dtype=x.dtype, affine=x is not xs[1]) for x in xs]
    pairs = list(zip(xs, layers, strict=True))
    ys = normalize_together(pairs) if together else [layer(x) for x, layer in pairs]
    (ys[0].square().sum() + ys[1].sin().sum()).backward()
    parameters = [p.grad for layer in layers[:2] for p in layer.parameters()]
    buffers = [b for layer in layers for b in layer.buffers()]
    return [*(y.detach() for y in ys), *(x.grad for x in xs[:2]), *parameters, *buffers]


def branches():
    return [counted(lambda together=together: branch_step(together)) for together in (False, True)]


@pytest.mark.parametrize("name", ["branches", "branches, as on CUDA"])
def test_branches_that_share_a_collective_are_bitwise_those_of_separate_calls(results, name):
    for (separate, num_separate), (together, num_together) in results[name]:
        assert (num_separate, num_together) == (5, 2)
        torch.testing.assert_close(together, separate, rtol=0, atol=0)


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


def test_layers_that_share_no_statistics_are_called_one_by_one(results):
    assert results["unshared"] == [["hook"]] * 2


def frozen_input():
    x = tensors([(2, C, 3, 4)], seed=dist.rank())[0]
    x.requires_grad_(dist.rank() == 0)
    module = layer()
    module(x).square().sum().backward()
    return module.weight.grad.isfinite().all().item()


def test_a_rank_whose_input_needs_no_gradient_takes_part_all_the_same(results):
    assert results["frozen input"] == [True, True]


def mean_of_a_group(group):
    """Of this rank's group; "halves" are ranks 0 and 1, and the others."""
    if group == "halves":
        group = [0, 1] if dist.rank() < 2 else [2, 3]
    module = SyncBatchNorm(C, process_group=group, momentum=1.0, dtype=torch.float64)
    make_groups(module)
    module(tensors([(2, C, 3, 4)], seed=dist.rank())[0])
    return module.running_mean


@pytest.mark.parametrize(("group", "ranks"), [("halves", 4), ("node", 2)])
def test_groups_of_ranks_have_statistics_of_their_own(results, group, ranks):
    parts = [tensors([(2, C, 3, 4)], seed=rank)[0] for rank in range(ranks)]
    wanted = [rows(torch.cat(parts[i : i + 2])).mean(0) for i in range(0, ranks, 2)]
    means = [mean for mean in wanted for _ in range(2)]
    torch.testing.assert_close(results[group], means, rtol=0, atol=1e-13)


def explicit_group():
    """The ranks of a copied module's group, and whether a group of all is the one given."""
    everyone = torch.distributed.new_group()
    same = SyncBatchNorm(C, process_group=everyone)._group() is everyone
    dist.make_groups([(0, 1)])
    group = dist.group_of((0, 1)) if dist.rank() < 2 else None
    module = SyncBatchNorm(C, process_group=group, dtype=torch.float64)
    copied = pickle.loads(pickle.dumps(copy.deepcopy(module)))
    return copied.process_group, same


def test_a_module_with_a_group_can_be_copied_and_pickled(results):
    assert results["copied"] == [((0, 1), True), ((0, 1), True), (None, True)]


def test_one_process_is_plain_batch_norm_and_exchanges_its_state():
    assert not issubclass(SyncBatchNorm, nn.SyncBatchNorm)  # refused by DDP on a CPU
    (x,) = tensors([(3, C, 3, 4)])
    ours, plain, back = SyncBatchNorm2d(C).double(), nn.BatchNorm2d(C).double(), layer()
    assert torch.equal(ours(x), plain(x))
    assert torch.equal(ours.eval()(x), plain.eval()(x))
    assert ours.state_dict().keys() == plain.state_dict().keys()
    back.load_state_dict(plain.state_dict())
    assert torch.equal(back.eval()(x), plain(x))
    assert back.num_batches_tracked == 1


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
        def forward(self, x):
            return super().forward(x).relu()

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
    for group in ("world", [], object()):
        with pytest.raises(ValueError, match="process_group: expected a process group"):
            SyncBatchNorm2d(4, process_group=group)
    with pytest.raises(TypeError, match="expected images or a process_group"):
        SyncBatchNorm2d(4, process_group=[0], images=2)


def test_a_converted_layer_can_be_given_another_group():
    net = convert(nn.Sequential(nn.BatchNorm2d(4)), process_group=[0, 1])
    convert(net)
    assert net[0].process_group == (0, 1)
    convert(net, process_group=[0])
    assert net[0].process_group == (0,)


def machine_unknown():
    known = os.environ.pop("LOCAL_WORLD_SIZE")
    try:
        SyncBatchNorm2d(4, process_group="node")(torch.zeros(2, 4, 1, 1))
    except RuntimeError as error:
        return str(error)
    finally:
        os.environ["LOCAL_WORLD_SIZE"] = known


def test_the_ranks_of_a_machine_are_not_guessed(results):
    for said in results["unknown machine"]:
        assert "set LOCAL_RANK and LOCAL_WORLD_SIZE" in said


def statistics_of_a_repeated_step():
    layer, x = SyncBatchNorm2d(3), torch.randn(2, 3, 4, 5)
    once = layer(x)
    tracked = {name: value.clone() for name, value in layer.named_buffers()}
    with untracked():
        again = layer(x)
    same = {name: torch.equal(value, tracked[name]) for name, value in layer.named_buffers()}
    layer(x)
    return torch.equal(once, again), same, layer.num_batches_tracked.item()


def test_a_repeated_step_leaves_running_statistics_alone(results):
    """Alone the layer is torch's own, which knows nothing of repeated steps."""
    buffers = ("running_mean", "running_var", "num_batches_tracked")
    wanted = (True, dict.fromkeys(buffers, True), 2)
    assert [statistics_of_a_repeated_step(), *results["repeated"]] == [wanted] * 3


def constant_far_away():
    """Rounding makes the variances -7e-6 to -9e-6, which eps does not outweigh."""
    module = layer(torch.float64, eps=1e-12, momentum=1.0)
    channels = torch.tensor([994414, 998355, 993161, 989388, 997172], dtype=torch.float64) / 7
    y = module(channels.view(1, C, 1, 1).expand(2 + dist.rank(), C, 3, 5))
    return y.detach(), module.running_var, module.bias.detach()


def not_a_number():
    module = layer(torch.float32)
    x = torch.ones(2, C, 3, 3)
    x[dist.rank(), 1] = torch.nan
    return module(x).isnan().any(0).any(-1).any(-1), module.running_var.isnan()


def convolved_step(fused):
    torch.manual_seed(1)
    norm, conv = SyncBatchNorm2d(C).double(), nn.Conv2d(C, 4, 3, stride=2, bias=False).double()
    (x,) = tensors([(2 + dist.rank(), C, 7, 8)], seed=dist.rank())
    x.requires_grad_()
    y = norm_relu_conv(x, norm, conv) if fused else conv(torch.relu(norm(x)))
    y.pow(3).sum().backward()
    gradients = [p.grad for p in (*norm.parameters(), *conv.parameters())]
    return y.detach(), x.grad, gradients, list(norm.buffers())


KERAS = Path(__file__).with_name("fixtures") / "keras_sync_batch_norm.npz"


def keras_batch():
    """This rank's replica through our layer: y, dx, both gradients, and the running statistics."""
    stored = {name: torch.from_numpy(value) for name, value in np.load(KERAS).items()}
    x, dy = (stored[name][dist.rank()].permute(0, 3, 1, 2) for name in ("x", "dy"))
    module = SyncBatchNorm2d(x.shape[1], eps=1e-3, dtype=torch.float64)
    module.load_state_dict(
        module.state_dict() | {"weight": stored["gamma"], "bias": stored["beta"]}
    )
    y = module(x.requires_grad_())
    grads = torch.autograd.grad(y, (x, module.weight, module.bias), dy)
    y, dx = (t.detach().permute(0, 2, 3, 1) for t in (y, grads[0]))
    return y, dx, *grads[1:], module.running_mean, module.running_var


CALLS = {
    2: {
        "far": (far_variances,),
        "unshared": (unshared,),
        "frozen input": (frozen_input,),
        "node": (mean_of_a_group, "node"),
        "unknown machine": (machine_unknown,),
        "repeated": (statistics_of_a_repeated_step,),
        "far, as on CUDA": (as_on_cuda, far_variances),
        "constant": (as_on_cuda, constant_far_away),
        "not a number": (as_on_cuda, not_a_number),
        "fused": (as_on_cuda, convolved_step, True),
        "apart": (as_on_cuda, convolved_step, False),
        "keras": (keras_batch,),
    },
    3: {
        "branches": (branches,),
        "branches, as on CUDA": (as_on_cuda, branches),
        "copied": (explicit_group,),
    },
    4: {"halves": (mean_of_a_group, "halves")},
}


def test_a_batch_without_values_does_not_count_on_one_rank_either():
    layer = SyncBatchNorm2d(2, momentum=None)
    for value, number in ((1.0, 4), (2.0, 0), (3.0, 4)):
        assert layer(torch.full((number, 2, 3, 3), value)).shape == (number, 2, 3, 3)
    assert layer.num_batches_tracked == 2
    assert layer.running_mean.tolist() == [2, 2]


@pytest.fixture(scope="module")
def results(run_ranks):
    """What the ranks return for each of CALLS, by its name."""
    found = [by_name(run_ranks(ranks, results_of, calls)) for ranks, calls in CALLS.items()]
    return dict(item for each in found for item in each.items())


def test_a_constant_channel_far_from_zero_has_no_negative_variance(results):
    for y, var, bias in results["constant"]:
        assert (var >= 0).all()
        assert y.isfinite().all()
        torch.testing.assert_close(y, bias.view(-1, 1, 1).expand_as(y), rtol=0, atol=1e-3)


def test_a_value_that_is_no_number_is_seen_on_all_ranks(results):
    for channels in (channels for of_rank in results["not a number"] for channels in of_rank):
        assert channels.tolist() == [False, True, False, False, False]


def test_recomputing_activations_gives_the_same_numbers(results):
    torch.testing.assert_close(results["fused"], results["apart"], rtol=1e-12, atol=1e-12)


@pytest.mark.parametrize("shares", [None, (3,)])
def test_virtual_ranks_and_shares_equal_the_full_batch(shares):
    parts = tensors([(2, C, 3, 4), (0, C, 3, 4), (1, C, 3, 4)])
    module = layer(momentum=1.0)

    def work(part):
        with torch.autograd.set_multithreading_enabled(False):
            x = part.clone().requires_grad_()
            y = module(x)
            y.pow(3).sum().backward()
        return y.detach(), x.grad

    with cuda_arithmetic():
        group = VirtualRanks(3) if shares is None else ShareThreads(shares, 3)
        results = group.run([lambda p=p: work(p) for p in parts])
    assert calls["elementwise"] == 2

    x = torch.cat(parts).requires_grad_()
    mean, var = torch.zeros(2, C, dtype=torch.float64)
    y = F.batch_norm(x, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    y.pow(3).sum().backward()
    got = [torch.cat(tensors) for tensors in zip(*results, strict=True)]
    torch.testing.assert_close(got, [y.detach(), x.grad], rtol=0, atol=1e-10)
    buffers = [module.running_mean, module.running_var]
    torch.testing.assert_close(buffers, [mean, var], rtol=1e-13, atol=1e-13)


def test_the_stand_ins_are_left_behind_nowhere():
    with pytest.raises(AssertionError, match="no batch norm computed"):
        as_on_cuda(lambda: None)
    assert torch.batch_norm_elemt.__module__ != "cuda_standins"


def test_it_is_that_of_keras(results):
    """Keras' own synchronized layer over two replicas; it keeps the biased variance."""
    stored = {name: torch.from_numpy(value) for name, value in np.load(KERAS).items()}
    y, dx, dgamma, dbeta, mean, var = zip(*results["keras"], strict=True)
    count = stored["x"].numel() / len(stored["gamma"])
    found = {
        "y": torch.stack(y),
        "dx": torch.stack(dx),
        "dgamma": sum(dgamma),
        "dbeta": sum(dbeta),
        "mean": mean[0],
        "var": 0.9 + (var[0] - 0.9) * (count - 1) / count,
    }
    for name, value in found.items():
        torch.testing.assert_close(value, stored[name], rtol=1e-12, atol=1e-12)
