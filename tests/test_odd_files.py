"""A run is resumed though something in its directory is not what it was."""

import os
import shutil
import signal
from collections.abc import Callable
from pathlib import Path

import pytest
from experiments import last, losses, refusal, small, train, write_config

KINDS: dict[str, Callable[[Path], object]] = {
    "folder": Path.mkdir,
    "pipe": os.mkfifo,
    "link": lambda path: path.symlink_to("nowhere"),
    # A plain file that opens, and whose first byte cannot be read: [Errno 5].
    "bad disk": lambda path: path.symlink_to("/proc/self/mem"),
    "empty": Path.touch,  # as after a loss of power
    "garbage": lambda path: path.write_bytes(b"\xff[\0{" * 100),
    # More than Python's stack holds; each `json.loads` of it is a RecursionError.
    "brackets": lambda path: path.write_bytes(b"[" * 200_000 + b'"eval/mIoU"\n'),
}
ALL = tuple(KINDS)

# What the run ends with: 0, or an exit code and what is said.
GOES_ON = {
    "config.yaml": ("link",),
    "environment.json": ALL,
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
    "config.yaml": (2, ("folder", "pipe", "bad disk", "empty", "garbage")),
    ".lock": (2, ("folder", "pipe", "link", "bad disk")),
    "checkpoints": (4, ("pipe", "link", "bad disk", "empty", "garbage")),
    "checkpoints/manifest.json": (4, ("folder", "pipe", "bad disk", "empty", "garbage")),
}


def resumed(run, cases, config, where):
    """How resuming the run ends in each case, in one process; what hangs ends it.

    A case is one or several files and what they are.
    """
    found = {}
    for number, case in enumerate(cases):
        copy = Path(shutil.copytree(run, where / str(number)))
        for name, kind in case.items():
            if (copy / name).is_dir():
                shutil.rmtree(copy / name)
            (copy / name).unlink(missing_ok=True)
            KINDS[kind](copy / name)
        signal.alarm(100)
        ended, log = refusal(train, config, copy, True), ""
        signal.alarm(0)
        assert list(copy.rglob("*.tmp")) == [], case
        if ended is None:
            assert last(copy).step == 3, case
            assert "metrics.jsonl" in case or len(losses(copy)) == 3, case
            assert (copy / "config.yaml").read_bytes() == (run / "config.yaml").read_bytes()
            path = copy / "train.log"
            log = path.read_text(errors="replace") if path.is_file() else ""
        found |= dict.fromkeys(case.items(), (ended, log))
    return found


@pytest.fixture(scope="module")
def stopped(run_ranks, tmp_path_factory, data):
    """The config and the directory of a run with one step to go."""
    where = tmp_path_factory.mktemp("stopped")
    options = small(
        data, train={"steps": 3}, eval={"every_steps": 1}, checkpoint={"keep_every_steps": 1}
    )
    config = write_config(where / "c.yaml", options)
    assert run_ranks(1, train, config, where / "run", until=2) == [0]
    names = sorted(path.name for path in (where / "run" / "checkpoints").iterdir())
    kept = ["step_0000001.pt", "step_0000002.pt"]
    assert names == ["best.pt", "last.pt", "manifest.json", "previous.pt", *kept]
    return config, where / "run"


CASES = [{name: kind} for name, kinds in GOES_ON.items() for kind in kinds]
CASES += [{name: kind} for name, (_, kinds) in REFUSED.items() for kind in kinds]
# One of each cause; going on takes a second, so that several files are odd at once.
FEW = [
    {
        "environment.json": "folder",
        "metrics.jsonl": "folder",
        "checkpoints/last.pt": "bad disk",
        "checkpoints/best.pt": "folder",
    },
    {"config.yaml": "link", "metrics.jsonl": "brackets"},
    {"train.log": "pipe"},
    *({name: kinds[0]} for name, (_, kinds) in REFUSED.items()),
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
                assert "checkpoint says, and is written anew: it was missing" in log
            if (name, kind) == ("metrics.jsonl", "folder"):
                assert "metrics.jsonl " in log
                assert "warning: " in log
            continue
        _, code, said = ended
        assert code == REFUSED[name][0], (name, kind, said)
        assert Path(name).name in said
        assert not said.endswith(".")
