"""`checkpoint.every_s`: one rank's clock lets all ranks save, and no bit depends on it."""

import json
import re
import signal
from itertools import count

import pytest
from experiments import assert_same_state, last, small, stopped_after, train, write_config

from segtrain.checkpoint.manager import CheckpointManager
from segtrain.distributed import collectives as dist


def test_it_asks_once_for_each_save_from_the_first_step_on(tmp_path, monkeypatch):
    now = [1000.0]
    manager = CheckpointManager(tmp_path, every_s=60.0, clock=lambda: now[0])
    monkeypatch.setattr(manager, "_save", lambda *_, **__: None)

    def asks(seconds):
        now[0] += seconds
        return manager.ask_by_clock(), manager.is_overdue

    assert [asks(s) for s in (5000, 59, 0.9)] == [(False, False)] * 3  # set-up does not count
    assert [asks(s) for s in (0.1, 0, 99)] == [(True, True), (False, True), (False, True)]
    manager.save_last(None)
    assert [asks(s) for s in (0, 59, 1)] == [(False, False), (False, False), (True, True)]
    never = CheckpointManager(tmp_path, clock=count(step=1e9).__next__)
    assert not any(never.ask_by_clock() for _ in range(9))


def by_clock(function, *args):
    """`function`, with 10 s a step on the clock of rank 0; those of others run far ahead."""
    from segtrain.commands.train import loop

    whole = loop.begin

    def begin_by_clock(run):
        run.checkpoints._clock = lambda: 10.0 * run.state.step
        if not dist.is_main():
            run.checkpoints._clock = count(step=1e6).__next__
        return whole(run)

    loop.begin = begin_by_clock
    return function(*args)


def saved_steps(run):
    """Those that train.log says, all by the clock."""
    log = (run / "train.log").read_text()
    assert "SIGUSR1" not in log
    return [int(x) for x in re.findall(r"saved step (\d+), as checkpoint.every_s asked for", log)]


def options(data, every_s, **more):
    train_section = {"steps": 12, "batch_size": 4} | more
    # A save after step 7 is due by the steps, when a request is on its way.
    checkpoint = {"every_s": every_s, "every_steps": 7}
    return small(data, train=train_section, checkpoint=checkpoint, data={"num_workers": 1})


@pytest.mark.parametrize("more", [{}, {"shares": 4}], ids=["", "shares"])
def test_all_ranks_save_by_the_clock_of_rank_0_and_end_with_the_same_bits(
    run_ranks, tmp_path, data, more
):
    plain = write_config(tmp_path / "plain.yaml", options(data, None, **more))
    clocked = write_config(tmp_path / "clocked.yaml", options(data, 20.0, **more))
    assert run_ranks(2, train, plain, tmp_path / "plain") == [0, 0]
    assert saved_steps(tmp_path / "plain") == []
    assert run_ranks(2, by_clock, train, clocked, tmp_path / "clocked") == [0, 0]
    # Asked with the first step that begins 20 s after a save; the host learns of it a step later.
    # The request that the save after step 7 answers is not answered once more.
    assert saved_steps(tmp_path / "clocked") == [4, 7, 11]
    assert_same_state(last(tmp_path / "clocked"), last(tmp_path / "plain"))


def test_a_run_goes_on_from_there_with_other_seconds_and_the_same_bits(
    run_ranks, forkserver, tmp_path, data
):
    plain = write_config(tmp_path / "plain.yaml", options(data, None))
    clocked = write_config(tmp_path / "clocked.yaml", options(data, 20.0))
    run = tmp_path / "run"
    assert run_ranks(1, train, plain, tmp_path / "plain") == [0]
    words = (stopped_after, 6, clocked, run, False, signal.SIGKILL)
    process = forkserver.Process(target=by_clock, args=words)
    process.start()
    process.join()
    assert process.exitcode == -signal.SIGKILL
    assert last(run).step == 4
    assert run_ranks(1, train, plain, run, True) == [0]  # nothing to accept
    assert_same_state(last(run), last(tmp_path / "plain"))
    steps = [json.loads(line)["step"] for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert steps == sorted(steps)


def test_processes_without_waiting_save_by_the_clock_too(run_ranks, tmp_path, data):
    values = options(data, 20.0, parallel="hogwild")
    values["optim"]["ema_decay"] = None
    config = write_config(tmp_path / "c.yaml", values)
    assert run_ranks(2, by_clock, train, config, tmp_path / "run") == [0, 0]
    assert len(saved_steps(tmp_path / "run")) >= 2
