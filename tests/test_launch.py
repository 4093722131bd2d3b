"""Ranks started by the real command, and the exit code of a run."""

import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import pytest
from experiments import last, small, write_config, write_data
from processes import GONE_WITHIN_S, REPOSITORY, Command, free_port, left_after, logged_steps
from torch.distributed import TCPStore

from segtrain import cli
from segtrain.commands.launch import adopt_environment, interpreter
from segtrain.distributed import slurm
from segtrain.distributed.launcher import exit_code_of
from segtrain.distributed.liveness import FOLDER_VARIABLE, ExitStatus, Heartbeat
from segtrain.errors import ConfigError

TORCHRUN = {
    "RANK": "1",
    "WORLD_SIZE": "2",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "127.0.0.1",
    "MASTER_PORT": "29500",
}
SRUN = {
    "SLURM_JOB_ID": "123456",
    "SLURM_STEP_ID": "2",
    "SLURM_NTASKS": "7",
    "SLURM_STEP_NUM_TASKS": "7",
    "SLURM_PROCID": "5",
    "SLURM_LOCALID": "1",
    "SLURM_NODEID": "1",
    "SLURM_STEP_TASKS_PER_NODE": "4,3",
    "SLURM_STEP_NODELIST": "node[7-8]",
}


@pytest.fixture
def environ(monkeypatch):
    """The environment without any rank in it; changes to it are undone."""
    for name in [*TORCHRUN, *SRUN, "LOCAL_WORLD_SIZE", FOLDER_VARIABLE]:
        monkeypatch.setenv(name, "")
        monkeypatch.delenv(name)
    return os.environ


@pytest.mark.parametrize(
    ("found", "is_rank"),
    [
        ({}, False),
        (TORCHRUN, True),
        # The batch script, and a shell from `srun --pty`.
        ({"SLURM_NTASKS": "4", "SLURM_PROCID": "0", "SLURM_JOB_ID": "1"}, False),
        (SRUN | {"SLURM_STEP_NUM_TASKS": "1"}, False),
    ],
)
def test_a_rank_is_told_by_its_environment(environ, found, is_rank):
    environ.update(found)
    assert adopt_environment() == is_rank


def without(found, *names):
    return {name: value for name, value in found.items() if name not in names}


@pytest.mark.fault(17)
@pytest.mark.parametrize(
    ("found", "said"),
    [
        *(
            (without(TORCHRUN, name), rf"set but not {name}: .*--nproc")
            for name in ("RANK", "MASTER_PORT")
        ),
        (TORCHRUN | {"RANK": "2"}, "RANK: expected less than WORLD_SIZE=2, got 2"),
        (TORCHRUN | {"MASTER_PORT": "auto"}, "MASTER_PORT: expected a number, got 'auto'"),
        (without(SRUN, "SLURM_LOCALID", "SLURM_JOB_ID"), "SLURM_JOB_ID, SLURM_LOCALID are missing"),
    ],
)
def test_half_an_environment_is_refused(environ, found, said):
    environ.update(found)
    with pytest.raises(ConfigError, match=said):
        adopt_environment()


def test_a_task_of_srun_becomes_a_rank(environ, monkeypatch):
    monkeypatch.setattr(slurm, "_first_host", lambda nodes: {"node[7-8]": "node7"}[nodes])
    environ.update(SRUN)
    assert adopt_environment()
    assert {name: environ[name] for name in [*TORCHRUN, "LOCAL_WORLD_SIZE"]} == {
        "RANK": "5",
        "WORLD_SIZE": "7",
        "LOCAL_RANK": "1",
        "LOCAL_WORLD_SIZE": "3",
        "MASTER_ADDR": "node7",
        "MASTER_PORT": "35298",
    }


def test_two_steps_of_a_job_do_not_meet():
    steps = (SRUN | {"MASTER_ADDR": "localhost", "SLURM_STEP_ID": str(i)} for i in range(4))
    assert len({slurm.variables(step)["MASTER_PORT"] for step in steps}) == 4


