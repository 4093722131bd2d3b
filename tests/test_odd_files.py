"""A run is resumed though something in its directory is not what it was."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from experiments import last, losses, refusal, small, train, write_config


def nothing(path):
    """As after a loss of power."""
    path.write_bytes(b"")


def garbage(path):
    path.write_bytes(b"\xff[\0{" * 100)


def brackets(path):
    """More than Python's stack holds; each `json.loads` of it is a RecursionError."""
    path.write_bytes(b"[" * 200_000 + b'"eval/mIoU"\n')


def no_target(path):
    path.symlink_to("nowhere")


def bad_disk(path):
    """A plain file that opens, and whose first byte cannot be read: [Errno 5]."""
    path.symlink_to("/proc/self/mem")


KINDS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link": no_target,
    "bad disk": bad_disk,
    "empty": nothing,
    "garbage": garbage,
    "brackets": brackets,
}
ALL = tuple(KINDS)

# What the run ends with: 0, or an exit code and what is said.
GOES_ON = {
    "config.yaml": ("link", "empty"),
    "environment.json": ("link", "bad disk", "empty", "garbage", "brackets"),
    "metrics.jsonl": ALL,
    "train.log": ("folder", "pipe", "link", "empty", "garbage"),
    ".lock": ("empty", "garbage"),
    "checkpoints/last.pt": ALL,
    "checkpoints/previous.pt": ALL,
    "checkpoints/best.pt": ALL,
    "checkpoints/step_0000001.pt": ALL,
    "checkpoints/manifest.json": ("link",),
}
REFUSED = {
    "config.yaml": (2, ("folder", "pipe", "bad disk", "garbage")),
    "environment.json": (2, ("folder", "pipe")),
    ".lock": (2, ("folder", "pipe", "link", "bad disk")),
    "checkpoints": (2, ("pipe", "link", "bad disk", "empty", "garbage")),
    "checkpoints/manifest.json": (4, ("folder", "pipe", "bad disk", "empty", "garbage")),
}


def replaced(run, copy, name, kind):
    """`copy` becomes `run` with something else under `name`."""
    shutil.copytree(run, copy)
    path = copy / name
    if path.is_dir():
        shutil.rmtree(path)
    else:
        path.unlink(missing_ok=True)
    KINDS[kind](path)


def resumed(run, cases, config, where):
    """How resuming the run ends in each case, in one process; what hangs ends it."""
    found = {}
    for number, (name, kind) in enumerate(cases):
        copy = where / str(number)
        replaced(run, copy, name, kind)
        signal.alarm(100)
        ended = refusal(train, config, copy, True)
        signal.alarm(0)
        assert list(copy.rglob("*.tmp")) == [], (name, kind)
        log = ""
        if ended is None:
            assert last(copy).step == 3, (name, kind)
            assert name == "metrics.jsonl" or len(losses(copy)) == 3, (name, kind)
            assert (copy / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes()
            path = copy / "train.log"
            log = path.read_text(errors="replace") if path.is_file() else ""
        found[name, kind] = ended, log
    return found


@pytest.fixture(scope="module")
def stopped(run_ranks, tmp_path_factory, data):
    """The config and the directory of a run with one step to go."""
    where = tmp_path_factory.mktemp("stopped")
    options = small(
        data,
        train={"steps": 3},
        eval={"every_steps": 1},
        checkpoint={"keep_every_steps": 1, "keep_limit": 1},
    )
    config = write_config(where / "c.yaml", options)
    assert run_ranks(1, train, config, where / "run", until=2) == [0]
    names = sorted(path.name for path in (where / "run" / "checkpoints").iterdir())
    assert names == ["best.pt", "last.pt", "manifest.json", "previous.pt", "step_0000002.pt"]
    return config, where / "run"


CASES = [(name, kind) for name, kinds in GOES_ON.items() for kind in kinds]
CASES += [(name, kind) for name, (_, kinds) in REFUSED.items() for kind in kinds]
# One of each cause; going on takes a second.
FEW = [
    *(("config.yaml", "empty"), ("metrics.jsonl", "folder"), ("train.log", "pipe")),
    *(("environment.json", "brackets"), ("metrics.jsonl", "brackets")),
    *(("checkpoints/last.pt", "bad disk"), ("checkpoints/best.pt", "folder")),
    *((name, kinds[0]) for name, (_, kinds) in REFUSED.items()),
]


@pytest.mark.fault(46)
@pytest.mark.parametrize("cases", [FEW, pytest.param(CASES, marks=pytest.mark.slow)])
def test_whatever_lies_in_a_run_directory_there_is_a_message_or_the_run_goes_on(
    run_ranks, tmp_path, stopped, cases
):
    config, run = stopped
    (found,) = run_ranks(1, resumed, run, cases, config, tmp_path)
    for (name, kind), (ended, log) in found.items():
        if kind in GOES_ON.get(name, ()):
            assert ended is None, (name, kind, ended)
            if name.endswith("/last.pt"):
                assert "previous.pt instead, step 2" in log
            if name == "config.yaml":
                assert "config.yaml was missing or empty: restored from last.pt, step 2" in log
            if (name, kind) == ("metrics.jsonl", "folder"):
                assert "metrics.jsonl " in log
                assert "warning: " in log
            continue
        _, code, said = ended
        assert code == REFUSED[name][0], (name, kind, said)
        assert Path(name).name in said
        assert not said.endswith(".")
