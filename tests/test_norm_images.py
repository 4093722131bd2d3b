"""Statistics over groups of images, wherever the images lie.

The oracle is F.batch_norm in float64 on every group, in one process.
"""

import itertools
from contextlib import nullcontext
from functools import cache, partial

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.norm import SyncBatchNorm2d, convert, make_groups, placed, sync_running_stats

C, TOTAL = 3, 12
X = torch.randn(TOTAL, C, 4, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# Images that differ, so that it shows whose statistics are used.
X = X * torch.linspace(0.5, 3, TOTAL).view(-1, 1, 1, 1) + torch.arange(TOTAL).view(-1, 1, 1, 1)
LAWS = list(itertools.product(("pooled", "mean", "first", "sequential"), (0.1, None)))
SPLITS = {
    1: [[[12]], [[3, 5, 4]]],
    2: [[[7], [5]], [[1, 4], [2, 5]], [[6], [6]]],
    3: [[[3], [1], [8]], [[5], [0], [7]], [[2, 2], [3, 1], [3, 1]], [[4], [4], [4]]],
}
IMAGES = (1, 2, 3, 4, 6, 12)


@cache
def expected(images, running, momentum):
    """Outputs, the gradient, and running mean, variance and count after two batches."""
    x = X.clone().requires_grad_()
    mean, var, count = torch.zeros(C).double(), torch.ones(C).double(), 0
    ys = []
    for scale in (1.0, 2.0):
        found = []
        for part in (x * scale).split(images):
            found.append((F.batch_norm(part, None, None, training=True), part))
        ys.append(torch.cat([y for y, _ in found]))
        batches = [part.detach() for _, part in found]
        if running == "pooled":
            batches = [torch.cat(batches)]
        elif running == "first":
            batches = batches[:1]
        statistics = [(b.mean((0, 2, 3)), b.transpose(0, 1).flatten(1).var(1)) for b in batches]
        if running == "mean":
            statistics = [
                tuple(torch.stack(each).mean(0) for each in zip(*statistics, strict=True))
            ]
        for batch_mean, batch_var in statistics:
            count += 1
            factor = momentum or 1 / count
            mean, var = mean.lerp(batch_mean, factor), var.lerp(batch_var, factor)
    sum(y.pow(3).sum() for y in ys).backward()
    return [y.detach() for y in ys], x.grad, [mean, var, torch.tensor(count)]


def two_batches(split, images, running, momentum):
    """What `expected` returns, for this rank, whose virtual ranks have a part each."""
    layer = SyncBatchNorm2d(C, momentum=momentum, images=images, running=running).double()
    sizes = split[dist.rank()]
    first = sum(map(sum, split[: dist.rank()]))
    parts = [part.clone().requires_grad_() for part in X[first : first + sum(sizes)].split(sizes)]

    def work(part, scale):
        with torch.autograd.set_multithreading_enabled(False):
            y = layer(part * scale)
            y.pow(3).sum().backward()
        return y.detach()

    ys = []
    with placed(split):
        make_groups(layer)
        for scale in (1.0, 2.0):
            calls = [partial(work, part, scale) for part in parts]
            ys.append(torch.cat(VirtualRanks(len(sizes)).run(calls)))
            sync_running_stats(layer)
    return ys, torch.cat([part.grad for part in parts]), list(layer.buffers())


def all_splits(ranks):
    return {
        (i, images, law): two_batches(split, images, *law)
        for i, split in enumerate(SPLITS[ranks])
        for j, images in enumerate(IMAGES)
        for law in LAWS[(i + j) % 4 :: 4]  # two each, and in the end all
    }


@pytest.mark.parametrize("ranks", SPLITS)
def test_groups_of_images_are_those_of_one_process(run_ranks, ranks):
    results = run_ranks(ranks, all_splits, ranks)
    for i, images, law in results[0]:
        found = [result[i, images, law] for result in results]
        ys, grad, buffers = expected(images, *law)
        joined = [torch.cat(parts) for parts in zip(*(ys for ys, *_ in found), strict=True)]
        torch.testing.assert_close(joined, ys, rtol=0, atol=1e-12)
        torch.testing.assert_close(torch.cat([g for _, g, _ in found]), grad, rtol=0, atol=1e-10)
        for *_, own in found:
            torch.testing.assert_close(own, buffers, rtol=1e-12, atol=1e-12)


def towers(ranks, images):
    """Batches of `images` a group through every law, in parts of uneven size."""
    parts = {1: [6], 2: [5, 1]}[ranks]
    first = sum(parts[: dist.rank()])
    layers = {
        law: SyncBatchNorm2d(C, images=images, running=law[0], momentum=law[1]) for law in LAWS
    }
    generator = torch.Generator().manual_seed(1)
    with placed(parts):
        make_groups(nn.ModuleList(layers.values()))
        for _ in range(20):
            x = torch.randn(6, C, 2, 1, generator=generator) * 2 + 5
            for layer in layers.values():
                layer.double()(x[first : first + parts[dist.rank()]].double())
            sync_running_stats(nn.ModuleList(layers.values()))
    return {law: list(layer.buffers()) for law, layer in layers.items()}


@pytest.mark.parametrize("ranks", [1, 2])
def test_running_statistics_are_those_of_towers(run_ranks, ranks):
    """nn.BatchNorm2d as N towers have it: all values at once, one each, or one for all in turn."""
    of = {law: [nn.BatchNorm2d(C, momentum=law[1]).double() for _ in range(3)] for law in LAWS}
    generator = torch.Generator().manual_seed(1)
    for _ in range(20):
        x = (torch.randn(6, C, 2, 1, generator=generator) * 2 + 5).double()
        for (running, _), (one, *_), layers in ((law, of[law], of[law]) for law in LAWS):
            if running == "pooled":
                one(x)
                continue
            for layer, part in zip(layers, x.split(2), strict=True):
                (one if running == "sequential" else layer)(part)
    for found in run_ranks(ranks, towers, ranks, 2):
        for law, buffers in found.items():
            layers = of[law] if law[0] == "mean" else of[law][:1]
            mean = torch.stack([layer.running_mean for layer in layers]).mean(0)
            var = torch.stack([layer.running_var for layer in layers]).mean(0)
            wanted = [mean, var, layers[0].num_batches_tracked]
            torch.testing.assert_close(buffers, wanted, rtol=1e-11, atol=0)


def left_out():
    """Buffers of two layers, one of which each rank has called; and of one that rank 0 has."""
    layers = [SyncBatchNorm2d(C, images=2, running="mean").double() for _ in range(3)]
    rank = dist.rank()
    with placed([4, 4]):
        layers[rank](X[4 * rank : 4 * rank + 4])
    with placed([4, 0]):
        if rank == 0:
            layers[2](X[:4])
    sync_running_stats(nn.ModuleList(layers))
    return [list(layer.buffers()) for layer in layers]


def test_a_rank_may_leave_a_layer_out(run_ranks):
    """Groups inside the ranks wait for nobody, and neither do their running statistics."""
    wanted = []
    for x in (X[:4], X[4:8], X[:4]):
        layers = [nn.BatchNorm2d(C).double() for _ in range(2)]
        for layer, part in zip(layers, x.split(2), strict=True):
            layer(part)
        mean = torch.stack([layer.running_mean for layer in layers]).mean(0)
        var = torch.stack([layer.running_var for layer in layers]).mean(0)
        wanted.append([mean, var, torch.tensor(1)])
    for found in run_ranks(2, left_out):
        torch.testing.assert_close(found, wanted, rtol=1e-12, atol=0)


def test_convert_takes_and_gives_them_up():
    net = convert(nn.Sequential(nn.BatchNorm2d(C)), images=2, running="mean")
    convert(net)
    assert (net[0].images, net[0].running) == (2, "mean")
    plain = convert(net, "local")[0]
    assert vars(plain).keys() == vars(nn.BatchNorm2d(C)).keys()


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"images": 0}, "images: expected None or an int of at least 1, got 0"),
        ({"images": "all"}, "images: expected None .* got 'all'"),
        ({"images": 2, "running": "rank0"}, "running: expected one of .*'first'.* got 'rank0'"),
    ],
)
def test_other_values_are_refused(options, message):
    with pytest.raises(ValueError, match=message):
        convert(nn.BatchNorm2d(C), **options)


