"""The layer under DistributedDataParallel, as loops of other people have it."""

import inspect
from contextlib import nullcontext

import pytest
import torch
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.norm import SyncBatchNorm2d

HALVES = (slice(0, 3), slice(3, 6))
UNEVEN = (slice(0, 5), slice(5, 6))


def small_net(norm):
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, 8, 3, padding=1, bias=False),
        norm(8),
        nn.ReLU(),
        nn.Conv2d(8, 8, 3, stride=2, bias=False),
        norm(8),
        nn.ReLU(),
        nn.AdaptiveAvgPool2d(1),
        nn.Flatten(),
        nn.Linear(8, 3),
    ).double()


def batch(step):
    return torch.randn(6, 3, 9, 11, generator=torch.Generator().manual_seed(step)).double()


def replicated(net, sync_buffers):
    wrapper = nn.parallel.DistributedDataParallel
    new_name = "forward_sync_buffers" in inspect.signature(wrapper).parameters
    return wrapper(
        net, **{"forward_sync_buffers" if new_name else "broadcast_buffers": sync_buffers}
    )


def objective(model, images):
    """The mean over the 6 images of all ranks is the mean that DDP takes of this over ranks."""
    return model(images).square().sum() / 6 * dist.world_size()


def sgd(net):
    return torch.optim.SGD(net.parameters(), lr=0.1, momentum=0.9)


def state_of(function, rows=None, *args):
    """The state of a net after `function(net, model, mine)`; mine(step) is this rank's images."""
    if rows is None:  # one process, torch's layer
        net = small_net(nn.BatchNorm2d)
        function(net, net, batch, *args)
    else:
        net = small_net(SyncBatchNorm2d)
        function(net, replicated(net, *args), lambda step: batch(step)[rows[dist.rank()]])
    return net.state_dict()


def six_steps(net, model, mine):
    optimizer = sgd(net)
    for step in range(6):
        objective(model, mine(step)).backward()
        optimizer.step()
        optimizer.zero_grad()


def two_forwards(net, model, mine):
    optimizer = sgd(net)
    for step in range(3):
        (objective(model, mine(step)) + 0.5 * objective(model, mine(step + 9))).backward()
        optimizer.step()
        optimizer.zero_grad()


def accumulation(net, model, mine):
    """Under no_sync, where the statistics are those of all ranks although the gradients stay."""
    optimizer = sgd(net)
    for step in range(3):
        with model.no_sync() if dist.is_distributed() else nullcontext():
            objective(model, mine(step)).backward()
        objective(model, mine(step + 9)).backward()
        optimizer.step()
        optimizer.zero_grad()


LOOPS = [
    (six_steps, HALVES, False),
    (six_steps, UNEVEN, True),
    (two_forwards, UNEVEN, True),
    (accumulation, UNEVEN, False),
]


def steps_of_all():
    """What the tests compare, in one process group: starting ranks costs a second."""
    dtypes = (torch.bfloat16, torch.float16)
    autocast = {dtype: autocast_step(dtype) for dtype in dtypes}
    return [state_of(*loop) for loop in LOOPS], autocast


@pytest.fixture(scope="module")
def ranks(run_ranks):
    return run_ranks(2, steps_of_all)


@pytest.mark.parametrize("number", range(len(LOOPS)))
def test_loops_of_other_people_equal_one_process(ranks, number):
    """Parameters and statistics of the ranks have the same bits, whoever sends them or not."""
    one, other = (states[number] for states, _ in ranks)
    wanted = state_of(LOOPS[number][0])
    torch.testing.assert_close(one, wanted, rtol=1e-11, atol=1e-11)
    torch.testing.assert_close(other, one, rtol=0, atol=0)


def autocast_step(dtype):
    net = small_net(SyncBatchNorm2d if dist.is_distributed() else nn.BatchNorm2d).float()
    model = replicated(net, False) if dist.is_distributed() else net
    images = batch(0)[UNEVEN[dist.rank()]] if dist.is_distributed() else batch(0)
    with torch.autocast("cpu", dtype):
        loss = objective(model, images.float())
    loss.backward()
    return [p.grad for p in net.parameters()], list(net.buffers())


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_autocast_is_near_one_process(ranks, dtype):
    wanted, statistics = autocast_step(dtype)
    for gradients, buffers in (autocast[dtype] for _, autocast in ranks):
        for got, expected in zip(gradients, wanted, strict=True):
            assert got.dtype == torch.float32
            assert (got - expected).norm() <= 0.03 * expected.norm()
        torch.testing.assert_close(buffers, statistics, rtol=0.01, atol=1e-3)
