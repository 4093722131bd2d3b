"""How a run stops: in good order when asked to, at once when there is reason."""

import os
import signal
import time

import pytest
import torch
from experiments import last, refusal, small, stopped_after, train, write_config
from preloaded import LOADER_START
from processes import GONE_WITHIN_S, Command, free_port, left_after, run_python

from segtrain.desk.results.runs import State, summarize
from segtrain.distributed import collectives as dist
from segtrain.distributed.machine import children, descendants, is_alive, process_pool
from segtrain.distributed.process_group import process_group
from segtrain.distributed.signals import SignalFlags, exit_code
from segtrain.errors import LostRanksError
from segtrain.trainer import loop


@pytest.mark.fault(8)
@pytest.mark.parametrize(
    ("number", "times", "code"),
    # Schedulers repeat SIGTERM while the checkpoint is being written.
    [(signal.SIGTERM, 2, 143), (signal.SIGINT, 1, 130), (signal.SIGHUP, 1, 143)],
)
def test_a_signal_only_asks_to_stop(handlers, number, times, code):
    stop = SignalFlags()
    stop.install()
    assert not stop.stop_requested()
    for _ in range(times):
        os.kill(os.getpid(), number)
    assert stop.stop_requested()
    assert exit_code(stop.signal) == code


def listeners_at_the_first_step(config, run):
    """The ranks that had handlers for signals when this one began its steps; rank 1 is late."""
    install, begin, seen = SignalFlags.install, loop._begin_steps, []

    def late(self):
        time.sleep(0.5 * dist.rank())
        install(self)
        (run.parent / f"listens_{dist.rank()}").touch()

    def begun(this):
        seen.extend(sorted(path.name for path in run.parent.glob("listens_*")))
        begin(this)

    SignalFlags.install, loop._begin_steps = late, begun
    assert train(config, run) == 0
    return seen


def test_no_rank_trains_while_a_signal_would_still_end_another_at_once(run_ranks, tmp_path, data):
    config = write_config(tmp_path / "c.yaml", small(data, train={"steps": 1}))
    seen = run_ranks(2, listeners_at_the_first_step, config, tmp_path / "run")
    assert seen == [["listens_0", "listens_1"]] * 2


AT_ONCE = "segtrain: stopped at once by a second signal, without saving\n"


@pytest.mark.parametrize("second", [signal.SIGINT, signal.SIGTERM])
def test_after_ctrl_c_a_second_signal_ends_the_process_at_once(second):
    code = (
        "import os, signal\n"
        "from segtrain.distributed.signals import SignalFlags\n"
        "SignalFlags().install()\n"
        f"for number in (signal.SIGINT, {int(second)}): os.kill(os.getpid(), number)\n"
        "print('still here')\n"
    )
    done = run_python(code, forked=True)
    assert (done.returncode, done.stdout) == (130, "")
    assert done.stderr.endswith(AT_ONCE)
    asked = "segtrain: stopping after this step, which is saved; a second Ctrl-C ends at once"
    assert done.stderr.startswith(asked)


def test_an_eval_of_one_process_that_is_terminated_says_so():
    code = (
        "import os, signal, sys\n"
        "from segtrain.commands import evaluate\n"
        "evaluate.run_eval = lambda _: os.kill(os.getpid(), signal.SIGTERM)\n"
        "from segtrain.cli import main\n"
        "main(['eval', 'run', '--nproc', '1'])\n"
    )
    done = run_python(code, forked=True)
    assert (done.returncode, done.stderr) == (143, "segtrain: terminated\n")


def test_nohup_is_obeyed(handlers):
    signal.signal(signal.SIGHUP, signal.SIG_IGN)
    stop = SignalFlags()
    stop.install()
    os.kill(os.getpid(), signal.SIGHUP)
    assert not stop.stop_requested()


@pytest.mark.fault(6, 9, 12)
@pytest.mark.parametrize(
    ("number", "rank", "code"),
    [
        pytest.param(signal.SIGHUP, 0, 143, marks=pytest.mark.slow("trainer", "distributed")),
        (signal.SIGINT, 1, 130),
    ],
)
def test_a_signal_to_one_rank_stops_all_after_the_same_step(
    run_ranks, tmp_path, data, number, rank, code
):
    config = write_config(tmp_path / "c.yaml", small(data))
    run = tmp_path / "run"
    assert run_ranks(2, stopped_after, 3, config, run, False, number, rank) == [code] * 2
    assert 3 <= last(run).step <= 5
    wanted = f"stopped by {signal.Signals(number).name} after step {last(run).step}"
    assert wanted in (run / "train.log").read_text()


