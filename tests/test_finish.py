"""`segtrain train RUN --finish STEPS`: a branch is the run that was planned with its end."""

import pytest
from experiments import (
    assert_same_state,
    contents,
    last,
    losses,
    settings,
    small,
    train,
    write_config,
)

from segtrain.desk.commands import finish
from segtrain.desk.results.runs import summarize
from segtrain.errors import ConfigError
from segtrain.training.optim.schedule import base_lr, learning_rate


def write(data, path, *, steps, **schedule):
    options = small(
        data,
        eval={"every_steps": 2},
        train={"steps": steps, "batch_size": 4, "shares": 2},
        schedule=schedule,
    )
    options["augment"]["crop_size"] = [25, 33]
    return write_config(path, options)


def test_a_branch_has_the_bits_of_one_run_with_the_same_end(run_ranks, tmp_path, data):
    """The branch pauses, and goes on with two ranks; the trunk stays as it is."""
    trunk = write(data, tmp_path / "c.yaml", steps=5, kind="constant")
    planned = write(data, tmp_path / "p.yaml", steps=4, kind="constant", finish_from=2)
    assert run_ranks(1, train, planned, tmp_path / "planned") == [0]
    run, branch = tmp_path / "run", tmp_path / "run_finish"
    assert run_ranks(1, train, trunk, run, until=2) == [0]
    before = contents(run)
    finish.begin(run, None, branch, steps=2, overrides=())
    config = branch / "config.yaml"
    assert run_ranks(1, train, config, branch, True, until=3) == [0]
    assert run_ranks(2, train, config, branch, True) == [0, 0]
    assert contents(run) == before

    found, whole = last(branch), last(tmp_path / "planned")
    assert_same_state(found, whole)
    assert found.shares["exponents"] == whole.shares["exponents"]
    for tag in ("train/loss", "train/lr"):  # those before the branch are the trunk's
        assert losses(branch, tag) == losses(tmp_path / "planned", tag)
    assert losses(branch, "eval/mIoU") == losses(tmp_path / "planned", "eval/mIoU")[-1:]
    assert found.best["step"] == 4  # the trunk's scores do not count
    assert summarize(branch).state == "complete"
    line = f"branch of {run} at step 2, 2 more steps, lr 0.02 -> 0.00586\n"
    assert (branch / "train.log").read_text().count(line) == 1


@pytest.mark.parametrize(
    ("schedule", "step", "rate"),
    [
        ({"schedule": "constant", "warmup_steps": 6, "warmup_start": 0.25}, 2, 0.01),
        ({"schedule": "poly", "poly_power": 1.0, "min_lr": 0.01}, 10, 0.015),
        ({"schedule": "poly", "poly_power": 1.0, "min_lr": 0.01}, 20, 0.0105),
        ({"schedule": "constant", "finish_from": 16}, 19, 0.02 * (1 - 0.75**0.5)),
    ],
)
def test_a_branch_falls_from_the_rate_of_the_checkpoint(schedule, step, rate):
    """To min_lr; or from a rate that is given."""
    before = settings(steps=20, lr=0.02, **schedule)
    low = before.schedule.min_lr

    def rates(*overrides):
        config = finish._branch_config(before, step, 20, overrides, source="x")
        return [learning_rate(config, number) for number in range(step, step + 20)]

    assert rates()[0] == pytest.approx(rate, rel=1e-12)
    assert rates()[5] == pytest.approx(low + (rate - low) / 2, rel=1e-12)
    assert rates() == sorted(rates(), reverse=True)
    given = rates("optim.lr=0.04", "schedule.min_lr=0.002")
    assert (given[0], given[5]) == pytest.approx((0.04, 0.021), rel=1e-12)


def test_another_batch_leaves_the_rate_of_the_checkpoint():
    options = {"lr": 0.02, "lr_batch_size": 16, "batch_size": 8}
    before = settings(steps=20, schedule="constant", **options)
    config = finish._branch_config(before, 10, 20, ["train.batch_size=4"], source="x")
    assert base_lr(config) == base_lr(before) == config.optim.lr == 0.01


def test_a_rate_that_has_come_down_is_refused_where_little_would_change():
    """The repair is in the message."""
    before = settings(steps=10_000, lr=0.02, schedule="constant", finish_from=6)
    said = (
        r"0\.005 % of 0\.02, and would change next to nothing; choose one by --set optim\.lr=0\.02"
    )
    with pytest.raises(ConfigError, match=said):
        finish._branch_config(before, 10_000, 5, (), source="x")
    config = finish._branch_config(before, 10_000, 5, ["optim.lr=0.02"], source="x")
    assert learning_rate(config, 10_000) == 0.02
    assert finish._low_rate(before, config) == []
    before = settings(steps=100, lr=0.02)
    config = finish._branch_config(before, 100, 5, (), source="x")
    (line,) = finish._low_rate(before, config)
    assert line.startswith("the learning rate begins at 2% of 0.02; --set optim.lr=0.02")
