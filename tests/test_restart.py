"""Runs that lose a rank, hang, or are to be started once more."""

import os
import random
import shutil
import signal
import stat
import tempfile
import time
from pathlib import Path

import pytest
from experiments import assert_same_state, last, small, train, write_config
from preloaded import LOADER_START
from processes import GONE_WITHIN_S, Command, left_after

from segtrain.distributed.machine import descendants


def ends_as_hung(command, everyone, timeout_s, said):
    """Whether the run ends soon after something hung; it tells it in one line, leaves nothing."""
    stopped = time.monotonic()
    assert command.wait() == 6
    took_s = time.monotonic() - stopped
    (line,) = command.errors.splitlines()
    assert line.startswith(f"segtrain: {said}")
    assert "--resume" in line
    assert left_after(everyone, GONE_WITHIN_S) == []
    # The timeout, the launcher's patience, and room for a loaded machine.
    return took_s < timeout_s + 10 + 30


@pytest.mark.fault(14)
def test_the_launcher_outlives_its_temporary_folder(tmp_path, data):
    """As a cleaner of /tmp may remove it: signals get through, and a rank that hangs is named."""
    options = small(data, train={"steps": 100_000, "timeout_s": 6})
    options["checkpoint"] = {"every_steps": 50_000}
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    with tempfile.TemporaryDirectory(prefix="t") as temporary:  # short, for the names of sockets
        command = Command(
            tmp_path, "train", config, "--nproc", 2, "--output", run, TMPDIR=temporary
        )
        command.wait_for_step(run, 2)
        (root,) = Path(temporary).glob("segtrain-*")
        mark = root / "of the first"
        mark.touch()

        def is_new():
            while mark.exists():  # the ranks write there, and that can end it
                shutil.rmtree(root, ignore_errors=True)
            return len(command.heartbeats()) == 2

        command.wait_until(is_new)
        assert stat.S_IMODE(root.stat().st_mode) == 0o700
        command.process.send_signal(signal.SIGUSR1)
        command.wait_until(lambda: "as SIGUSR1 asked for" in (run / "train.log").read_text())
        everyone = descendants(command.process.pid)
        os.kill(command.ranks()[1], signal.SIGSTOP)
        said = "rank 1 did not answer the others: it hung in training, after"
        assert ends_as_hung(command, everyone, 6, said)


@pytest.fixture(scope="module")
def busy(tmp_path_factory, data):
    """A config that is in every phase again and again."""
    options = small(
        data,
        data={"num_workers": 1},
        train={"steps": 500},
        eval={"every_steps": 2},
        checkpoint={"every_steps": 1},
    )
    return write_config(tmp_path_factory.mktemp("busy") / "c.yaml", options)


SLOW = pytest.mark.slow("commands", "trainer", "distributed")


@SLOW
@pytest.mark.fault(7)
@pytest.mark.parametrize("phase", ["setup", "training", "evaluation", "checkpoint"])
def test_sigterm_to_the_launcher_in_any_phase_stops_the_run_in_good_order(tmp_path, busy, phase):
    """The phase of training is met before the first batch."""
    run = tmp_path / "run"
    command = Command(tmp_path, "train", busy, "--nproc", 2, "--output", run)
    command.wait_for_phase(phase)
    everyone = descendants(command.process.pid)
    command.process.send_signal(signal.SIGTERM)
    assert command.wait() == 143, command.errors
    assert command.errors == ("segtrain: terminated\n" if phase == "setup" else "")
    assert left_after(everyone, GONE_WITHIN_S) == []
    if phase != "setup":
        said = f"stopped by SIGTERM after step {last(run).step}, which is saved; go on with"
        assert said in command.output


@pytest.mark.fault(7, 9)
@pytest.mark.parametrize(
    ("number", "code", "word"),
    [(signal.SIGTERM, 143, "terminated"), (signal.SIGINT, 130, "interrupted")],
)
def test_a_signal_to_the_launcher_reaches_ranks_that_have_just_been_started(
    tmp_path, busy, number, code, word
):
    words = ("train", busy, "--nproc", 2, "--output", tmp_path / "run")
    command = Command(tmp_path, *words, fresh=True)
    command.wait_until(lambda: len(command.ranks()) == 2)
    everyone = descendants(command.process.pid)
    command.process.send_signal(number)
    assert command.wait() == code, command.errors
    said = f"segtrain: {word}\n"
    # Ctrl-C that reaches a rank while Python starts makes Python complain before.
    assert command.errors == said if number == signal.SIGTERM else command.errors.endswith(said)
    assert left_after(everyone, GONE_WITHIN_S) == []


@pytest.mark.fault(10, 11)
@pytest.mark.parametrize(
    ("times", "pause_s", "hangs"),
    [(2, 0.1, True), pytest.param(3, 0.0, False, marks=SLOW)],
)
def test_sigint_more_than_once_to_the_launcher_ends_everything_at_once(
    tmp_path, busy, times, pause_s, hangs
):
    """Without a pause they may count as one, by which a run ends that does not hang."""
    run = tmp_path / "run"
    command = Command(tmp_path, "train", busy, "--nproc", 2, "--output", run)
    command.wait_for_step(run, 2)
    everyone = descendants(command.process.pid)
    if hangs:
        os.kill(command.ranks()[1], signal.SIGSTOP)
    asked = time.monotonic()
    for _ in range(times):
        command.process.send_signal(signal.SIGINT)
        time.sleep(pause_s)
    assert command.wait() == 130, command.errors
    said = "segtrain: stopped at once by a second signal, without saving\n"
    asked_once = not hangs and command.errors.count("segtrain: ") <= 1
    assert command.errors.endswith(said) or asked_once
    assert left_after(everyone, GONE_WITHIN_S) == []
    assert time.monotonic() - asked < 20
    assert last(run).step >= 1


