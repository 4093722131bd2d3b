"""A run that was stopped or killed ends as if nothing had happened."""

import json
import os
import random
import re
import shutil
import signal
from math import nan

import pytest
from experiments import (
    after_each_step,
    assert_same_state,
    bits,
    curve,
    flip_bit,
    last,
    losses,
    refusal,
    signalled_in_evaluation,
    small,
    stopped_after,
    train,
    write_config,
    write_data,
)
from processes import Command, logged_steps
from torch import nn

from segtrain import __version__
from segtrain.checkpoint import format as checkpoint_format
from segtrain.checkpoint.format import load
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.checkpoint.trained import load_initial, load_model
from segtrain.config import load_config
from segtrain.distributed.machine import descendants, is_alive
from segtrain.errors import CheckpointError
from segtrain.training.step import TrainStep


@pytest.mark.fault(1, 16)
def test_a_run_killed_at_a_random_step_ends_with_the_weights_of_one_left_alone(
    run_ranks, tmp_path, data
):
    """Two ranks with loader workers, of which one gets SIGKILL."""
    options = small(
        data,
        data={"num_workers": 1},
        augment={"crop_size": [25, 33]},
        train={"steps": 5},
        checkpoint={"every_steps": 2},
    )
    config = write_config(tmp_path / "c.yaml", options)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    rng = random.SystemRandom()
    step, victim = rng.randint(3, 4), rng.randint(0, 1)
    print(f"SIGKILL to rank {victim} after step {step}")

    command = Command(tmp_path, "train", config, "--nproc", 2, "--output", killed)
    command.wait_for_step(killed, step)
    everyone = descendants(command.process.pid)
    os.kill(command.ranks()[victim], signal.SIGKILL)
    assert command.wait() == 6
    (line,) = command.errors.splitlines()
    assert line.startswith(f"segtrain: rank {victim} was ended by SIGKILL (out of memory?)")
    assert [pid for pid in everyone if is_alive(pid)] == []

    for run in (killed, alone):
        assert run_ranks(2, train, config, run, run == killed) == [0, 0]
    assert_same_state(last(killed), last(alone))
    assert last(killed).best == last(alone).best
    assert logged_steps(killed) == list(range(1, 6))
    assert [step for step, _ in curve(killed, "train/loss")] == list(range(1, 6))
    assert [step for step, _ in curve(killed, "eval/mIoU")] == [5]
    for tag in ("train/loss", "eval/mIoU"):
        assert losses(killed, tag) == losses(alone, tag)


def killed_at(where, step, config, directory, resume):
    """Trains in this process, which ends by SIGKILL at a place that can be told exactly."""
    from segtrain.files import manifest
    from segtrain.trainer import evaluation

    def die(*_, **__):
        os.kill(os.getpid(), signal.SIGKILL)

    class DyingFile(manifest.HashingFile):
        def write(self, data):
            return die() if self.num_bytes > 100_000 else super().write(data)

    if where == "evaluation":
        evaluation.evaluate_dataset = die

    def act(result):
        if where == "training" and result.step == step:
            die()
        if where == "keep" and result.step == step:
            CheckpointManager.keep = die
        if where == "checkpoint" and result.step == step:
            checkpoint_format.HashingFile = DyingFile

    after_each_step(act)
    if where == "training" and step == 0:
        TrainStep.__call__ = die
    train(config, directory, resume)


# An epoch has two steps.
DEATHS = (
    ("training", 0),
    ("training", 2),  # the last step of an epoch: the next run begins in its midst
    ("checkpoint", 3),  # the next one begins with an epoch
    ("evaluation", 4),
    ("keep", 6),  # before step_0000006.pt, and so last.pt, is written
)


