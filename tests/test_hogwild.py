"""train.parallel hogwild: processes that share their weights and do not wait for each other."""

import itertools
import os
from typing import NamedTuple

import pytest
import torch
from experiments import curve, experiment, last, refusal, sections, train, write_config
from processes import Command, save_and_stop

from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import batch_findings
from segtrain.errors import ConfigError, LostRanksError
from segtrain.trainer.preflight import check_experiment, start_lines
from segtrain.training.step_sync import StepSync
from segtrain.training.ways import by_process
from segtrain.training.ways.hogwild_way import Hogwild, shared_copies

STEPS = 4


def config(data, directory, parallel="hogwild", name="c.yaml", every_steps=None, **options):
    values = experiment(
        data,
        augment={"crop_size": [25, 33]},
        model={"num_stages": 2, "output_stride": 8, "head_channels": 8, "aux_channels": 8},
        eval={"every_steps": every_steps},
        **sections(**{"steps": STEPS, "batch_size": 4, "parallel": parallel} | options),
    )
    return write_config(directory / name, values)


def counters(model):
    return [value.item() for key, value in model.items() if key.endswith("num_batches_tracked")]


def test_a_single_process_is_a_single_rank_bit_for_bit(tmp_path, data):
    """Nobody else writes, and the learning rate is divided by one."""
    runs = [tmp_path / way for way in ("sync", "hogwild")]
    for run in runs:
        assert train(config(data, tmp_path, run.name, steps=2), run) == 0
    one, other = (last(run).model for run in runs)
    assert all(torch.equal(value, other[key]) for key, value in one.items())
    assert "this is only one" in (runs[1] / "train.log").read_text()


def test_processes_share_weights_and_statistics_and_do_not_wait(run_ranks, tmp_path, data):
    held = {"zero": ["backbone.layer1.0.conv2.weight[:, 29]"]}
    file = config(data, tmp_path, every_steps=2, optimizer="muon", layers=[held])
    assert run_ranks(2, train, file, tmp_path / "run") == [0, 0]
    record = last(tmp_path / "run")
    assert record.step == STEPS
    kernel = record.model["backbone.layer1.0.conv2.weight"]
    assert (kernel[:, 29] == 0).all()
    assert (kernel[:, 28] != 0).all()
    # Each alone would have counted to STEPS; some updates may be lost.
    assert all(STEPS < counter <= 2 * STEPS for counter in counters(record.model))
    assert all(torch.isfinite(value).all() for value in record.model.values())
    log = (tmp_path / "run" / "train.log").read_text()
    assert "parallel   hogwild: 2 processes change the same weights without waiting" in log
    assert "norm       batch norm, each process alone; statistics over 2 images" in log
    assert [step for step, _ in curve(tmp_path / "run", "eval/mIoU")] == [2, 4]


def sums_alone(value):
    tensor = torch.tensor([float(value)])
    with dist.alone():
        mine = dist.all_reduce_sum(tensor.clone() + dist.rank())
        gathered = dist.all_gather(tensor)
        told = dist.all_gather_object(dist.rank())
        size = dist.group_size(), dist.group_rank()
        dist.barrier()
    together = dist.all_reduce_sum(tensor)
    return mine.item(), len(gathered), told, size, dist.world_size(), together.item()


def test_alone_every_collective_is_that_of_one_process(run_ranks):
    found = run_ranks(2, sums_alone, 3)
    assert found == [(3.0, 1, [0], (1, 0), 2, 6.0), (4.0, 1, [1], (1, 0), 2, 6.0)]


def changed_by_the_other():
    layout = torch.zeros(2, 3, 4, 5).to(memory_format=torch.channels_last)
    mine = [layout + dist.rank() + 1, torch.tensor(7 + dist.rank())]
    matrix, number = shared_copies(mine)
    assert matrix.stride() == layout.stride()
    before = matrix[0, 0, 0, 0].item(), number.item()
    dist.barrier()
    if dist.rank() == 1:
        matrix[1, 2, 3, 4] = 99
        number.add_(1)
    dist.barrier()
    os.environ["LOCAL_WORLD_SIZE"] = "1"
    elsewhere = refusal(shared_copies, mine)
    return before, matrix[1, 2, 3, 4].item(), number.item(), elsewhere


def test_copies_of_one_machine_hold_the_values_of_rank_0_and_changes_of_all(run_ranks):
    refused = ("ExecutionError", 6, "processes of several machines cannot share memory")
    assert run_ranks(2, changed_by_the_other) == [((1.0, 7), 99.0, 8, refused)] * 2