@pytest.mark.parametrize(
    ("listed", "node", "tasks"), [("4(x2),3", "2", "3"), ("4(x2),3", "1", "4"), ("", "0", "1")]
)
def test_the_ranks_of_this_machine_are_counted_from_srun_s_list(listed, node, tasks):
    task = {"SLURM_NODEID": node, "SLURM_STEP_TASKS_PER_NODE": listed}
    found = slurm.variables(SRUN | task | {"MASTER_ADDR": "localhost"})
    assert found["LOCAL_WORLD_SIZE"] == tasks


def notes(*codes):
    """One note a rank: an exit code, and "lost" for the consequence of another's failure."""
    return [
        ExitStatus(rank, 6 if code == "lost" else code, code == "lost", time=float(rank))
        for rank, code in enumerate(codes)
    ]


def hung(rank):
    return Heartbeat(rank, pid=1, phase="evaluation", step=40, since=0.0)


KILLED = {1: -signal.SIGKILL}


@pytest.mark.parametrize(
    ("codes", "failures", "stopped_by", "options", "code", "said"),
    [
        ((0, 0), {}, None, {}, 0, ""),
        (("lost", 3), {0: 6, 1: 3}, None, {}, 3, ""),  # the cause, whoever ended first
        ((143, 143), {}, None, {}, 143, ""),  # one rank was asked to stop, and all did
        ((None, None), {}, signal.SIGINT, {}, 130, "interrupted"),  # the second Ctrl-C
        ((None, 143), {}, signal.SIGTERM, {}, 6, "rank 0 did not stop in 120 s and was killed"),
        ((6, "lost"), {}, signal.SIGTERM, {}, 6, ""),  # the disk was full when it was to save
        ((), {0: -signal.SIGTERM}, None, {}, 143, ""),
        ((), {0: 1}, None, {}, 6, "rank 0 exited with 1"),
        # Ranks that stop after a step tell it themselves; those of eval and verify just end.
        ((130, 130), {}, signal.SIGINT, {}, 130, ""),
        ((), {}, signal.SIGINT, {}, 130, "interrupted"),
        ((), {}, signal.SIGTERM, {}, 143, "terminated"),
        (("lost", 143), {}, signal.SIGTERM, {"trained": True}, 143, ""),
        (("lost", "lost"), {}, signal.SIGTERM, {}, 143, "terminated"),  # nothing was to be saved
        (("lost", None), {0: 6}, None, {"killed": [hung(1)]}, 6, "rank 1 did not answer the oth"),
        # One that was slow to leave is not blamed for the death of another.
        (("lost", None, None), KILLED | {2: -9}, None, {"killed": [hung(2)]}, 6, "rank 1 was end"),
        (("lost", None), KILLED, None, {}, 6, "rank 1 was ended by SIGKILL (out of memory?)"),
        (("lost", "lost"), {0: 6}, None, {}, 6, "the ranks lost each other;"),
        ((0, 0), {1: -signal.SIGABRT}, None, {}, 6, "rank 1 was ended by SIGABRT"),
    ],
)
def test_the_exit_code_is_that_of_the_cause_and_what_no_rank_could_say_is_said_once(
    codes, failures, stopped_by, options, code, said, capsys
):
    assert exit_code_of(notes(*codes), failures, stopped_by, **options) == code
    lines = capsys.readouterr().err.splitlines()
    assert len(lines) == bool(said)
    assert not lines or lines[0].startswith(f"segtrain: {said}")


def with_workers(root, steps):
    """A small experiment with loader workers."""
    return small(root, data={"num_workers": 1}, train={"steps": steps})