@pytest.mark.slow("commands", "trainer", "checkpoint", "files", "training", "data", "run")
@pytest.mark.fault(1, 3, 45, 46)
def test_wherever_a_run_is_killed_it_ends_with_the_same_bits(run_ranks, forkserver, tmp_path, data):
    """With augmentation, dropout, averaged weights and two loader workers.

    At last the newest checkpoint is damaged too, which costs a step.
    """
    options = small(
        data,
        data={"num_workers": 2},
        augment={"crop_size": [25, 33]},
        train={"steps": 7, "batch_size": 4},
        eval={"every_steps": 4},
        checkpoint={"every_steps": 1, "keep_every_steps": 3},
    )
    config = write_config(tmp_path / "c.yaml", options)
    alone, killed = tmp_path / "alone", tmp_path / "killed"
    assert run_ranks(1, train, config, alone) == [0]

    steps = []
    for where, step in DEATHS:
        resume = (killed / "config.yaml").exists()
        process = forkserver.Process(target=killed_at, args=(where, step, config, killed, resume))
        process.start()
        process.join(120)
        assert process.exitcode == -signal.SIGKILL, (where, step)
        saved = (killed / "checkpoints" / "last.pt").exists()
        steps.append(last(killed).step if saved else None)
    # What was saved before each death: a step less where it came before or in the saving.
    assert steps == [None, 1, 2, 4, 5]
    path = killed / "checkpoints" / "last.pt"
    flip_bit(path)
    assert run_ranks(1, train, config, killed, True) == [0]
    assert_same_state(last(killed), last(alone))
    assert last(killed).best == last(alone).best
    kept = sorted(path.name for path in (killed / "checkpoints").glob("step_*"))
    assert kept == ["step_0000003.pt", "step_0000006.pt"]
    for tag in ("train/loss", "eval/mIoU"):
        assert losses(killed, tag) == losses(alone, tag)
    log = (killed / "train.log").read_text()
    assert f"{path}: damaged" in log
    assert "previous.pt instead, step 4" in log


@pytest.mark.fault(43)
def test_a_run_in_one_process_stops_evaluates_and_completes_when_it_is_resumed(
    run_ranks, tmp_path, data
):
    """Asked to stop in the last step, it leaves the evaluation to the resumption."""
    config = write_config(tmp_path / "c.yaml", small(data, train={"steps": 2}))
    run = tmp_path / "run"
    assert run_ranks(1, stopped_after, 1, config, run) == [143]
    assert (last(run).step, last(run).evaluated, last(run).best) == (2, 0, None)
    assert run_ranks(1, train, config, run, True) == [0]
    assert (last(run).step, last(run).evaluated, last(run).best["step"]) == (2, 2, 2)
    assert load(run / "checkpoints" / "best.pt").step == 2
    assert len(losses(run, "eval/mIoU")) == 1

    before = (run / "metrics.jsonl").read_text()
    assert run_ranks(1, train, config, run, True) == [0]
    said, longer = (run / "train.log").read_text().splitlines()[-2:]
    assert "already complete: 2 steps, best mIoU" in said
    assert longer.endswith(f"to train longer: segtrain train {run} --finish STEPS")
    assert (run / "metrics.jsonl").read_text() == before

    fewer = write_config(tmp_path / "fewer.yaml", small(data, train={"steps": 1}))
    assert run_ranks(1, train, fewer, run, True, accept_changes=True) == [0]
    said, _, note = (run / "train.log").read_text().splitlines()[-3:]
    assert "already complete: 2 steps (train.steps 1), best mIoU" in said
    assert "note: nothing was done: the changes above were not used" in note
    assert last(run).step == 2


@pytest.mark.parametrize(
    ("score", "best", "better"),
    [(0.0, None, True), (0.0, nan, True), (nan, None, False), (0.2, 0.2, False), (nan, 0.2, False)],
)
def test_a_score_of_nan_is_never_the_best(score, best, better):
    """NaN is the score of a split that shows no class; older checkpoints have it as the best."""
    from segtrain.trainer.evaluation import is_better

    before = None if best is None else {"step": 1, "by": "mIoU", "score": best}
    assert is_better(score, before) == better


@pytest.fixture(scope="module")
def halfway(run_ranks, tmp_path_factory, data):
    """A config of two steps, and its run after one."""
    where = tmp_path_factory.mktemp("halfway")
    config = write_config(where / "c.yaml", small(data, train={"steps": 2}))
    assert run_ranks(1, train, config, where / "run", until=1) == [0]
    return config, where / "run"


