"""The arithmetic of a layer on CUDA, on a CPU: torch's kernels are replaced by their formulas.

The tests of test_norm.py with `either_ranks` run by it too.
"""

import pytest
import torch
import torch.nn.functional as F
from cuda_standins import as_on_cuda, calls, cuda_arithmetic, ranks_as_on_cuda
from test_norm import C, branches, by_name, far_variances, layer, results_of, tensors
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.norm import SyncBatchNorm2d, norm_relu_conv


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


def step(fused):
    torch.manual_seed(1)
    norm, conv = SyncBatchNorm2d(C).double(), nn.Conv2d(C, 4, 3, stride=2, bias=False).double()
    (x,) = tensors([(2 + dist.rank(), C, 7, 8)], seed=dist.rank())
    x.requires_grad_()
    y = norm_relu_conv(x, norm, conv) if fused else conv(torch.relu(norm(x)))
    y.pow(3).sum().backward()
    gradients = [p.grad for p in (*norm.parameters(), *conv.parameters())]
    return y.detach(), x.grad, gradients, list(norm.buffers())


@pytest.fixture(scope="module")
def found(run_ranks):
    """What two ranks return for each function, by its name."""
    functions = (far_variances, constant_far_away, not_a_number, branches)
    calls = {function.__name__: (function,) for function in functions}
    calls |= {name: (step, name == "fused") for name in ("fused", "apart")}
    return by_name(ranks_as_on_cuda(run_ranks)(2, results_of, calls))


def test_merging_ranks_costs_the_variance_little_far_from_zero(found):
    """The ranks' means are float32; sums of squares in it are wrong by 19 % at a ratio of 1000."""
    for ratio, error in found["far_variances"][0].items():
        assert error <= max(2e-6, 4e-9 * ratio)


def test_a_constant_channel_far_from_zero_has_no_negative_variance(found):
    for y, var, bias in found["constant_far_away"]:
        assert (var >= 0).all()
        assert y.isfinite().all()
        torch.testing.assert_close(y, bias.view(-1, 1, 1).expand_as(y), rtol=0, atol=1e-3)


def test_a_value_that_is_no_number_is_seen_on_all_ranks(found):
    for channels in (channels for of_rank in found["not_a_number"] for channels in of_rank):
        assert channels.tolist() == [False, True, False, False, False]


def test_branches_that_share_a_collective_get_the_bits_of_separate_calls(found):
    for (together, _), (apart, _) in found["branches"]:
        torch.testing.assert_close(together, apart, rtol=0, atol=0)


def test_recomputing_activations_gives_the_same_numbers(found):
    torch.testing.assert_close(found["fused"], found["apart"], rtol=1e-12, atol=1e-12)


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
        results = VirtualRanks(3, shares=shares).run([lambda p=p: work(p) for p in parts])
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
