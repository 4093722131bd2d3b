"""The layer on the device.

With one device: several ranks on it over gloo, and NCCL with one rank. NCCL between devices is
tested where there are several.
"""

import statistics
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from bench_sync_bn import TABLE_SHAPES, LocalBatchNorm2d, TorchSyncBatchNorm2d
from rounds import estimate, measure, ratios
from test_norm import (
    NARROW,
    SPLITS,
    C,
    assert_equals_full_batch,
    assert_near_full_batch,
    assert_no_trace,
    assert_normalized,
    assert_the_bias,
    back_to_shape,
    empty_step,
    half_module,
    layer,
    one_value_in_all,
    reference,
    run_layer,
    running_var,
    tensors,
)

from gpu.watching import as_among_two, host_waits, num_kernels, one_rank
from segtrain.distributed import collectives as dist
from segtrain.norm import SyncBatchNorm2d, untracked

pytestmark = pytest.mark.gpu(limit_s=120)


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_equals_the_full_batch(gloo_ranks, device, split):
    layout = [torch.preserve_format, device.type]
    assert_equals_full_batch(gloo_ranks, tensors(SPLITS[split]), layout=layout)


def test_channels_last_equals_the_full_batch_and_is_kept(gloo_ranks, device):
    layout = [torch.channels_last, device.type]
    assert_equals_full_batch(gloo_ranks, tensors(SPLITS["uneven sizes"]), layout=layout)


@pytest.mark.parametrize(("dtype", "atol"), NARROW)
def test_narrow_types_with_an_empty_rank_are_near_the_full_batch(gloo_ranks, device, dtype, atol):
    layout = [torch.preserve_format, device.type]
    assert_near_full_batch(gloo_ranks, tensors(SPLITS["one rank empty"], dtype), atol, layout)


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
@pytest.mark.parametrize(("dtype", "atol"), NARROW)
def test_inputs_of_many_blocks_are_near_the_full_batch(
    gloo_ranks, device, figures, dtype, atol, layout
):
    parts = tensors([(3, C, 129, 65), (1, C, 129, 65)], dtype)
    grads = tensors([part.shape for part in parts], dtype, mean=0.3, std=1.0, seed=1)
    module = layer(torch.float32, momentum=1.0)
    results = gloo_ranks(2, run_layer, parts, grads, module, layout, device.type)
    ys, dxs, _, _, var = reference(parts, grads, module)
    errors = []
    for part, y, dx, (got_y, got_dx, _, buffers) in zip(parts, ys, dxs, results, strict=True):
        for got, wanted in ((got_y, y), (got_dx, dx)):
            errors.append((got.double() - back_to_shape(wanted, part)).abs().max().item())
        figures["relative error of variances"] = (
            (buffers["running_var"] / var - 1).abs().max().item()
        )
    figures["largest error of outputs and gradients"] = max(errors)
    assert max(errors) <= atol
    # Of channels-last bfloat16 a CPU has 1.4e-5; its inputs are rounded to 4e-3.
    assert figures["relative error of variances"] <= (1e-5 if dtype == torch.float32 else 1e-4)


