"""Sums through shared memory: equal to gloo's, and what happens when a rank is lost."""

import os
import signal
import time
from pathlib import Path

import pytest
import torch

from segtrain.distributed import collectives as dist
from segtrain.distributed import process_group
from segtrain.distributed.shared_sum import MAX_BYTES, SharedSum, is_possible
from segtrain.errors import LostRanksError

pytestmark = pytest.mark.skipif(not is_possible(), reason="needs x86 and /dev/shm")

DTYPES = (torch.float64, torch.float32, torch.int64)
LENGTHS = (1, 3, 513, MAX_BYTES // 8)


def sums(seed):
    """Of many tensors of all types and lengths, in turn; and through gloo, which is the oracle."""
    generator = torch.Generator().manual_seed(seed + dist.rank())
    shared, through_gloo, gathered = [], [], []
    for round_ in range(60):
        dtype, length = DTYPES[round_ % 3], LENGTHS[round_ % 4]
        values = torch.randint(-9, 9, (length,), generator=generator).to(dtype)
        assert dist._shared_sum.takes(values)
        if round_ % 7 == dist.rank():
            time.sleep(0.005)  # each is late now and then
        wanted, rows = values.clone(), [values.clone() for _ in range(dist.world_size())]
        torch.distributed.all_reduce(wanted)
        torch.distributed.all_gather(rows, values)
        gathered.append((dist._shared_sum.gather(values), torch.stack(rows)))
        result = dist.all_reduce_sum(values)
        assert result is values
        shared.append(result.clone())
        through_gloo.append(wanted)
    floats = dist.all_reduce_sum(torch.randn(100, generator=generator, dtype=torch.float64))
    return shared, through_gloo, gathered, floats


@pytest.mark.parametrize("num_ranks", [pytest.param(2, marks=pytest.mark.slow("distributed")), 3])
def test_sums_and_gathered_rows_are_those_of_gloo(run_ranks, num_ranks):
    """Bit for bit on every rank; rows are copies, which sums that follow do not change."""
    results = run_ranks(num_ranks, sums, 0)
    for shared, through_gloo, gathered, floats in results:
        assert len(shared) == len(gathered) == 60
        for mine, wanted in zip(shared, through_gloo, strict=True):
            assert torch.equal(mine, wanted)  # small whole numbers: exact in any order
        assert all(torch.equal(rows, wanted) for rows, wanted in gathered)
        assert torch.equal(floats, results[0][3])


def routes():
    """What went through shared memory, by what was added up."""
    taken = []
    add = dist._shared_sum.add
    dist._shared_sum.add = lambda tensor: taken.append(tensor.shape) or add(tensor)
    long = torch.ones(MAX_BYTES // 8 + 1, dtype=torch.float64)
    tensors = [torch.ones(2), torch.ones(3).half(), long, torch.ones(2, 3)]
    totals = [dist.all_reduce_sum(tensor).sum().item() for tensor in tensors]
    dist.make_groups([(0, 1)])
    if dist.rank() < 2:
        totals.append(dist.all_reduce_sum(torch.ones(5), dist.group_of((0, 1))).sum().item())
    return [tuple(shape) for shape in taken], totals


def test_only_small_tensors_of_all_ranks_are_shared(run_ranks):
    results = run_ranks(3, routes)
    for rank, (taken, totals) in enumerate(results):
        assert taken == [(2,), (2, 3)]
        wanted = [6, 9, 3 * (MAX_BYTES // 8 + 1), 18]
        assert totals == wanted + [10] * (rank < 2)


def different_lengths():
    with pytest.raises(RuntimeError, match="different numbers of values: 2, 3"):
        dist.all_reduce_sum(torch.ones(2 + dist.rank()))
    return True


def test_ranks_in_different_places_are_told(run_ranks):
    assert run_ranks(2, different_lengths) == [True, True]


@pytest.mark.parametrize(("how", "words"), [("dies", "has ended"), ("stops", "does not come")])
def test_a_rank_that_is_gone_is_noticed(tmp_path, how, words):
    """By the lock that ends with its process, or by the timeout if it lives."""
    size = 2
    path = SharedSum.create(size)
    child = os.fork()
    if child == 0:
        its = SharedSum(path, 1, size, timeout_s=60)  # noqa: F841  (held until the process ends)
        os.kill(os.getpid(), signal.SIGSTOP)
        os._exit(0)
    try:
        os.waitpid(child, os.WUNTRACED)
        mine = SharedSum(path, 0, size, timeout_s=0.3)
        os.unlink(path)
        if how == "dies":
            os.kill(child, signal.SIGKILL)
            os.waitid(os.P_PID, child, os.WEXITED | os.WNOWAIT)  # a busy machine takes its time
        with pytest.raises(LostRanksError, match=f"rank 1.*{words}"):
            mine.add(torch.ones(1))
        mine.close()
    finally:
        os.kill(child, signal.SIGKILL)
        os.waitpid(child, 0)


def where_memory_fails(place):
    """All ranks, again, when rank 0 cannot make the memory or rank 1 cannot open it."""

    def fail(*args, **kwargs):
        raise OSError("No space left on device")

    dist.use_shared_sum(None)
    if place == "create":
        SharedSum.create = fail
    elif dist.rank() == 1:
        SharedSum.__init__ = fail
    dist.use_shared_sum(process_group._open_shared_sum(timeout_s=60))
    assert dist._shared_sum is None
    return dist.all_reduce_sum(torch.ones(2)).tolist()


@pytest.mark.parametrize("place", ["create", "open"])
def test_gloo_does_it_where_memory_cannot_be_shared(run_ranks, place):
    assert run_ranks(2, where_memory_fails, place) == [[2.0, 2.0]] * 2
    assert not list(Path("/dev/shm").glob("segtrain-*"))
