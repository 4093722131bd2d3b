"""Checks for the tests of tools/gpu_check.py.

They run as `python gpu_check_stubs.py PLACE DEVICE FILE FOLDER`, without the seconds that importing
torch takes.
"""

import os
import subprocess
import sys
import time
from pathlib import Path

from gpu_checks.findings import Findings

from segtrain.distributed.machine import is_alive


def passes(findings, device, folder):
    note("passes")
    findings.judged("one", True, "1", "1", value=1)


def fails(findings, device, folder):
    findings.judged("sum", False, "3", "4 | or 5")
    findings.measured("time", "2 ms")


def needs(findings, device, folder):
    findings.judged("half of it", True, "1", "1")
    findings.needs_cuda("the rest")


def crashes(findings, device, folder):
    findings.measured("before", "1 ms")
    os.kill(os.getpid(), 11)


def runs_out(findings, device, folder):
    raise MemoryError("all is taken")


def hangs(findings, device, folder):
    findings.measured("before", "1 ms")
    note("hangs")
    # In a session of its own, as a rank that a launcher has started.
    child = subprocess.Popen(["sleep", "300"], start_new_session=True)
    Path(os.environ["GPU_CHECK_NOTES"], "child").write_text(str(child.pid))
    time.sleep(300)


def hangs_once(findings, device, folder):
    if note("hangs_once") == 1:
        hangs(findings, device, folder)
    findings.judged("files", not list(Path(folder).iterdir()), "none", "none")
    child = int(Path(os.environ["GPU_CHECK_NOTES"], "child").read_text())
    findings.judged("what the first time has left", not is_alive(child), "nothing", "nothing")


def note(name):
    """How often a check has been started."""
    path = Path(os.environ["GPU_CHECK_NOTES"], name)
    path.write_text((path.read_text() if path.exists() else "") + "x")
    return len(path.read_text())


if __name__ == "__main__":
    place, device, file, folder = sys.argv[1:]
    found = Findings(Path(file))
    globals()[place](found, device, folder)
    found.end()