@pytest.mark.fault(42)
def test_changes_that_are_meant_are_shown_and_take_effect(run_ranks, tmp_path, data, halfway):
    """The optimizer's state would bring the old values back."""
    run = shutil.copytree(halfway[1], tmp_path / "run")
    new = {"train": {"steps": 2}, "optim": {"lr": 0.01, "momentum": 0.5}}
    config = write_config(tmp_path / "c.yaml", small(data, **new))
    ((kind, code, said),) = run_ranks(1, refusal, train, config, run, True)
    assert (kind, code) == ("ConfigError", 2)
    assert "\n  optim.lr: 0.02 there, 0.01 now\n  optim.momentum: 0.9 there, 0.5 now\n" in said
    assert "\nif the changes are meant: add --accept-changes" in said
    assert run_ranks(1, train, config, run, True, accept_changes=True) == [0]
    (group, *_) = last(run).optimizer["param_groups"]
    assert group["momentum"] == 0.5
    assert group["lr"] < 0.01
    log = (run / "train.log").read_text()
    assert "changed    optim.momentum: 0.9 there, 0.5 now" in log
    assert len(losses(run)) == 2
    assert run_ranks(1, train, config, run, True) == [0]  # now it is the run's config


@pytest.mark.fault(46)
def test_a_run_begins_anew_only_if_it_has_never_saved(run_ranks, tmp_path, data):
    """What it was is told by an evaluation in its metrics: a checkpoint comes before it."""
    config = write_config(tmp_path / "c.yaml", small(data, train={"steps": 2}))
    run = tmp_path / "run"
    assert run_ranks(1, train, config, run, True) == [0]
    fresh = f"{run}: nothing to resume; a new run starts"
    assert (run / "train.log").read_text().count(fresh) == 1
    metrics, once = run / "metrics.jsonl", losses(run)
    before = metrics.read_text()
    for name in ("last.pt", "previous.pt"):
        (run / "checkpoints" / name).unlink()
    ((kind, code, said),) = run_ranks(1, refusal, train, config, run, True)
    assert (kind, code) == ("CheckpointError", 4)
    assert "last.pt and others have been removed; put one back" in said
    assert metrics.read_text() == before

    # As it was killed before its first checkpoint.
    shutil.rmtree(run / "checkpoints")
    (run / "checkpoints").mkdir()
    (run / "checkpoints" / ".last.pt.1234.tmp").write_bytes(b"half")
    metrics.write_text("".join(x for x in before.splitlines(True) if "eval/" not in x))
    assert run_ranks(1, train, config, run, True) == [0]
    assert losses(run) == once
    log = (run / "train.log").read_text()
    said = "warning: a run began in this directory and there is no checkpoint of it"
    assert (log.count(said), log.count(fresh)) == (1, 1)
    names = sorted(path.name for path in (run / "checkpoints").iterdir())
    assert names == ["best.pt", "last.pt", "manifest.json", "previous.pt"]
    assert [step for step, _ in curve(run, "train/loss")] == [1, 2]


@pytest.fixture(scope="module")
def alone_with_evaluations(run_ranks, tmp_path_factory):
    """A config with an evaluation of 16 images after each of two steps, and its undisturbed run."""
    root = tmp_path_factory.mktemp("evaluations")
    write_data(root, size=(40, 56), num_val=16)
    options = small(
        root,
        norm={"precise_batches": 8},
        train={"steps": 2, "batch_size": 4, "shares": 2},
        optim={"ema_decay": None},
        eval={"every_steps": 1},
    )
    options["augment"]["crop_size"] = [25, 33]
    config = write_config(root / "c.yaml", options)
    assert run_ranks(1, train, config, root / "alone") == [0]
    return config, root / "alone"


@pytest.mark.fault(42)
def test_a_config_edited_in_the_run_is_refused_and_written_anew(
    run_ranks, tmp_path, alone_with_evaluations
):
    """The checkpoint says what the run was trained with."""
    config, alone = alone_with_evaluations
    run = shutil.copytree(alone, tmp_path / "run")
    edited, written = run / "config.yaml", (run / "config.yaml").read_text()
    edited.write_text(written.replace("  lr: 0.02\n", "  lr: 0.5\n"))
    ((kind, code, said),) = run_ranks(1, refusal, train, edited, run, True)
    assert (kind, code) == ("ConfigError", 2)
    assert "\n  optim.lr: 0.02 there, 0.5 now\n" in said
    (run / "checkpoints" / "last.pt").unlink()  # something is left to do
    assert run_ranks(1, train, config, run, True) == [0]
    assert edited.read_text() == written
    assert "and is written anew: optim.lr: 0.5 there, 0.02 now\n" in (run / "train.log").read_text()