def refusals():
    """What layers say that do not know where images are, or are given others."""
    layer, x, said = SyncBatchNorm2d(C, images=2), torch.randn(3, C, 2, 2), []
    for parts in (None, [2, 3], [3, 2]):
        try:
            with placed(parts) if parts else nullcontext():
                layer(x)
        except (RuntimeError, ValueError) as error:
            said.append(str(error))
    return said


def test_images_in_unknown_places_are_refused(run_ranks):
    first, second = run_ranks(2, refusals)
    assert "placed(images_of_each_rank)" in first[0]
    assert first[1] == "expected the 2 images that placed() gives this rank, got 3"
    assert second[1] == first[2] == "5 images cannot be divided into groups of 2"


def test_statistics_that_have_not_followed_are_neither_used_nor_saved():
    layer, x = SyncBatchNorm2d(C, images=2), torch.randn(4, C, 3, 3)
    layer(x)
    for use in (lambda: layer.eval()(x), layer.state_dict):
        with pytest.raises(RuntimeError, match="call sync_running_stats"):
            use()
    layer.momentum = None
    with pytest.raises(RuntimeError, match=r"update_bn does so.*precise_statistics"):
        sync_running_stats(layer)
    with pytest.raises(ValueError, match="mean is about groups of images"):
        convert(nn.BatchNorm2d(C), running="mean")
