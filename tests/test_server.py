"""train.parallel server: workers send gradients to rank 0, which has the weights."""

import signal
import time

import pytest
import torch
from experiments import (
    curve,
    experiment,
    killed_in_evaluation,
    last,
    losses,
    refusal,
    sections,
    train,
    write_config,
)
from processes import Command, free_port, logged_steps, save_and_stop, with_signal

from segtrain.config import load_config
from segtrain.data import open_dataset
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import batch_findings
from segtrain.errors import ConfigError
from segtrain.trainer import loop
from segtrain.trainer.preflight import check_experiment, start_lines
from segtrain.training.ways import server_way as server
from segtrain.training.ways import way_of

STEPS = 3
SLOW = pytest.mark.slow("training", "distributed", "commands", "trainer")


def config(data, directory, name="c.yaml", every_steps=None, norm=None, loss=None, **options):
    values = experiment(
        data,
        augment={"crop_size": [17, 25]},
        model={"head_channels": 8, "aux_channels": 8, "ppm_bins": [2, 3]},
        eval={"every_steps": every_steps},
        norm=norm or {},
        loss=loss or {},
        **sections(**{"steps": STEPS, "batch_size": 6, "parallel": "server"} | options),
    )
    return write_config(directory / name, values)


def assert_equal_runs(one, other, **tolerance):
    one, other = last(one), last(other)
    assert one.step == other.step
    for kind in ("model", "average"):
        mine, theirs = getattr(one, kind), getattr(other, kind)
        assert (mine is None) == (theirs is None)
        for key, value in (mine or {}).items():
            close = {"rtol": 1e-7, "atol": 1e-9} | tolerance
            torch.testing.assert_close(value, theirs[key], msg=key, **close)


def parts_of_a_slow_worker(file, directory, begun):
    """How many parts this rank has computed; the last one's first waits for the others' `begun`.

    A worker begins its next part after the update by its last one.
    """
    done, compute, where = [], server.gradient, directory.parent

    def gradient(*args, **kwargs):
        done.append(1)
        if dist.rank() == 3:
            deadline = time.monotonic() + 120
            while len(done) == 1 and sum(x.stat().st_size for x in where.glob("begun*")) < begun:
                assert time.monotonic() < deadline, "the others wait"
                time.sleep(0.005)
        else:
            (where / f"begun{dist.rank()}").write_bytes(bytes(len(done)))
        return compute(*args, **kwargs)

    server.gradient = gradient
    assert train(file, directory) == 0
    return len(done)


@pytest.mark.parametrize(
    ("bound", "begun", "oldest"),
    [
        (2, 2 + 2, {2}),  # two that began with it, and one after each of two updates
        pytest.param(30, 3 * STEPS - 1, {6, 7, 8}, marks=SLOW),  # all parts but its own
    ],
)
def test_a_slow_worker_has_fewer_parts_and_no_gradient_is_older_than_the_bound(
    run_ranks, tmp_path, data, bound, begun, oldest
):
    file, run = config(data, tmp_path, staleness=bound), tmp_path / "run"
    none, *parts = run_ranks(4, parts_of_a_slow_worker, file, run, begun)
    assert (none, sum(parts)) == (0, 3 * STEPS)
    assert parts[-1] == 1 or bound == 2
    assert max(losses(run, "staleness/max")) in oldest
    means = [value for _, value in curve(run, "staleness/mean")]
    assert 0 < max(means) <= max(oldest)
    assert "staleness" in (run / "train.log").read_text()


def test_running_statistics_are_those_of_all_parts(run_ranks, tmp_path, data):
    """Of weights that stand still, cumulative averages are the same in any order."""
    options = {"lr": 1e-12, "weight_decay": 0.0, "norm": {"momentum": None}}
    same = {"parallel": "sync", "accumulate_steps": 2}
    assert train(config(data, tmp_path, "one.yaml", **same, **options), tmp_path / "one") == 0
    file = config(data, tmp_path, staleness=7, **options)
    assert run_ranks(3, train, file, tmp_path / "other") == [0] * 3
    assert_equal_runs(tmp_path / "one", tmp_path / "other", rtol=1e-6)
    counters = [v for k, v in last(tmp_path / "other").model.items() if "num_batches" in k]
    assert {value.item() for value in counters} == {2 * STEPS}


def weights_in_evaluations(file, directory):
    """Of each evaluation, the step and the weights and statistics of this rank."""
    found, evaluate = [], loop.evaluate

    def watched(run):
        values = run.state.model.state_dict().items()
        sums = [v.double().sum().item() for k, v in values if "num_batches" not in k]
        found.append([run.state.step, sums])
        return evaluate(run)

    loop.evaluate = watched
    train(file, directory)
    return found