@pytest.mark.fault(15, 20, 67)
def test_a_damaged_image_is_named_once_with_exit_code_3(tmp_path):
    """Met by the worker of one rank in the midst of training; the other rank only loses touch."""
    root, directory = tmp_path / "data", tmp_path / "run"
    root.mkdir()
    write_data(root, num_images=12)
    config = write_config(tmp_path / "c.yaml", with_workers(root, 500))
    arguments = ["train", config, "--nproc", 2, "--output", directory]
    # A short one: the workers' sockets lie in it, and their paths have 108 characters at most.
    temporary = Path(tempfile.mkdtemp(prefix="t"))
    command = Command(tmp_path, *arguments, TMPDIR=str(temporary))
    command.wait_for_step(directory, 1)  # what was there at the start was checked
    path = root / "images" / "train" / "7.png"
    path.write_bytes(path.read_bytes()[:300])
    assert command.wait() == 3, command.errors

    ours = [line for line in command.errors.splitlines() if "png" not in line or "segtrain" in line]
    assert len(ours) == 1, command.errors
    assert ours[0].startswith(f"segtrain: {path}: ")
    assert "ended by" in (directory / "train.log").read_text()
    start, _, _ = command.output.partition("train 1")
    assert len(start.splitlines()) <= 15
    assert f"curves     tensorboard --logdir {directory}\n" in start
    left = [found.name for found in temporary.iterdir() if "torchinductor" not in found.name]
    shutil.rmtree(temporary)
    assert left == []


@pytest.mark.fault(88)
@pytest.mark.parametrize(
    "ranks", [1, pytest.param(2, marks=pytest.mark.slow("commands", "trainer", "distributed"))]
)
def test_training_needs_no_standard_streams_or_language_and_runs_nothing_of_the_folder(
    tmp_path, ranks
):
    """The streams' numbers must not go to a file of the run, where prints would be written.

    As the installed command, the ranks that it starts do not search the current folder. The names
    of the classes are not written in plain letters.
    """
    ran, folder, directory = tmp_path / "ran", tmp_path / "unpacked", tmp_path / "run"
    folder.mkdir()
    for name in ("yaml", "numpy", "segtrain"):
        (folder / f"{name}.py").write_text(f"open({str(ran)!r}, 'a').write('{name} ')\n")
    data = tmp_path / "data"
    data.mkdir()
    write_data(data)
    names = "classes: [Straße, plant, water, 砂]\nignore_ids: [255]\n"
    (data / "classes.yaml").write_text(names, encoding="utf-8")
    config = write_config(tmp_path / "c.yaml", with_workers(data, 3))
    segtrain = [sys.executable, "-P", "-m", "segtrain"]
    arguments = ["train", config, "--nproc", ranks, "--output", directory]
    done = subprocess.run(
        ["sh", "-c", 'exec "$@" <&- >&- 2>&-', "sh", *segtrain, *map(str, arguments)],
        cwd=folder,
        env=os.environ | {"PYTHONPATH": str(REPOSITORY), "LC_ALL": "C", "PYTHONUTF8": "0"},
        capture_output=True,
    )
    assert not ran.exists()
    assert (done.returncode, done.stdout, done.stderr) == (0, b"", b"")
    assert logged_steps(directory) == [1, 2, 3]
    assert last(directory).step == 3


