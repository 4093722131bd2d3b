"""train.deterministic: equal bits after a kill, and what it costs."""

import os
import signal
import statistics
import subprocess
import time
from contextlib import suppress
from pathlib import Path

import torch
from chaos import curve, fingerprint

from gpu_checks.commands import DEMO, command, draw_scenes, logged, options, segtrain
from gpu_checks.findings import Findings
from segtrain.distributed.machine import descendants

_PATIENCE_S = 120
_WARMUP = 5  # steps whose times do not count


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Trains undisturbed; killed and resumed; and twice without train.deterministic."""
    is_cuda = device.type == "cuda"
    size, steps, scenes = ((128, 256), 80, 40) if is_cuda else ((48, 64), 14, 8)
    data = draw_scenes(folder, scenes, 4, size)
    settings = {
        "data__root": str(data),
        "data__num_workers": 2,
        "augment__crop_size": size,
        "augment__scale_range": [0.5, 1.5],
        "train__steps": steps,
        "train__warmup_steps": 2,
        "train__ema_decay": 0.9,
        "log__every_steps": 1,
        "checkpoint__every_steps": steps // 4,
    }

    def arguments(name: str, deterministic: bool) -> list[object]:
        where = ["--device", device.type, "--nproc", 1, "--output", folder / name]
        chosen = settings | {"train__deterministic": deterministic}
        return ["train", DEMO, *where, *options(**chosen)]

    segtrain(*arguments("alone", True))
    kill_at(arguments("killed", True), folder / "killed", steps // 2)
    segtrain(*arguments("killed", True), "--resume")
    what = "deterministic: an undisturbed run, and one killed and resumed"
    _compare(findings, what, folder / "alone", folder / "killed", must_equal=True)

    segtrain(*arguments("free", False))
    if is_cuda:
        segtrain(*arguments("free_again", False))
        what = "not deterministic: two undisturbed runs"
        _compare(findings, what, folder / "free", folder / "free_again", must_equal=False)
    seconds = {name: _step_s(folder / name) for name in ("alone", "free")}
    found = f"{seconds['alone'] / seconds['free']:.2f}"
    findings.measured("deterministic / not: time of a step", found, **seconds)
    if not is_cuda:
        findings.needs_cuda("two runs that are not deterministic; CPUs are")


def kill_at(arguments: list[object], run: Path, step: int) -> None:
    """Starts a training and kills all its processes when it has logged `step` steps.

    Raises:
        RuntimeError: it did not come so far, or ended before.
    """
    process = subprocess.Popen(command(*arguments), start_new_session=True)
    deadline = time.monotonic() + _PATIENCE_S
    while len(logged(run, "train/loss")) < step and process.poll() is None:
        if time.monotonic() > deadline:
            break
        time.sleep(0.01)
    pids = descendants(process.pid)
    for pid in pids:
        with suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)
    code = process.wait()
    if code >= 0 or time.monotonic() > deadline:
        raise RuntimeError(f"the run ended with {code} before it could be killed at step {step}")


def _compare(findings: Findings, what: str, one: Path, other: Path, *, must_equal: bool) -> None:
    digests = [fingerprint(run)[:8] for run in (one, other)]
    lines = [curve(run) for run in (one, other)]
    equal = digests[0] == digests[1] and lines[0] == lines[1]
    different = sum(a != b for a, b in zip(*lines, strict=False))
    found = f"equal bits, {digests[0]}" if equal else f"{different} of {len(lines[0])} lines differ"
    if must_equal:
        findings.judged(what, equal, found, "equal bits", equal=equal)
    else:
        findings.measured(what, found, equal=equal)


def _step_s(run: Path) -> float:
    return statistics.median(logged(run, "time/step_s")[_WARMUP:])