def test_all_evaluate_the_weights_of_the_server(run_ranks, tmp_path, data):
    file = config(data, tmp_path, every_steps=2)
    first, *others = run_ranks(3, weights_in_evaluations, file, tmp_path / "run")
    assert [step for step, _ in first] == [2, STEPS]
    assert all(other == first for other in others)
    assert first[0][1] != first[1][1]


def test_a_run_goes_on_with_another_number_of_workers(run_ranks, tmp_path, data):
    """Which images a step has does not depend on it, nor a loss that weighs pixels on the parts."""
    weighted = {"class_weights": [1.0, 2.0, 0.5, 3.0]}
    options = {"norm": {"kind": "group"}, "ema_decay": 0.8, "loss": weighted, "warmup_steps": 2}
    one = config(data, tmp_path, "one.yaml", parallel="sync", **options)
    assert train(one, tmp_path / "one") == 0
    file = config(data, tmp_path, staleness=0, **options)
    assert run_ranks(3, train, file, tmp_path / "other", until=1) == [0] * 3
    assert last(tmp_path / "other").step == 1
    assert run_ranks(2, train, file, tmp_path / "other", True) == [0] * 2
    assert_equal_runs(tmp_path / "one", tmp_path / "other")
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "other"), rel=1e-9)
    assert losses(tmp_path / "other", "staleness/max") == [0] * STEPS


def alone(where, file, run, world):
    """Processes as srun or a person would start them: none ends the others."""
    about = {"WORLD_SIZE": str(world), "LOCAL_WORLD_SIZE": str(world), "MASTER_ADDR": "127.0.0.1"}
    about["MASTER_PORT"] = str(free_port())
    return [
        Command(where, "train", file, "--output", run, RANK=str(i), LOCAL_RANK=str(i), **about)
        for i in range(world)
    ]


@pytest.mark.parametrize("staleness", [0, pytest.param(9, marks=SLOW)])
def test_the_others_go_on_without_a_worker_that_was_killed(tmp_path, data, staleness):
    # On a busy machine many steps pass before the kill; while all evaluate it would end the run.
    steps, evaluated = STEPS * 6, STEPS * 5
    file = config(data, tmp_path, steps=steps, staleness=staleness, every_steps=evaluated)
    run = tmp_path / "run"
    first, worker, killed = alone(tmp_path, file, run, 3)
    first.wait_for_step(run, 2)
    with_signal(killed.process.pid, signal.SIGKILL)
    assert [first.wait(), worker.wait()] == [0, 0], first.errors
    assert "rank 2 is gone with its part; workers left: 1" in first.output
    assert last(run).step == steps
    assert [step for step, _ in curve(run, "eval/mIoU")] == [evaluated, steps]
    (batches,) = {v.item() for k, v in last(run).model.items() if "num_batches" in k}
    assert batches in (2 * steps, 2 * steps - 1)  # its part, if it had one


@SLOW
def test_a_worker_is_named_as_it_was_started_after_the_others_got_new_numbers(tmp_path, data):
    file, run = config(data, tmp_path, steps=4000, staleness=0), tmp_path / "run"
    first, lost, worker, killed = alone(tmp_path, file, run, 4)
    first.wait_for_step(run, 2)
    with_signal(lost.process.pid, signal.SIGKILL)
    first.wait_until(lambda: "rank 1 is gone with its part; workers left: 2" in first.output)
    with_signal(first.process.pid, signal.SIGUSR1)  # all meet
    first.wait_until(lambda: "as SIGUSR1 asked for" in first.output)
    first.wait_for_step(run, max(logged_steps(run)) + 2)
    with_signal(killed.process.pid, signal.SIGKILL)
    first.wait_until(lambda: "rank 3 is gone with its part; workers left: 1" in first.output)
    with_signal(first.process.pid, signal.SIGTERM)
    assert [first.wait(), worker.wait()] == [143, 143]


@pytest.mark.parametrize(("world", "dies"), [(2, 1), (3, 0)], ids=["the only worker", "server"])
def test_without_workers_or_their_server_the_others_give_up(tmp_path, data, world, dies):
    """At once: the limit of their waiting is longer than that of this test."""
    file, run = config(data, tmp_path, steps=400), tmp_path / "run"
    processes = alone(tmp_path, file, run, world)
    processes[0].wait_for_step(run, 3)
    with_signal(processes.pop(dies).process.pid, signal.SIGKILL)
    assert {process.wait() for process in processes} == {6}
    assert dies == 0 or "the last worker" in processes[0].errors


