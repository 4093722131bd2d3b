"""`segtrain train --until STEP`: a run that pauses is the run that does not."""

import json
import shutil

import pytest
import yaml
from experiments import (
    assert_same_state,
    contents,
    killed_in_evaluation,
    last,
    losses,
    refusal,
    small,
    train,
    write_config,
)

from segtrain.errors import DataError


@pytest.fixture(scope="module")
def alone(run_ranks, tmp_path_factory, data):
    """A run of 3 steps, evaluated after 2 and 3, and its config."""
    folder = tmp_path_factory.mktemp("alone")
    train_options = {"steps": 3, "batch_size": 4, "shares": 2}
    options = small(data, eval={"every_steps": 2}, train=train_options)
    options["augment"]["crop_size"] = [25, 33]
    config = write_config(folder / "c.yaml", options)
    assert run_ranks(1, train, config, folder / "run") == [0]
    return config, folder / "run"


def test_a_run_that_pauses_ends_with_the_bits_of_one_that_does_not(run_ranks, tmp_path, alone):
    config, whole = alone
    run = tmp_path / "run"
    for until, evaluated in ((1, 0), (3, 3)):
        assert run_ranks(1, train, config, run, until > 1, until=until) == [0]
        assert (last(run).step, last(run).evaluated) == (until, evaluated)
    assert_same_state(last(run), last(whole))
    assert last(run).best == last(whole).best
    for tag in ("train/loss", "train/lr", "eval/mIoU"):
        assert losses(run, tag) == losses(whole, tag)
    assert receipts(run) == receipts(whole)
    log = (run / "train.log").read_text()
    assert log.count("paused after step 1, which is saved\n") == 1
    assert f"to train on: segtrain train {run} --resume\n" in log


def failing_at_once(config, directory, error):
    """Resumes; instead of its first step comes an error."""
    from segtrain.training.step import TrainStep

    def fail(*_):
        raise error

    TrainStep.__call__ = fail
    return refusal(lambda: train(config, directory, True, accept_changes=True))


@pytest.fixture(scope="module")
def paused(run_ranks, tmp_path_factory, alone):
    """A run of the same config that paused after step 1."""
    run = tmp_path_factory.mktemp("paused") / "run"
    assert run_ranks(1, train, alone[0], run, until=1) == [0]
    return run


@pytest.mark.parametrize("how", ["complete", "until", "fails"])
def test_a_resumption_without_a_step_changes_nothing_but_the_log(
    run_ranks, tmp_path, alone, paused, how
):
    """Neither do changed options count, nor are values of later steps dropped."""
    config, whole = alone
    run = shutil.copytree(whole if how == "complete" else paused, tmp_path / "run")
    for name in ("metrics.jsonl", "receipts.jsonl"):  # as a killed run leaves them
        with (run / name).open("a") as file:
            file.write(json.dumps({"step": 9}) + "\n{cut")
    (run / "environment.json").write_text('{"segtrain": "0", "python": "0", "libraries": {}}')
    options = yaml.safe_load(config.read_text())
    options["optim"]["lr"] = 0.5
    other = write_config(tmp_path / "other.yaml", options)
    before = contents(run)
    if how == "fails":
        error = DataError("image.png: damaged")
        assert run_ranks(1, failing_at_once, other, run, error) == [("DataError", 3, str(error))]
    else:
        until = 1 if how == "until" else None
        assert run_ranks(1, train, other, run, True, accept_changes=True, until=until) == [0]
    after = contents(run)
    changed = {name for name in before | after if before.get(name) != after.get(name)}
    assert changed <= {"train.log"}
    said = "note: nothing was done: the changes above were not used and are not kept\n"
    assert (said in (run / "train.log").read_text()) == (how != "fails")
    assert ("already at step 1\n" in (run / "train.log").read_text()) == (how == "until")


def test_an_evaluation_that_was_cut_short_is_done_where_the_run_pauses(run_ranks, tmp_path, alone):
    config, whole = alone
    run = tmp_path / "run"
    assert run_ranks(1, killed_in_evaluation, config, run) == ["killed"]
    assert (last(run).step, last(run).evaluated) == (2, 0)
    assert run_ranks(1, train, config, run, True, until=2) == [0]
    assert (last(run).step, last(run).evaluated) == (2, 2)
    assert losses(run, "eval/mIoU") == losses(whole, "eval/mIoU")[:1]


def receipts(run):
    return (run / "receipts.jsonl").read_text().splitlines()