@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4])
def test_variance_survives_a_mean_far_from_zero(gloo_ranks, device, figures, ratio):
    parts = tensors([(2, C, 32, 45)] * 2, torch.float32, mean=ratio, std=1.0)
    got = gloo_ranks(2, running_var, parts, device.type)[0].double()
    wanted = torch.cat(parts).double().transpose(0, 1).reshape(C, -1).var(dim=1)
    figures["largest relative error"] = (got / wanted - 1).abs().max().item()
    # torch's kernel adds up differences from a float32 mean; by its formula, the error
    # at a ratio of 10,000 is 2.2e-5 in the median and at most 1.4e-4.
    torch.testing.assert_close(got, wanted, rtol=max(1e-5, 4e-8 * ratio), atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_empty_on_all_ranks_leaves_no_trace(gloo_ranks, device, dtype):
    assert_no_trace(gloo_ranks(2, empty_step, dtype, device.type))


def test_one_value_in_the_group_gives_the_bias_and_finite_buffers(gloo_ranks, device):
    assert_the_bias(gloo_ranks(2, one_value_in_all, "normalize", device.type))


def test_a_half_precision_module_counts_beyond_the_range_of_float16(gloo_ranks, device):
    assert_normalized(gloo_ranks(2, half_module, device.type))


def expected(x, module):
    """Outputs, and the running statistics with a momentum of 1."""
    mean, var = torch.zeros(2, C, device=x.device).unbind()
    y = F.batch_norm(x, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    return [t.detach().cpu() for t in (y, mean, var)]


def waits_of_a_layer(device_type):
    dist._num_processes = lambda group=None: 2  # the way of several ranks; the sum is over this one
    module = layer(torch.float32, momentum=1.0).to(device_type)
    x, grad = (t.float().to(device_type) for t in tensors([(2, C, 3, 4)] * 2))
    x.requires_grad_()
    outputs = []

    def step():
        outputs.append(module(x))
        outputs[-1].backward(grad)

    step()  # NCCL and the kernels set themselves up
    waits = host_waits(step, torch.device(device_type))
    got = [t.detach().cpu() for t in (outputs[-1], module.running_mean, module.running_var)]
    return waits, got, expected(x, module)


def test_over_nccl_the_host_never_waits_for_the_device(nccl_ranks, device):
    ((waits, got, wanted),) = nccl_ranks(1, waits_of_a_layer, device.type)
    assert waits == {}
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def captured():
    dist._num_processes = lambda group=None: 2
    module = layer(torch.float32, momentum=1.0).cuda()
    batches = [t.float().cuda() for t in tensors([(2, C, 3, 4)] * 3)]
    x = batches[0].clone()
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            module(x)
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    # NCCL's watchdog asks for events in a thread of its own meanwhile.
    with torch.cuda.graph(graph, capture_error_mode="thread_local"):
        y = module(x)
    results = []
    for batch in batches:
        x.copy_(batch)
        graph.replay()
        got = [t.detach().cpu() for t in (y, module.running_mean, module.running_var)]
        results.append((got, expected(batch, module)))
    return results, module.num_batches_tracked.item()


def test_the_forward_pass_over_nccl_can_be_captured_in_a_graph(nccl_ranks, device):
    if device.type == "cpu":
        pytest.skip("CPUs have no graphs")
    ((results, num_batches),) = nccl_ranks(1, captured)
    for got, wanted in results:
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert num_batches == 3 + 3  # capturing itself runs nothing


@pytest.mark.parametrize("split", ["even", "uneven sizes", "one rank empty"])
def test_nccl_between_devices_equals_the_full_batch(nccl_ranks, device, split):
    parts = tensors(SPLITS[split])
    if torch.cuda.device_count() < len(parts):
        pytest.skip(f"needs {len(parts)} CUDA devices")
    assert_equals_full_batch(nccl_ranks, parts, layout=[torch.preserve_format, device.type])


# What a layer may cost: kernels and copies, forward and backward.
MOST_FORWARD, MOST_BACKWARD = 10, 8
OWN, TORCH, LOCAL = "segtrain", "torch's SyncBatchNorm", "F.batch_norm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_starts_few_kernels(device, figures, dtype):
    """With the time of each beside local batch norm, on the shapes of PSPNet-R50."""
    is_cuda = device.type == "cuda"
    shapes = TABLE_SHAPES if is_cuda else ((2, 64, 23, 30), (2, 16, 6, 6))
    kinds = {LOCAL: LocalBatchNorm2d, OWN: SyncBatchNorm2d}
    if is_cuda:  # it refuses CPU tensors
        kinds[TORCH] = TorchSyncBatchNorm2d
    with one_rank(device):
        for shape in shapes:
            x, grad = random_tensors(shape, dtype, device)
            layers = {name: kind(shape[1]).to(device) for name, kind in kinds.items()}
            calls = {name: partial(both_ways, one, x, grad) for name, one in layers.items()}
            options = {"rounds": 8, "block_ms": 10, "warmup": 5} if is_cuda else {"rounds": 1}
            times = measure(calls, device=device, **options)
            for name, values in times.items():
                case = f"{'x'.join(map(str, shape))}, {name}"
                ratio = estimate(ratios(values, times[LOCAL])).median
                figures[f"{case}: ms, ratio"] = [statistics.median(values), ratio]
        for name, one in layers.items():
            figures[f"{name}: kernels"] = kernels_of_passes(one, x, grad, device)
    forward, backward = figures[f"{OWN}: kernels"]
    assert forward <= MOST_FORWARD
    assert backward <= MOST_BACKWARD


def random_tensors(shape, dtype, device):
    torch.manual_seed(0)
    x, grad = (
        torch.randn(shape, device=device).to(dtype).to(memory_format=torch.channels_last)
        for _ in range(2)
    )
    return x.requires_grad_(), grad


def both_ways(module, x, grad):
    with as_among_two():
        return torch.autograd.grad(module(x), (x, module.weight, module.bias), grad)


def kernels_of_passes(module, x, grad, device):
    """Forward and backward. Running statistics, which are of a step, are not counted."""
    outputs = []
    inputs = [x, *module.parameters()]
    with as_among_two(), untracked():
        module(x)  # makes what is made once
        forward = num_kernels(lambda: outputs.append(module(x)), device)
        backward = num_kernels(lambda: torch.autograd.grad(outputs[0], inputs, grad), device)
    return forward, backward