def test_signals_save_and_stop_between_steps(tmp_path, data):
    run = tmp_path / "run"
    file = config(data, tmp_path, steps=400)
    step = save_and_stop(Command(tmp_path, "train", file, "--nproc", 3, "--output", run), run)
    assert step < 400
    # No part was left over: each of a step's two is a batch of every layer.
    assert {v.item() for k, v in last(run).model.items() if "num_batches" in k} == {2 * step}


def test_under_the_launcher_a_death_ends_all_but_they_save_before(tmp_path, data):
    """So --max-restarts, or --resume, goes on from there."""
    run, file = tmp_path / "run", config(data, tmp_path, steps=400)
    command = Command(tmp_path, "train", file, "--nproc", 3, "--output", run)
    command.wait_for_step(run, 5)
    (killed,) = (one.pid for one in command.heartbeats() if one.rank == 2)
    with_signal(killed, signal.SIGKILL)
    assert command.wait() == 6
    assert "rank 2 was ended by SIGKILL" in command.output + command.errors
    assert last(run).step >= 5


def test_a_worker_that_hangs_ends_the_run(tmp_path, data):
    """Nobody could end the others' wait for it later."""
    run, file = tmp_path / "run", config(data, tmp_path, steps=4000, timeout_s=3.0)
    command = Command(tmp_path, "train", file, "--nproc", 3, "--output", run)
    command.wait_for_step(run, 5)
    (hung,) = (one.pid for one in command.heartbeats() if one.rank == 2)
    with_signal(hung, signal.SIGSTOP)
    assert command.wait() == 6
    assert "rank 2 did not answer the others: it hung" in command.output + command.errors


def end_of(file, run):
    try:
        return refusal(train, file, run)
    except RuntimeError as error:  # of torch, which `process_group` explains
        return "", 6, str(error)


def test_a_run_that_was_killed_in_an_evaluation_repeats_it_and_goes_on(run_ranks, tmp_path, data):
    file, run = config(data, tmp_path, every_steps=1, timeout_s=30.0), tmp_path / "run"
    assert run_ranks(2, killed_in_evaluation, file, run) == ["killed"] * 2
    assert (last(run).step, last(run).evaluated) == (1, 0)
    assert run_ranks(2, train, file, run, True) == [0] * 2
    assert [step for step, _ in curve(run, "eval/mIoU")] == [*range(1, STEPS + 1)]


def test_a_loss_that_is_not_finite_ends_all(run_ranks, tmp_path, data):
    file, run = config(data, tmp_path, lr=1e30), tmp_path / "run"
    first, *workers = run_ranks(3, end_of, file, run)
    assert first[1] == 5
    assert "it names its images" in first[2]
    assert any(code == 5 and ": images " in said for _, code, said in workers)
    assert {code for _, code, _ in workers} <= {5, 6}
    assert not (run / "checkpoints" / "last.pt").exists()


def test_what_is_refused_and_what_is_said(tmp_path, data):
    settings = load_config(config(data, tmp_path, lr=0.02, staleness=1))
    sets = [open_dataset(settings.data, split) for split in ("train", "val")]
    with pytest.raises(ConfigError, match="server runs on CPUs only"):
        check_experiment(settings, *sets, device=torch.device("cuda"))
    for ranks, said in (
        (1, "start at least 2"),
        (5, "6 images are not alike many for 4 processes"),
        (7, "use at least 12 (train.parallel: server, 6 processes)"),
        (4, "use 0 or at least 2"),
    ):
        (found,) = batch_findings(settings, ranks)
        assert said in found
    assert batch_findings(settings, 3) == []
    # Of two workers each has half of the rate, unless a batch is one update.
    assert way_of(settings.train).config_of_update(settings, 3).optim.lr == 0.01
    lines = start_lines(settings, tmp_path, torch.nn.Linear(1, 1), *sets, ["cpu"] * 3, 0)
    assert any(line.startswith("lr         0.01 ->") for line in lines)
    assert any(line.endswith("each process alone; statistics over 3 images") for line in lines)
    assert (
        "at most 1 updates old, and another run ends"
        in way_of(settings.train).lines(settings.train, 3)[0]
    )
    whole = load_config(config(data, tmp_path, lr=0.02, staleness=0))
    assert way_of(whole.train).config_of_update(whole, 3).optim.lr == 0.02
    assert "gradients of whole batches" in way_of(whole.train).lines(whole.train, 3)[0]
