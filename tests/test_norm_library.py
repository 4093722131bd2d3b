"""What people who bring their own loop need of the layer: checkpointing, ranks that differ, precise
statistics."""

import itertools
from functools import partial

import pytest
import torch
import torch.nn.functional as F
from memory import ClonesAsHost
from test_norm import by_name, results_of
from torch import nn
from torch.utils.checkpoint import checkpoint

from segtrain.distributed import collectives as dist
from segtrain.distributed import offload
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.norm import SyncBatchNorm2d, convert, precise_statistics, until_all_end

IMAGES = torch.randn(5, 3, 6, 7, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
ROWS = {1: [range(5)], 2: [range(2), range(2, 5)], 3: [range(1), range(1, 1), range(1, 5)]}


def net():
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 4, 3, bias=False),
        SyncBatchNorm2d(4),
        nn.ReLU(),
        nn.Conv2d(4, 2, 3, bias=False),
        SyncBatchNorm2d(2),
    ).double()


def mine():
    return IMAGES[list(ROWS[dist.world_size()][dist.rank()])]


def summed_gradients(module):
    return [dist.all_reduce_sum(p.grad.clone()) for p in module.parameters()]


def assert_close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def step(model, x, mode):
    """The gradient of `x`; mode: None, or whether checkpointing is reentrant."""
    x = x.clone().requires_grad_()
    y = model(x) if mode is None else checkpoint(model, x, use_reentrant=mode)
    y.pow(3).sum().backward()
    return x.grad


def shared_step(model, mode):
    """Two virtual ranks in every rank; what they save for backward is copied to the host."""
    offload._LEAST_BYTES = 0

    def work(part):
        copies = ClonesAsHost()
        host = offload.saved_on_host(torch.device("cpu"), model.parameters(), copies=copies)
        with torch.autograd.set_multithreading_enabled(False), host:
            return step(model, part, mode)

    parts = mine().tensor_split(2)
    return torch.cat(VirtualRanks(2).run([partial(work, part) for part in parts]))


def checkpointed_steps():
    """Gradients and buffers by (virtual ranks, mode)."""
    found = {}
    for virtual, mode in itertools.product((False, True), (None, False, True)):
        model = net()
        grad = shared_step(model, mode) if virtual else step(model, mine(), mode)
        buffers = [b.clone() for b in model.buffers()]
        found[virtual, mode] = grad, summed_gradients(model), buffers
    return found


def test_activation_checkpointing_changes_neither_gradients_nor_buffers(run_ranks, two_ranks):
    for found in [*run_ranks(1, checkpointed_steps), *two_ranks["checkpointed_steps"]]:
        assert_close(found[True, None], found[False, None], atol=1e-10)
        for virtual, reentrant in itertools.product((False, True), repeat=2):
            assert_close(found[virtual, reentrant], found[virtual, None], atol=0)
            assert found[virtual, reentrant][2][2] == 1  # num_batches_tracked


def second_derivative():
    """A penalty on a gradient that only saved tensors make depend on the weights."""
    x = mine().requires_grad_()
    with pytest.raises(RuntimeError, match="create_graph=True") as caught:
        torch.autograd.grad((net()(x) * 2).sum(), x, create_graph=True)
    return str(caught.value)


def test_a_second_derivative_is_refused(two_ranks):
    """Without a word, the penalty would be a constant."""
    assert all("differentiated again" in said for said in two_ranks["second_derivative"])


def uneven_epoch():
    """Rank r has r + 1 batches; losses are sums over a global count."""
    model = net()
    empty = IMAGES[:0]
    batches = [IMAGES[: 2 + i] for i in range(dist.rank() + 1)]
    sizes = []
    for batch in until_all_end(batches, empty):
        model.zero_grad()
        model(batch).pow(3).sum().backward()
        sizes.append(len(batch))
    return sizes, summed_gradients(model), list(model.buffers())


def test_ranks_with_fewer_batches_go_on_with_empty_ones(run_ranks):
    results = run_ranks(3, uneven_epoch)
    assert [sizes for sizes, *_ in results] == [[2, 0, 0], [2, 3, 0], [2, 3, 4]]
    # In the last step only one rank has images: it is as if it were alone.
    model = convert(net(), to="local")
    batches = [torch.cat([IMAGES[: 2 + i]] * (3 - i)) for i in range(3)]
    for batch in batches:
        model.zero_grad()
        model(batch).pow(3).sum().backward()
    for _, gradients, buffers in results:
        for got, p in zip(gradients, model.parameters(), strict=True):
            assert_close(got, p.grad, atol=1e-10)
        assert_close(buffers, list(model.buffers()))


def precise():
    model = net().train()
    model[0].eval()
    before = [p.clone() for p in model.parameters()]
    batches = [mine()[:1], mine()] if dist.rank() else [mine(), mine()[:1]]
    assert precise_statistics(model, batches) == 2
    assert [layer.training for layer in model] == [False, True, True, True, True]
    assert_close(before, list(model.parameters()), atol=0)
    return list(model.buffers())


def test_precise_statistics_are_those_of_all_values_of_all_ranks(two_ranks):
    """The first layer's input does not depend on statistics, so its moments are known."""
    first, second = two_ranks["precise"]
    assert_close(first, second, atol=0)
    model = net()
    seen = torch.cat([IMAGES[0:2], IMAGES[0:1], IMAGES[2:3], IMAGES[2:5]])
    x = F.conv2d(seen, model[0].weight)
    mean, var, tracked = first[:3]
    assert_close(mean, x.mean((0, 2, 3)))
    assert_close(var, x.transpose(0, 1).reshape(4, -1).var(1))
    assert tracked == 0


@pytest.fixture(scope="module")
def two_ranks(run_ranks):
    """What the ranks return for each function, by its name."""
    functions = (checkpointed_steps, second_derivative, precise)
    calls = {function.__name__: (function,) for function in functions}
    return by_name(run_ranks(2, results_of, calls))