def in_a_directory_made_anew(config, directory):
    """The `refusal` of a run in whose directory another one begins, and whether it left anything.

    The other one ends without a file of its own, and so takes an empty directory with it.
    """
    from segtrain.run.directory import RunLock
    from segtrain.trainer import loop

    steps = loop.train

    def remade(run):
        shutil.rmtree(directory)
        with RunLock(directory):
            steps(run)

    loop.train = remade
    return refusal(train, config, directory), directory.exists()


@pytest.mark.fault(29)
def test_a_run_whose_directory_was_made_anew_saves_nothing_into_it(
    run_ranks, tmp_path, alone_with_evaluations
):
    """The lock that it still has is on a file that was deleted."""
    config, _ = alone_with_evaluations
    (((kind, code, said), left),) = run_ranks(1, in_a_directory_made_anew, config, tmp_path / "run")
    assert (kind, code) == ("ExecutionError", 6)
    assert "run: was deleted during the run and made anew by another run" in said
    assert not left


@pytest.mark.fault(7)
def test_a_run_stopped_in_an_evaluation_leaves_it_and_repeats_it(
    run_ranks, tmp_path, alone_with_evaluations
):
    """The last rank alone gets the signal: in the first evaluation, and in that of the end."""
    config, alone = alone_with_evaluations
    run = tmp_path / "run"
    stops = ("batches", signal.SIGTERM, 143), ("predict_labels", signal.SIGINT, 130)
    for step, (where, number, code) in enumerate(stops, start=1):
        stopped = (step, where, config, run, step > 1, number, 1)
        found = run_ranks(2, signalled_in_evaluation, *stopped)
        assert [code_of_rank for code_of_rank, _ in found] == [code] * 2
        assert max(begun for _, begun in found) <= 8 // 2
        assert (last(run).step, last(run).evaluated) == (step, step - 1)
        log = (run / "train.log").read_text()
        assert f"stopped by {signal.Signals(number).name} after step {step}, which is saved" in log
    assert run_ranks(2, train, config, run, True) == [0] * 2
    for name in ("last.pt", "best.pt"):
        one, other = (load(place / "checkpoints" / name) for place in (run, alone))
        assert bits(one) == bits(other)
        assert (one.evaluated, one.best) == (other.evaluated, other.best)
    assert (run / "receipts.jsonl").read_text() == (alone / "receipts.jsonl").read_text()
    assert curves(run) == curves(alone)


def curves(directory):
    """The lines of metrics.jsonl, without those that tell the time."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [{key: line[key] for key in line if key in TIMELESS or "eval/" in key} for line in lines]


TIMELESS = ("step", "train/loss", "train/aux_loss", "train/grad_norm", "train/lr")


def test_a_checkpoint_with_an_unknown_option_names_the_version_that_wrote_it(
    tmp_path, halfway, monkeypatch
):
    """It is never read in part, neither to go on nor for its weights."""
    config, run = halfway[0], shutil.copytree(halfway[1], tmp_path / "run")
    file = run / "checkpoints" / "last.pt"
    options = json.loads(last(run).config)
    options["optim"]["nesterov"] = False
    manager = CheckpointManager(run / "checkpoints")
    manager.clean_up()
    with monkeypatch.context() as another:
        another.setattr(checkpoint_format, "__version__", "0.1.9")
        manager.save_last(last(run)._replace(config=json.dumps(options, indent=1)))
    said = (
        f"{file}: its config does not fit segtrain {__version__}: optim.nesterov: unknown key; "
        "segtrain 0.1.9 wrote the file"
    )
    _, code, error = refusal(train, config, run, True)
    assert (code, error) == (4, said)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load_model(file)
    model = nn.Linear(1, 1)
    with pytest.raises(CheckpointError, match=re.escape(said)):
        load_initial(model, file, config=load_config(config))
