"""After an error the message and the exit status come first, whatever leaving the group does."""

import json
import os
import subprocess
import sys
import textwrap

import pytest

from segtrain.distributed import launcher_folder

# A rank alone in its group, whose connections nothing can cut in an orderly way.
STUCK = """
    import sys, time
    import torch
    from segtrain.commands import exit_code
    from segtrain.distributed import aftermath, process_group
    from segtrain.errors import DataError

    def never_returns(*args):
        print("leaving", flush=True)
        time.sleep(1000)

    aftermath.LIMIT_S = 0.2
    torch.distributed.destroy_process_group = never_returns
    torch.distributed.distributed_c10d._abort_process_group = never_returns

    def work():
        with process_group.process_group(torch.device("cpu"), timeout_s=20):
            raise {error}

    {run}
"""
COMMAND = "sys.exit(exit_code.run(work))"


@pytest.fixture
def stuck_rank(tmp_path):
    """`stuck_rank(error, run, launched=...)`: the finished process, and its exit statuses."""

    def start(error, run, *, launched):
        group = {"RANK": "0", "WORLD_SIZE": "1", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "1"}
        environ = os.environ | group | {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        if launched:
            folder = tmp_path / "launcher"
            folder.mkdir(mode=0o700)
            environ[launcher_folder.VARIABLE] = str(folder)
        done = subprocess.run(
            [sys.executable, "-c", textwrap.dedent(STUCK).format(error=error, run=run)],
            env=environ,
            capture_output=True,
            text=True,
            timeout=120,
        )
        records = [json.loads(path.read_text()) for path in tmp_path.rglob("*.json")]
        return done, records

    return start


def test_a_rank_that_cannot_leave_has_told_its_outcome_and_ends_with_its_code(stuck_rank):
    done, (record,) = stuck_rank("DataError('a.png: no')", COMMAND, launched=True)
    assert (done.stdout, done.returncode) == ("leaving\n", 3)
    assert "a.png: no" in done.stderr
    assert 3 in (record if isinstance(record, list) else record.values())


def test_a_rank_of_another_launcher_too(stuck_rank):
    done, _ = stuck_rank("DataError('a.png: no')", COMMAND, launched=False)
    assert (done.returncode, "a.png: no" in done.stderr) == (3, True)


@pytest.mark.parametrize("run", [COMMAND, "work()"], ids=["command", "library"])
def test_an_internal_error_has_shown_its_traceback(stuck_rank, run):
    done, _ = stuck_rank("ValueError('broken')", run, launched=False)
    assert done.returncode == 1
    assert done.stderr.rstrip().endswith("ValueError: broken")
    assert done.stdout == "leaving\n"
