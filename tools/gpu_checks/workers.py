"""Loader workers that are killed: does the run end soon, and name them?"""

import os
import signal
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import torch
from chaos import loader_workers

from gpu_checks.commands import DEMO, command, draw_scenes, logged, options
from gpu_checks.findings import Findings
from segtrain.distributed.machine import descendants, is_alive
from segtrain.errors import EXIT_SYSTEM

_PATIENCE_S = 60  # the run's own limit is longer: whoever reaches this hangs


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Kills a worker of ten runs (on a CPU two), at other moments."""
    is_cuda = device.type == "cuda"
    data = draw_scenes(folder, 16, 4, (64, 128))
    for number in range(10 if is_cuda else 2):
        _one_run(findings, device, data, folder / f"run_{number}", number)
    if not is_cuda:
        findings.needs_cuda("with pinned memory, whose thread may notice the death first")


def _one_run(findings: Findings, device: torch.device, data: Path, run: Path, number: int) -> None:
    settings = {
        "data__root": str(data),
        "data__num_workers": 2,
        "data__prefetch": 1,
        "augment__crop_size": [48, 64],
        "train__steps": 100_000,
        "train__timeout_s": 300,
        "log__every_steps": 1,
    }
    where = ["--device", device.type, "--nproc", 1, "--output", run]
    output = run.with_suffix(".out")
    with output.open("wb") as file:
        process = subprocess.Popen(
            command("train", DEMO, *where, *options(**settings)),
            stdout=file,
            stderr=file,
            start_new_session=True,
        )
    pids = [process.pid]
    try:
        worker = wait_for_worker(process, run)
        time.sleep(0.037 * number)  # another moment of the step each time
        pids = descendants(process.pid)
        began = time.monotonic()
        os.kill(worker, signal.SIGKILL)
        with suppress(subprocess.TimeoutExpired):
            process.wait(_PATIENCE_S)
        seconds = time.monotonic() - began
        code, text = process.poll(), output.read_text()
        left = [pid for pid in pids if is_alive(pid)]
    finally:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
    is_named = "worker" in text and "killed" in text and "Traceback" not in text
    is_good = code == EXIT_SYSTEM and is_named and not left
    said = text.strip().splitlines()[-1] if text.strip() else "nothing"
    found = f"ended with {code} after {seconds:.1f} s: {said}"
    if left:
        found += f"; {len(left)} processes left"
    wanted = f"exit code {EXIT_SYSTEM}, the worker named"
    findings.judged(f"kill {number + 1}", is_good, found, wanted, code=code, seconds=seconds)


def wait_for_worker(process: subprocess.Popen, run: Path) -> int:
    """A loader worker of a run that has trained two steps.

    Raises:
        RuntimeError: the run does not come so far.
    """
    deadline = time.monotonic() + _PATIENCE_S
    while time.monotonic() < deadline and process.poll() is None:
        if len(logged(run, "train/loss")) >= 2 and (found := loader_workers(process.pid)):
            return found[0]
        time.sleep(0.02)
    raise RuntimeError("the run did not come to its second step")
