"""Two thousand steps, with what may happen to a run on the way."""

import shutil
from pathlib import Path

import pytest
from experiments import curve, last, small, write_config, write_data
from processes import Command

from segtrain.distributed.machine import descendants

# A clock that is set back by an hour when the file beside it appears, in every process of the run.
CLOCK = """
import os, time
real = time.time
sign = os.path.join(os.path.dirname(__file__), "back")
time.time = lambda: real() - 3600 * os.path.exists(sign)
"""


def footprint(pid):
    """Megabytes in memory, open files and processes of a run."""
    everyone = descendants(pid)
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    files = sum(len(list(Path(f"/proc/{one}/fd").iterdir())) for one in everyone)
    return int(resident.split()[1]) / 1024, files, len(everyone)


@pytest.mark.slow
@pytest.mark.fault(26, 32, 85)
def test_two_thousand_steps_take_no_more_than_two_hundred(small_disk, tmp_path):
    """Files of TensorBoard are deleted, the disk is full for a while, the clock is set back."""
    data, clock = tmp_path / "data", tmp_path / "clock"
    data.mkdir()
    clock.mkdir()
    write_data(data)
    (clock / "sitecustomize.py").write_text(CLOCK)
    # 4 MB hold no checkpoint of the model: they lie elsewhere, where there is room.
    run, room = small_disk / "run", tmp_path / "room"
    room.mkdir()
    run.mkdir()
    (run / "checkpoints").symlink_to(room)
    options = small(
        data,
        data={"num_workers": 2},
        train={"steps": 2000, "batch_size": 2},
        log={"every_steps": 10},
        eval={"every_steps": 500},
        checkpoint={"every_steps": 200},
    )
    config = write_config(tmp_path / "c.yaml", options)
    command = Command(
        tmp_path, "train", config, "--output", run, PYTHONPATH=f"{clock}:{Path.cwd()}"
    )
    command.wait_for_step(run, 200)
    early = footprint(command.process.pid)

    command.wait_for_step(run, 400)
    for path in run.glob("events.*"):
        path.unlink()
    command.wait_for_step(run, 600)
    (clock / "back").touch()
    command.wait_for_step(run, 1800)
    late = footprint(command.process.pid)
    # The last two hundred steps find no room for their curves.
    (small_disk / "other").write_bytes(bytes(shutil.disk_usage(small_disk).free))
    assert command.wait() == 0, command.errors
    assert command.errors == ""
    assert late[0] < 1.1 * early[0]
    assert late[1:] == early[1:]
    assert last(run).step == 2000
    said = command.output
    assert said.count("warning: metrics.jsonl cannot be written any more") == 1
    assert "step 2000  mIoU" in said
    # Begun anew when they were deleted, and ended when the disk was full.
    steps = [step for step, _ in curve(run, "train/loss")]
    assert 400 <= steps[0] <= 420
    assert 1800 <= steps[-1] <= 1820
    assert steps == list(range(steps[0], steps[-1] + 1, 10))