@pytest.mark.fault(4)
@pytest.mark.parametrize(("start", "processes"), [("", 5), ("forkserver", 7)])
def test_ranks_end_when_their_launcher_is_killed_and_save_what_they_have(
    tmp_path, data, start, processes
):
    options = small(data, data={"num_workers": 1}, train={"steps": 500})
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    how = {LOADER_START: start}
    command = Command(tmp_path, "train", config, "--nproc", 2, "--output", run, **how)
    command.wait_for_step(run, 2)
    everyone = descendants(command.process.pid)
    # The launcher, two ranks, and of each a worker and its fork server.
    assert len(everyone) == processes
    assert [len(children(rank)) for rank in command.ranks()] == [1, 1]
    command.process.kill()
    assert command.wait() == -signal.SIGKILL
    assert left_after(everyone, GONE_WITHIN_S) == []
    assert last(run).step >= 2
    assert command.errors == ""


@pytest.mark.fault(76)
def test_a_loss_that_is_not_finite_names_step_rank_and_images(run_ranks, tmp_path, data):
    options = small(data, train={"precision": "float64"}, eval={"every_steps": 1})
    options["optim"] = {"lr": 1e200}
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    first, second = run_ranks(2, refusal, train, config, run)
    assert first == second
    kind, code, said = first
    assert (kind, code) == ("NonFiniteError", 5)
    lines = said.splitlines()
    assert lines[0].startswith("step ")
    assert lines[0].endswith("is not finite")
    named = {line.split(": ")[0].strip(): line.split("images ")[1] for line in lines[1:-1]}
    assert named.keys() == {"rank 0", "rank 1"}
    assert len((named["rank 0"] + ", " + named["rank 1"]).split(", ")) == 5
    saved = last(run)  # at the evaluation before, with weights that were absurd but finite
    assert lines[0].startswith(f"step {saved.step + 1}: ")
    assert all(value.isfinite().all() for value in saved.model.values())
    assert "ended by NonFiniteError: step" in (run / "train.log").read_text()
    found = summarize(run)
    assert (found.state, found.why) == (State.DIVERGED, lines[0])


def test_a_run_without_memory_is_listed_with_what_it_said(tmp_path, data, monkeypatch):
    def without_memory(run):
        run.log.begin()
        raise MemoryError

    monkeypatch.setattr(loop, "train", without_memory)
    file, run = write_config(tmp_path / "c.yaml", small(data)), tmp_path / "run"
    kind, code, said = refusal(train, file, run)
    assert (kind, code) == ("MemoryLimitError", 7)
    found = summarize(run)
    assert (found.state, found.why) == (State.FAILED, said)
    assert f'"exit_code": {code}' in (run / "ending.json").read_text()


def test_weights_that_an_update_made_infinite_are_not_saved(run_ranks, tmp_path, data):
    """Loss and gradient of the step are finite; the next step would be too late."""
    options = small(data, train={"precision": "float32"}, eval={"every_steps": 1})
    options["optim"] = {"lr": 1e38, "weight_decay": 100.0}
    config, run = write_config(tmp_path / "c.yaml", options), tmp_path / "run"
    for kind, code, said in run_ranks(2, refusal, train, config, run):
        assert (kind, code) == ("NonFiniteError", 5)
        assert said.startswith("step 1: the weights are not finite")
    assert not (run / "checkpoints" / "last.pt").exists()


def wait_for_another(port, pipe):
    group = {"RANK": 0, "WORLD_SIZE": 2, "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": port}
    os.environ.update({name: str(value) for name, value in group.items()})
    try:
        with process_group(torch.device("cpu"), timeout_s=1):
            pipe.send("they came")
    except LostRanksError as error:
        pipe.send(str(error))


def test_ranks_that_do_not_come_are_missed_in_words(forkserver):
    """Not with the traceback of a socket."""
    mine, theirs = forkserver.Pipe()
    process = forkserver.Process(target=wait_for_another, args=(free_port(), theirs))
    process.start()
    assert mine.recv().startswith("rank 0: lost the connection to the other ranks")
    process.kill()


def test_processes_that_share_work_leave_ctrl_c_to_the_one_that_starts_them():
    """A terminal sends it to all; each would show a traceback."""
    with process_pool(2) as pool:
        blocked = pool.submit(signal.pthread_sigmask, signal.SIG_BLOCK, []).result()
    assert signal.SIGINT in blocked
    assert signal.SIGINT not in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def pool_that_waits(pipe):
    """Starts two processes, tells their ids, and waits for what never comes."""
    with process_pool(2) as pool:
        pipe.send([pool.submit(os.getpid).result(), *descendants(os.getpid())[1:]])
        time.sleep(600)


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGKILL])
def test_processes_that_share_work_end_with_the_one_that_starts_them(forkserver, number):
    """They would sleep for ever, and hold the pipe that somebody reads."""
    mine, theirs = forkserver.Pipe()
    process = forkserver.Process(target=pool_that_waits, args=(theirs,))
    process.start()
    worker, *_ = mine.recv()
    assert is_alive(worker)
    os.kill(process.pid, number)
    process.join()
    assert left_after([worker], 20) == []
