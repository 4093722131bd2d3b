"""Sums in the order of shares."""

from functools import partial, reduce

import numpy as np
import pytest
import torch

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.layout import even, partition, shares_of_ranks
from segtrain.distributed.shared_sum import MAX_BYTES
from segtrain.distributed.shares import Shares

SHARES = 8


def parts(dtype, length):
    """Of every share, values whose float sum depends on the order; the first are all -0.0."""
    rng = np.random.default_rng(0)
    values = rng.normal(size=(SHARES, length)) * 10.0 ** rng.integers(-8, 8, (SHARES, length))
    values[:, 0] = -0.0
    return values.astype(dtype)


CASES = [("float32", 1), ("float32", 300), ("float64", MAX_BYTES // 8), ("int64", 300)]


def with_shares():
    """The sums of CASES, and what the shares of this rank see."""
    counts = shares_of_ranks(SHARES, even(dist.world_size()))
    mine = list(partition(SHARES, dist.world_size(), dist.rank()))
    shares = Shares(tuple(counts), at_once=2)
    results = []
    for case in CASES:
        whole = torch.from_numpy(parts(*case))
        total = dist.ordered_sum(whole[mine], counts)
        in_threads = shares.run([lambda t=whole[i]: dist.all_reduce_sum(t) for i in mine])
        assert all(torch.equal(total, other) for other in in_threads)
        assert torch.equal(whole[mine], torch.stack(in_threads))  # in place
        results.append(total.numpy())

    def seen():
        number = torch.tensor([mine[virtual_ranks.slot()]])
        return dist.group_size(), dist.all_gather(number).flatten().tolist()

    assert shares.run([seen] * len(mine)) == [(SHARES, list(range(SHARES)))] * len(mine)
    return results


def by_both_ways():
    """Through shared memory, then through gloo."""
    by_memory = with_shares()
    dist.use_shared_sum(None)
    dist.make_groups([(1, 2)])
    alone, pair = dist.group_of((dist.rank(),)), dist.rank() > 0 and dist.group_of((1, 2))
    for group, wanted in ((alone, 1), (pair, 2)) if pair else ((alone, 1),):
        total = partial(dist.all_reduce_sum, torch.ones(1), group)
        assert Shares((1, 1, 1), at_once=1).run([total]) == [wanted]
    return by_memory, with_shares()


def test_shares_are_counted_and_added_in_their_order_on_any_number_of_ranks(run_ranks):
    """The oracle adds numpy's scalars one after another. Three ranks have 3 + 3 + 2 of eight."""
    columns = parts("float32", 300)
    assert (reduce(np.add, columns[::-1]) != reduce(np.add, columns)).any()
    wanted = [reduce(np.add, parts(*case)).tobytes() for case in CASES]
    for results in [with_shares(), *(way for ways in run_ranks(3, by_both_ways) for way in ways)]:
        assert [total.tobytes() for total in results] == wanted


def test_a_tensor_with_a_gradient_is_refused():
    """Over one process the gradient would go through, over several it would be lost."""
    values = torch.ones(3, requires_grad=True)
    for collective in (dist.all_reduce_sum, dist.all_gather):
        with pytest.raises(RuntimeError, match="no gradient flows through a collective"):
            collective(values * 2)
