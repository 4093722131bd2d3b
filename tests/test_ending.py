"""A run that ends before train.steps, because of its hours or its score. Clocks are made up."""

import json
from itertools import count

import pytest
from experiments import (
    killed_in_evaluation,
    last,
    losses,
    small,
    stopped_after,
    train,
    write_config,
)

from segtrain.checkpoint.format import load
from segtrain.config import TrainConfig
from segtrain.distributed import collectives as dist
from segtrain.training.stop_criteria import StopCriteria


def test_hours_add_up_over_resumptions_and_do_not_run_in_between():
    now = [1000.0]
    train = TrainConfig(max_hours=2.0)
    first = StopCriteria(train, None, clock=lambda: now[0])
    now[0] += 7200  # nothing runs before the start
    assert first.hours == 0
    first.start()
    now[0] += 3600
    assert (first.hours, first.is_out_of_time(), first.reason()) == (1.0, False, "")
    saved = json.loads(json.dumps(first.fields()))
    now[0] = 5.0  # another machine
    second = StopCriteria(train, saved, clock=lambda: now[0])
    assert second.hours == 1.0
    second.start()
    now[0] += 3599
    assert not second.is_out_of_time()
    now[0] += 1
    assert second.is_out_of_time()
    assert second.reason() == "2 hours of training are used up (train.max_hours)"


def test_patience_counts_the_evaluations_since_the_best():
    ending = StopCriteria(TrainConfig(patience=2), None)
    for better, over in ((True, False), (False, False), (True, False), (False, False)):
        ending.count(better=better)
        assert ending.is_out_of_patience() == over
    again = StopCriteria(TrainConfig(patience=2), ending.fields())
    again.count(better=False)
    assert again.reason() == "no better mIoU in 2 evaluations (train.patience)"
    assert StopCriteria(TrainConfig(patience=3), again.fields()).reason() == ""


def by_clock(hours_a_step, function, *args):
    """`function` in a process where the clock of rank 0 follows the steps; others are far ahead."""
    from segtrain.commands.train import loop

    whole = loop.begin

    def begin_by_clock(run):
        first = run.state.step
        run.stop_criteria._clock = lambda: 3600.0 * hours_a_step * (run.state.step - first)
        if not dist.is_main():
            run.stop_criteria._clock = count(step=3600 * 99).__next__
        return whole(run)

    loop.begin = begin_by_clock
    return function(*args)


def options(data, **sections):
    train_section = {"steps": 9, "batch_size": 4} | sections.pop("train", {})
    sections = {"log": {"every_steps": 4}, **sections}
    values = small(data, train=train_section, **sections)
    values["augment"]["crop_size"] = [25, 33]
    return values


def test_a_run_ends_with_its_hours_over_resumptions_and_goes_on_with_more(
    run_ranks, tmp_path, data
):
    """After a request in step 5, the host learns of it in step 6."""
    plain = write_config(tmp_path / "plain.yaml", options(data))
    limited = write_config(tmp_path / "c.yaml", options(data, train={"max_hours": 2.0}))
    run = tmp_path / "run"
    assert run_ranks(1, by_clock, 0.5, stopped_after, 1, limited, run) == [143]
    assert last(run).ending == {"hours": 0.5 * last(run).step, "evaluations": 0}
    assert last(run).step < 4
    assert run_ranks(1, by_clock, 0.5, train, limited, run, True) == [0]
    assert (last(run).step, last(run).evaluated, last(run).best["step"]) == (6, 6, 6)
    assert last(run).ending["hours"] == 3.0
    log = (run / "train.log").read_text()
    assert "ended after 6 of 9 steps: 2 hours of training are used up (train.max_hours)\n" in log
    assert len(losses(run)) == 2  # step 4, and what was left at the end

    assert run_ranks(1, train, limited, run, True) == [0]
    log = (run / "train.log").read_text().splitlines()
    assert "already complete: 6 of 9 steps: 2 hours of training" in log[-3]
    assert log[-2].endswith(f"{run} --resume --set train.max_hours=null")
    assert log[-1].endswith(f"come down: segtrain train {run} --finish STEPS")
    assert run_ranks(1, train, plain, run, True) == [0]
    assert last(run).step == 9


def test_the_clock_of_rank_0_decides_for_all_ranks(run_ranks, tmp_path, data):
    config = write_config(tmp_path / "c.yaml", options(data, train={"max_hours": 1.0, "steps": 7}))
    assert run_ranks(2, by_clock, 0.5, train, config, tmp_path / "run") == [0] * 2
    assert (last(tmp_path / "run").step, last(tmp_path / "run").evaluated) == (4, 4)


def with_scores(better, function, *args):
    """`function` in a process where evaluations are better or not as listed."""
    from segtrain.commands.train import evaluation

    answers = iter(better)
    evaluation.is_better = lambda *_: next(answers)
    return function(*args)


def test_a_run_without_a_better_score_ends_after_its_last_evaluation(run_ranks, tmp_path, data):
    """It is not evaluated twice at the same step, and its last means are logged."""
    sections = {"eval": {"every_steps": 1}, "train": {"steps": 8, "patience": 2}}
    config = write_config(tmp_path / "c.yaml", options(data, **sections))
    run, scores = tmp_path / "run", [True, False, True, False, False]
    assert run_ranks(1, with_scores, scores, train, config, run) == [0]
    assert (last(run).step, last(run).evaluated, last(run).best["step"]) == (5, 5, 3)
    assert last(run).ending["evaluations"] == 2
    assert load(run / "checkpoints" / "best.pt").step == 3
    assert (len(losses(run, "eval/mIoU")), len(losses(run))) == (5, 2)
    log = (run / "train.log").read_text()
    assert "ended after 5 of 8 steps: no better mIoU in 2 evaluations (train.patience)\n" in log


@pytest.mark.slow
def test_an_evaluation_that_was_cut_short_is_made_up_for_before_the_run_ends(
    run_ranks, tmp_path, data
):
    """The hours are used up, the last step is saved, and then the run is killed."""
    config = write_config(tmp_path / "c.yaml", options(data, train={"max_hours": 1.0, "steps": 7}))
    run = tmp_path / "run"
    killed = (by_clock, 0.5, killed_in_evaluation, config, run)
    assert run_ranks(1, *killed) == ["killed"]
    assert (last(run).step, last(run).evaluated) == (4, 0)
    assert run_ranks(1, train, config, run, True) == [0]
    assert (last(run).step, last(run).evaluated) == (4, 4)
