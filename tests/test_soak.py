"""Two thousand steps take no more than two hundred."""

import time
from pathlib import Path

import pytest
from experiments import last, small, write_config
from processes import Command

from segtrain.distributed.machine import descendants


def footprint(pid):
    """Megabytes in memory, open files and processes of a run.

    Files come and go with batches on their way and with a checkpoint: the fewest of many looks.
    """
    looks = []
    for _ in range(50):
        looks.append(_look(pid))
        time.sleep(0.02)
    return tuple(map(min, zip(*looks, strict=True)))


def _look(pid):
    everyone = descendants(pid)
    status = Path(f"/proc/{pid}/status").read_text()
    resident = next(line for line in status.splitlines() if line.startswith("VmRSS"))
    files = sum(len(list(Path(f"/proc/{one}/fd").iterdir())) for one in everyone)
    return int(resident.split()[1]) / 1024, files, len(everyone)


@pytest.mark.slow
def test_two_thousand_steps_take_no_more_than_two_hundred(data, tmp_path):
    options = small(
        data,
        data={"num_workers": 2},
        train={"steps": 2000, "batch_size": 2},
        log={"every_steps": 10},
        eval={"every_steps": 500},
        checkpoint={"every_steps": 200},
    )
    run, config = tmp_path / "run", write_config(tmp_path / "c.yaml", options)
    command = Command(tmp_path, "train", config, "--output", run)
    command.wait_for_step(run, 200)
    early = footprint(command.process.pid)
    command.wait_for_step(run, 1800)
    late = footprint(command.process.pid)
    assert command.wait() == 0, command.errors
    assert late[0] < 1.1 * early[0]
    # On a busy machine batches were on their way at each of the early looks.
    assert late[1] <= early[1]
    assert late[2] == early[2]
    assert last(run).step == 2000