@pytest.mark.fault(19, 21)
@pytest.mark.parametrize(
    ("number", "ranks", "start"),
    [
        pytest.param(signal.SIGSTOP, 1, "", marks=SLOW),
        (signal.SIGSTOP, 2, ""),
        (signal.SIGSTOP, 1, "forkserver"),
        (signal.SIGKILL, 1, ""),
        pytest.param(signal.SIGKILL, 1, "forkserver", marks=SLOW),
    ],
)
def test_a_loader_worker_that_hangs_or_is_killed_ends_the_run_and_is_named(
    tmp_path, data, number, ranks, start
):
    """Not the rank that waits for the one that waits for it; wherever the rank is meanwhile."""
    options = small(data, data={"num_workers": 1}, train={"steps": 500, "timeout_s": 6})
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    how = {LOADER_START: start}
    command = Command(tmp_path, "train", config, "--nproc", ranks, "--output", run, **how)
    command.wait_for_step(run, 2)
    everyone = descendants(command.process.pid)
    os.kill(everyone[-1], number)
    if number == signal.SIGSTOP:
        said = "no loader worker has given a batch for 5 s (0.8 of train.timeout_s): a worker or "
        assert ends_as_hung(command, everyone, 0.8 * 6, f"rank {ranks - 1}: {said}")
        return
    assert command.wait() == 6
    (line,) = command.errors.splitlines()
    # The end of its connection may be noticed before its death is.
    assert line.startswith(("segtrain: DataLoader worker (pid", "segtrain: a loader worker was"))
    assert "out of memory" in line


@pytest.mark.fault(2)
@pytest.mark.parametrize(
    ("num_ranks", "trials"),
    [(2, 1), *(pytest.param(*more, marks=SLOW) for more in ((1, 1), (2, 20)))],
)
def test_the_second_attempt_comes_up_with_the_same_weights(
    run_ranks, tmp_path, data, num_ranks, trials
):
    """A rank is killed somewhere, and the launcher starts the ranks again."""
    options = small(
        data, data={"num_workers": 1}, train={"steps": 4}, checkpoint={"every_steps": 2}
    )
    config, rng = write_config(tmp_path / "c.yaml", options), random.SystemRandom()
    assert run_ranks(num_ranks, train, config, tmp_path / "alone") == [0] * num_ranks
    for trial in range(trials):
        run, step = tmp_path / f"run{trial}", rng.randint(1, 3)
        victim = rng.randrange(num_ranks)
        print(f"trial {trial}: SIGKILL to rank {victim} after step {step}")
        words = ("train", config, "--nproc", num_ranks, "--max-restarts", 1, "--output", run)
        command = Command(tmp_path, *words)
        command.wait_for_step(run, step)
        os.kill(command.ranks()[victim], signal.SIGKILL)
        assert command.wait() == 0, command.errors
        assert_same_state(last(run), last(tmp_path / "alone"))


@pytest.mark.fault(5, 8, 13)
def test_usr1_saves_and_goes_on_and_sigterm_again_and_again_saves_once(tmp_path, data):
    options = small(data, train={"steps": 500}, checkpoint={"every_steps": 400})
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    command = Command(tmp_path, "train", config, "--nproc", 2, "--output", run)
    command.wait_for_step(run, 2)
    assert not (run / "checkpoints" / "last.pt").exists()
    command.process.send_signal(signal.SIGUSR1)
    command.wait_until(lambda: "as SIGUSR1 asked for" in (run / "train.log").read_text())
    saved = last(run).step
    command.wait_for_step(run, saved + 2)

    everyone = descendants(command.process.pid)
    command.process.send_signal(signal.SIGTERM)
    command.wait_for_phase("checkpoint")
    for _ in range(3):  # none of them cuts the checkpoint off
        command.process.send_signal(signal.SIGTERM)
        time.sleep(0.02)
    assert command.wait() == 143, command.errors
    assert command.errors == ""
    assert last(run).step >= saved + 2
    assert f"stopped by SIGTERM after step {last(run).step}, which is saved" in command.output
    assert left_after(everyone, 0) == []


@pytest.mark.fault(13)
def test_usr1_requeues_a_slurm_job_that_then_goes_on_by_itself(tmp_path, data):
    config = write_config(tmp_path / "c.yaml", small(data, train={"steps": 15}))
    run, called = tmp_path / "run", tmp_path / "called"
    scontrol = tmp_path / "scontrol"
    scontrol.write_text(f'#!/bin/sh\necho "$@" >> {called}\n')
    scontrol.chmod(0o755)
    job = {"SLURM_JOB_ID": "7", "PATH": f"{tmp_path}:{os.environ['PATH']}"}
    arguments = ["train", config, "--requeue", "--output", run]
    command = Command(tmp_path, *arguments, **job)
    command.wait_for_step(run, 2)
    command.process.send_signal(signal.SIGUSR1)
    assert command.wait() == 143, command.errors
    assert called.read_text() == "requeue 7\n"
    saved = last(run).step
    assert 2 <= saved < 15
    assert f"stopped by SIGUSR1 after step {saved}" in command.output

    again = Command(tmp_path, *arguments, **job, SLURM_RESTART_COUNT="1")
    assert again.wait() == 0, again.errors
    assert last(run).step == 15
