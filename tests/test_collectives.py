"""How often the ranks meet for statistics in one training step; sums in the order of shares."""

from functools import reduce

import numpy as np
import pytest
import torch
from torch.distributed import all_reduce

from segtrain.config import ModelConfig
from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.partition import partition, shares_of_ranks
from segtrain.distributed.shared_sum import MAX_BYTES
from segtrain.distributed.shares import Shares
from segtrain.models import build_model
from segtrain.norm import SyncBatchNorm2d

# 61 layers, or 59 with the 7x7 stem: four downsamples share the collective of their bn3, the four
# grids of the PPM share one, and the auxiliary head shares that of the head's last convolution.
PSPNET = {"arch": "pspnet", "backbone": "resnet50", "head_channels": 8, "aux_channels": 8}
# 62 layers without an auxiliary head: likewise, the five branches of the ASPP share one, and the
# low-level features share that of its projection.
PLUS = {"arch": "deeplabv3plus", "backbone": "resnet50", "head_channels": 8, "aux_head": False}
MOBILE = {"arch": "deeplabv3plus", "backbone": "mobilenet_v2", "head_channels": 8}


def collectives(options):
    """The number of batch norms, and of all_reduces forward and backward."""
    dist.use_shared_sum(None)  # where they could not be seen
    calls = []

    def count(*args, **kwargs):
        calls.append(1)
        return all_reduce(*args, **kwargs)

    torch.distributed.all_reduce = count
    try:
        torch.manual_seed(0)
        model = build_model(ModelConfig(**options), num_classes=3, norm=SyncBatchNorm2d).train()
        logits = model(torch.randn(1, 3, 33, 33))
        forward = len(calls)
        heads = [logits.out] if logits.aux is None else [logits.out, logits.aux]
        sum(head.square().mean() for head in heads).backward()
        layers = sum(isinstance(layer, SyncBatchNorm2d) for layer in model.modules())
        return layers, forward, len(calls) - forward
    finally:
        torch.distributed.all_reduce = all_reduce


@pytest.mark.parametrize(
    ("options", "layers", "each_way"),
    [
        (PSPNET | {"stem": "64-64-128"}, 61, 53),
        (PSPNET, 59, 51),
        (PLUS, 62, 53),
        # 1x1, three rates, mean, projection; low; two in the decoder; auxiliary: 51 + 10.
        (MOBILE | {"aux_channels": 8}, 61, 55),
    ],
    ids=["pspnet deep stem", "pspnet", "deeplabv3plus", "mobilenet"],
)
def test_branches_share_their_collectives(run_ranks, options, layers, each_way):
    assert run_ranks(2, collectives, options) == [(layers, each_way, each_way)] * 2


SHARES = 8


def parts(dtype, length):
    """Of every share, values whose float sum depends on the order; the first are all -0.0."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(SHARES, length)) * 10.0 ** rng.integers(-8, 8, (SHARES, length))
    values[:, 0] = -0.0
    return values.astype(dtype)


def ordered_sums(through_gloo):
    """By `ordered_sum`, and by `all_reduce_sum` in the threads of shares."""
    if through_gloo:
        dist.use_shared_sum(None)
    counts = shares_of_ranks(SHARES, dist.world_size())
    mine = list(partition(SHARES, dist.world_size(), dist.rank()))
    results = []
    for dtype in ("float64", "float32", "int64"):
        for length in (1, 300, MAX_BYTES // 8):
            whole = torch.from_numpy(parts(dtype, length))
            total = dist.ordered_sum(whole[mine], counts)
            shares = Shares(tuple(counts), at_once=2)
            in_threads = shares.run([lambda t=whole[i]: dist.all_reduce_sum(t) for i in mine])
            assert all(torch.equal(total, other) for other in in_threads)
            assert torch.equal(whole[mine], torch.stack(in_threads))  # in place
            results.append(total.numpy())
    return results


@pytest.mark.parametrize(("ranks", "through_gloo"), [(1, False), (2, False), (3, False), (3, True)])
def test_shares_are_added_in_their_order_on_any_number_of_ranks(run_ranks, ranks, through_gloo):
    """The oracle adds numpy's scalars one after another. Three ranks have 3 + 3 + 2 of eight."""
    wanted = []
    for dtype in ("float64", "float32", "int64"):
        for length in (1, 300, MAX_BYTES // 8):
            columns = parts(dtype, length)
            wanted.append(reduce(np.add, columns))
            if dtype == "float32" and length == 300:
                assert (reduce(np.add, columns[::-1]) != wanted[-1]).any()
    for results in run_ranks(ranks, ordered_sums, through_gloo):
        assert [got.tobytes() for got in results] == [total.tobytes() for total in wanted]


def seen_by_shares():
    counts = shares_of_ranks(SHARES, dist.world_size())
    first = partition(SHARES, dist.world_size(), dist.rank()).start
    shares = Shares(tuple(counts), at_once=2)

    def work():
        number = torch.tensor([first + virtual_ranks.slot()])
        return dist.group_size(), dist.all_gather(number).flatten().tolist()

    return shares.run([work] * counts[dist.rank()])


def test_ranks_with_shares_count_and_gather_shares(run_ranks):
    for ranks in (1, 3):
        for seen in run_ranks(ranks, seen_by_shares):
            assert set(map(repr, seen)) == {repr((SHARES, list(range(SHARES))))}


def sum_over_a_group():
    group = dist.group_of((dist.rank(),))
    with pytest.raises(RuntimeError, match="over all ranks, not over a group"):
        Shares((1, 1), at_once=1).run([lambda: dist.all_reduce_sum(torch.ones(1), group)])
    return True


def test_a_sum_of_shares_over_some_ranks_is_refused(run_ranks):
    assert run_ranks(2, sum_over_a_group) == [True, True]


def test_a_tensor_with_a_gradient_is_refused():
    """Over one process the gradient would go through, over several it would be lost."""
    values = torch.ones(3, requires_grad=True)
    for collective in (dist.all_reduce_sum, dist.all_gather):
        with pytest.raises(RuntimeError, match="no gradient flows through a collective"):
            collective(values * 2)
