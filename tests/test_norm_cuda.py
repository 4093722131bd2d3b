"""The layer on CUDA.

With one device: several ranks on it over gloo, which takes CUDA tensors through the host, and NCCL
with one rank. NCCL between devices is tested where there are several.
"""

import pytest
import torch
import torch.nn.functional as F
from test_norm import (
    NARROW,
    SPLITS,
    C,
    assert_equals_full_batch,
    assert_near_full_batch,
    assert_no_trace,
    assert_normalized,
    assert_the_bias,
    empty_step,
    half_module,
    layer,
    one_value_in_all,
    running_var,
    tensors,
)

from segtrain.distributed import collectives as dist

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available(), reason="needs a CUDA device, and SEGTRAIN_CUDA_TESTS=1"
)

CUDA = [torch.preserve_format, "cuda"]


@pytest.mark.parametrize("split", SPLITS)
def test_any_split_equals_the_full_batch(spawn_ranks, split):
    assert_equals_full_batch(spawn_ranks, tensors(SPLITS[split]), layout=CUDA)


def test_channels_last_equals_the_full_batch_and_is_kept(spawn_ranks):
    layout = [torch.channels_last, "cuda"]
    assert_equals_full_batch(spawn_ranks, tensors(SPLITS["uneven sizes"]), layout=layout)


@pytest.mark.parametrize(("dtype", "atol"), NARROW)
def test_narrow_types_with_an_empty_rank_are_near_the_full_batch(spawn_ranks, dtype, atol):
    assert_near_full_batch(spawn_ranks, tensors(SPLITS["one rank empty"], dtype), atol, CUDA)


@pytest.mark.parametrize("ratio", [1.0, 1e2, 1e4])
def test_variance_survives_a_mean_far_from_zero(spawn_ranks, ratio):
    parts = tensors([(2, C, 32, 45)] * 2, torch.float32, mean=ratio, std=1.0)
    got = spawn_ranks(2, running_var, parts, "cuda")[0].double()
    wanted = torch.cat(parts).double().transpose(0, 1).reshape(C, -1).var(dim=1)
    # torch's kernel adds up differences from a float32 mean; by its formula, the error
    # at a ratio of 10,000 is 2.2e-5 in the median and at most 1.4e-4.
    torch.testing.assert_close(got, wanted, rtol=max(1e-5, 4e-8 * ratio), atol=0)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_batch_empty_on_all_ranks_leaves_no_trace(spawn_ranks, dtype):
    assert_no_trace(spawn_ranks(2, empty_step, dtype, "cuda"))


def test_one_value_in_the_group_gives_the_bias_and_finite_buffers(spawn_ranks):
    assert_the_bias(spawn_ranks(2, one_value_in_all, "normalize", "cuda"))


def test_a_half_precision_module_counts_beyond_the_range_of_float16(spawn_ranks):
    assert_normalized(spawn_ranks(2, half_module, "cuda"))


def alone_among_two(**options):
    """A layer that takes the way of several ranks, though the sum is over this one alone."""
    dist._num_processes = lambda group=None: 2
    return layer(torch.float32, **options).cuda()


def expected(x, module):
    """Outputs, and the running statistics with a momentum of 1."""
    mean, var = torch.zeros(2, C, device=x.device).unbind()
    y = F.batch_norm(x, mean, var, module.weight, module.bias, True, 1.0, module.eps)
    return [t.detach().cpu() for t in (y, mean, var)]


def without_waiting():
    module = alone_among_two(momentum=1.0)
    x, grad = (t.float().cuda() for t in tensors([(2, C, 3, 4)] * 2))
    module(x.requires_grad_()).backward(grad)  # NCCL and the kernels set themselves up
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        y = module(x)
        y.backward(grad)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    got = [t.detach().cpu() for t in (y, module.running_mean, module.running_var)]
    return got, expected(x, module)


def test_over_nccl_the_host_never_waits_for_the_device(spawn_nccl_ranks):
    ((got, wanted),) = spawn_nccl_ranks(1, without_waiting)
    torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)


def captured():
    module = alone_among_two(momentum=1.0)
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


def test_the_forward_pass_over_nccl_can_be_captured_in_a_graph(spawn_nccl_ranks):
    ((results, num_batches),) = spawn_nccl_ranks(1, captured)
    for got, wanted in results:
        torch.testing.assert_close(got, wanted, rtol=1e-5, atol=1e-5)
    assert num_batches == 3 + 3  # capturing itself runs nothing


@pytest.mark.parametrize("split", ["even", "uneven sizes", "one rank empty"])
def test_nccl_between_devices_equals_the_full_batch(spawn_nccl_ranks, split):
    parts = tensors(SPLITS[split])
    if torch.cuda.device_count() < len(parts):
        pytest.skip(f"needs {len(parts)} CUDA devices")
    assert_equals_full_batch(spawn_nccl_ranks, parts, layout=CUDA)