class Done(NamedTuple):
    step: int


def taken(meeting, steps):
    """Steps that cost nothing, as a training takes them."""
    for done in map(Done, steps):
        with meeting.around(None):
            pass
        meeting.after_step(None, None, done)
        yield done


def lead():
    """How far rank 0 gets while rank 1 stands still."""
    sync = StepSync(lambda: False)
    meeting = Hogwild(sync, (lambda: False,) * 2, step=10, timeout_s=0.5)
    steps = taken(meeting, range(11, 40))
    if dist.rank() == 1:
        next(steps)
    dist.barrier()
    done = []
    if dist.rank() == 0:
        with pytest.raises(LostRanksError, match="waited 0 s for rank 1"):
            done.extend(result.step for result in steps)
    dist.barrier()
    return done


def test_nobody_runs_far_ahead(run_ranks):
    """Or a stop would wait until the slowest has caught up."""
    assert run_ranks(2, lead)[0] == [11, 12, 13, 14, 15]


def meetings(stops, dues, paces):
    """The steps after which this process meets the others, and what they then agree on.

    stops: after which step each rank is asked to stop; dues: steps after which all meet.
    """
    rank, now = dist.rank(), 0
    sync = StepSync(lambda: False)
    saves = iter([False, True] + [False] * 50)
    requests = (
        lambda: stops[rank] is not None and now >= stops[rank],
        lambda: rank == 1 and next(saves),
    )
    meeting = Hogwild(sync, requests, step=0, timeout_s=60)
    met = []
    for done in taken(meeting, range(1, 31)):
        now = done.step
        if rank == 0:
            torch.rand(paces).sum()
        if meeting.have_met(now, due=now in dues, is_last=False):
            met.append((now, sync.stopped, sync.pop_save_request()))
            dist.barrier()
        if sync.stopped:
            break
    return met


def all_meetings(cases):
    return [meetings(stops, (2, 20), pace) for stops, pace in cases]


def test_all_meet_after_the_same_step(run_ranks):
    """Both orders: the fast process is asked, or the slow one."""
    cases = list(itertools.product([(None, 7), (12, 7), (3, None)], (1, 1_000_000)))
    ranks = run_ranks(2, all_meetings, cases)
    for (stops, _), one, other in zip(cases, *ranks, strict=True):
        assert one == other
        steps = [step for step, _, _ in one]
        assert steps == sorted(set(steps))
        assert one[-1][1]
        assert not any(stopped for _, stopped, _ in one[:-1])
        # Nobody stops before being asked, or long after it, or passes a step where all meet.
        first = min(step for step in stops if step is not None)
        assert first <= steps[-1] <= first + 6
        assert 2 in steps
        assert sum(saved for _, _, saved in one) == 1


def test_signals_save_and_the_run_goes_on(run_ranks, tmp_path, data):
    run = tmp_path / "run"
    file = config(data, tmp_path, steps=400)
    step = save_and_stop(Command(tmp_path, "train", file, "--nproc", 2, "--output", run), run)
    assert step < 400
    longer = config(data, tmp_path, steps=step + 2)
    assert run_ranks(2, train, longer, run, True, accept_changes=True) == [0, 0]
    assert last(run).step == step + 2


def test_a_loss_that_is_not_finite_ends_all(run_ranks, tmp_path, data):
    file, run = config(data, tmp_path, lr=1e30), tmp_path / "run"
    ended = run_ranks(2, refusal, train, file, run)
    assert any(code == 5 and "is not finite" in said for _, code, said in ended)
    assert not (run / "checkpoints" / "last.pt").exists()


def test_processes_divide_the_learning_rate_and_the_images(tmp_path, data):
    settings = load_config(config(data, tmp_path, batch_size=6, lr=0.02, min_lr=0.008))
    mine = by_process(settings, 4)
    assert (mine.optim.lr, mine.schedule.min_lr) == (0.005, 0.002)
    sets = [open_dataset(settings.data, split) for split in ("train", "val")]
    lines = start_lines(settings, tmp_path, torch.nn.Linear(1, 1), *sets, ["cpu"] * 4, 0)
    assert any(line.startswith("lr         0.005 ->") for line in lines)
    with pytest.raises(ConfigError, match="hogwild runs on CPUs only"):
        check_experiment(settings, *sets, device=torch.device("cuda"))
    assert batch_findings(settings, 3) == []
    (found,) = batch_findings(settings, 4)
    assert "6 images are not alike many for 4 processes" in found
    (found,) = batch_findings(settings, 6)
    assert "use at least 12 (train.parallel: hogwild, 6 processes)" in found
