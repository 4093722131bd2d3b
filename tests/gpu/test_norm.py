"""The layer on the device.

With one device: several ranks on it over gloo, and NCCL with one rank. NCCL between devices is
tested where there are several.
"""

import statistics
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from rounds import estimate, measure, ratios

# What the layer does on a CPU it does on the device.
from test_norm import (  # noqa: F401
    MOST,
    NARROW,
    SPLITS,
    C,
    Case,
    by_name,
    errors_of_all,
    far_variances,
    layer,
    odd_calls,
    results_of,
    tensors,
    test_a_batch_empty_on_all_ranks_leaves_no_trace,
    test_a_half_precision_module_counts_beyond_the_range_of_float16,
    test_any_split_layout_option_and_type_equals_the_full_batch,
    test_one_value_in_the_group_gives_the_bias_and_finite_buffers,
    test_slices_and_gradients_of_another_layout_give_the_same_numbers,
)

from gpu.watching import (
    LocalBatchNorm2d,
    TorchSyncBatchNorm2d,
    as_among_two,
    host_waits,
    num_kernels,
    one_rank,
)
from segtrain.distributed import collectives as dist
from segtrain.norm import SyncBatchNorm2d, untracked

pytestmark = pytest.mark.gpu(limit_s=120)


@pytest.fixture(scope="session")
def either_ranks(gloo_ranks):
    return gloo_ranks


@pytest.fixture(scope="session")
def where(device):
    return device.type


@pytest.fixture(scope="module")
def odd_inputs(gloo_ranks, where):
    return by_name(gloo_ranks(2, results_of, odd_calls(where)))


@pytest.mark.parametrize("layout", [torch.contiguous_format, torch.channels_last], ids=str)
def test_inputs_of_many_blocks_are_near_the_full_batch(gloo_ranks, device, figures, layout):
    shapes = [(3, C, 129, 65), (1, C, 129, 65)]
    cases = [Case(shapes, dtype, layout, {"momentum": 1.0}) for dtype in NARROW]
    for rank, errors_of_rank in enumerate(gloo_ranks(2, errors_of_all, cases, device.type)):
        for dtype, (outputs, _, _, variance) in zip(NARROW, errors_of_rank, strict=True):
            figures[f"rank {rank}, {dtype}: errors of outputs, variances"] = outputs, variance
            assert outputs <= MOST[dtype][0]
            # Of channels-last bfloat16 a CPU has 1.4e-5; its inputs are rounded to 4e-3.
            assert variance <= (1e-5 if dtype == torch.float32 else 1e-4)


def test_variance_survives_a_mean_far_from_zero(gloo_ranks, device, figures):
    for ratio, error in gloo_ranks(2, far_variances, device.type)[0].items():
        figures[f"mean / deviation {ratio:g}: relative error"] = error
        # torch's kernel adds up differences from a float32 mean; by its formula, the error
        # at a ratio of 10,000 is 2.2e-5 in the median and at most 1.4e-4.
        assert error <= max(1e-5, 4e-8 * ratio)


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
    case, ranks = Case(SPLITS[split]), len(SPLITS[split])
    if torch.cuda.device_count() < ranks:
        pytest.skip(f"needs {ranks} CUDA devices")
    for (errors,) in nccl_ranks(ranks, errors_of_all, [case], device.type):
        assert all(error <= most for error, most in zip(errors, MOST[case.dtype], strict=True))


# What a layer may cost: kernels and copies, forward and backward.
MOST_FORWARD, MOST_BACKWARD = 10, 7
# Of PSPNet-R50 on crops of 720x960: the stem's half, the body, and two grids of the pyramid.
PSPNET_SHAPES = (
    (2, 64, 90, 120),
    (2, 256, 90, 120),
    (2, 512, 45, 60),
    (2, 2048, 45, 60),
    (2, 512, 1, 1),
    (2, 256, 6, 6),
)
OWN, TORCH, LOCAL = "segtrain", "torch's SyncBatchNorm", "F.batch_norm"


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_a_layer_starts_few_kernels(device, figures, dtype):
    """With the time of each beside local batch norm, on the shapes of PSPNet-R50."""
    is_cuda = device.type == "cuda"
    shapes = PSPNET_SHAPES if is_cuda else ((2, 64, 23, 30), (2, 16, 6, 6))
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
    assert forward > 0 or not is_cuda, "the driver does not let torch count kernels"
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