def torchrun_stand_in(words, pipe):
    """What torchrun does: its store stays when it starts the ranks again; tells their ids."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    os.environ |= TORCHRUN | {"MASTER_PORT": str(store.port), "LOCAL_WORLD_SIZE": "2"}
    os.environ |= {"TORCHELASTIC_RUN_ID": "1", "TORCHELASTIC_USE_AGENT_STORE": "True"}
    multiprocessing.set_start_method(None, force=True)
    for attempt in range(2):
        os.environ["TORCHELASTIC_RESTART_COUNT"] = str(attempt)
        ranks = [os.fork()]
        if ranks[0]:
            ranks.append(os.fork())
        if 0 in ranks:
            os.environ |= {name: str(len(ranks) - 1) for name in ("RANK", "LOCAL_RANK")}
            os._exit(cli.main(list(map(str, words))))
        pipe.send(ranks)
        dead, _ = os.wait()
        os.kill(sum(ranks) - dead, signal.SIGKILL)
        os.wait()


def test_ranks_start_again_beside_the_store_of_torchrun_and_end_with_it(tmp_path, data, forkserver):
    """The store has the addresses of the dead; orphans would keep the folder and the devices."""
    options = small(data, train={"steps": 3000}, checkpoint={"every_steps": 2})
    words = ["train", write_config(tmp_path / "c.yaml", options), "--output", tmp_path / "run"]
    mine, theirs = forkserver.Pipe()
    process = forkserver.Process(target=torchrun_stand_in, args=(words, theirs))
    process.start()
    deadline = time.monotonic() + 240

    def wait_for(step):
        while step not in logged_steps(tmp_path / "run"):
            assert time.monotonic() < deadline
            assert process.is_alive()
            time.sleep(0.01)

    first = mine.recv()
    wait_for(3)
    os.kill(first[1], signal.SIGKILL)
    second = mine.recv()
    wait_for(max(logged_steps(tmp_path / "run")) + 3)
    process.kill()
    assert left_after([*first, *second], GONE_WITHIN_S) == []
    steps = logged_steps(tmp_path / "run")
    assert steps == list(range(1, last(tmp_path / "run").step + 1))


def test_ranks_do_not_search_the_current_folder():
    assert interpreter() == [sys.executable, "-P"]


@pytest.mark.slow("commands", "trainer", "distributed")
@pytest.mark.parametrize(("dies", "steps"), [("a rank", 40), ("torchrun", 3000)])
def test_torchrun_starts_ranks_again_once_and_they_end_with_it(tmp_path, data, dies, steps):
    options = small(data, train={"steps": steps}, checkpoint={"every_steps": 2})
    words = ["train", write_config(tmp_path / "c.yaml", options), "--output", tmp_path / "run"]
    meeting = ["--rdzv-backend", "c10d", "--rdzv-endpoint", f"127.0.0.1:{free_port()}"]
    torchrun = ["torch.distributed.run", "--nproc-per-node", "2", *meeting, "--max-restarts", "1"]
    command = Command(tmp_path, *words, program=[*torchrun, "-m", "segtrain"])
    command.wait_for_step(tmp_path / "run", 3)
    ranks = command.ranks()
    assert len(ranks) == 2
    os.kill(ranks[1] if dies == "a rank" else command.process.pid, signal.SIGKILL)
    if dies == "torchrun":
        assert left_after(ranks, GONE_WITHIN_S) == []
        return
    assert command.wait() == 0, command.errors
    assert logged_steps(tmp_path / "run") == list(range(1, steps + 1))
    assert "devices    2 x cpu" in command.output


@pytest.mark.fault(43)
def test_tasks_of_srun_train_and_then_find_the_run_complete(tmp_path, data):
    config = write_config(tmp_path / "c.yaml", with_workers(data, 2))
    srun = SRUN | {"SLURM_STEP_NUM_TASKS": "2", "SLURM_STEP_TASKS_PER_NODE": "2"}
    srun |= {"SLURM_NODEID": "0", "MASTER_ADDR": "127.0.0.1"}
    words = ["train", config, "--output", tmp_path / "run", "--resume"]
    ranks = [{"SLURM_PROCID": str(rank), "SLURM_LOCALID": str(rank)} for rank in range(2)]
    for said in ("train 2/2", "already complete: 2 steps, best mIoU"):
        srun["MASTER_PORT"] = str(free_port())
        tasks = [Command(tmp_path, *words, **srun | rank) for rank in ranks]
        assert [task.wait() for task in tasks] == [0, 0], tasks[0].errors + tasks[1].errors
        assert "devices    2 x cpu" in tasks[0].output
        assert said in tasks[0].output
        assert tasks[1].output == ""
    assert logged_steps(tmp_path / "run") == [1, 2]
