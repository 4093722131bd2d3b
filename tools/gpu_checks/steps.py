"""Whole steps with synchronized batch norm on one rank, beside cuDNN's layer and torch's."""

import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from bench_sync_bn import TorchSyncBatchNorm2d
from rounds import estimate, measure, ratios
from torch import nn

from gpu_checks.findings import Findings
from gpu_checks.stepping import Training, config_of, one_rank
from gpu_checks.watching import added_gib, first_wait, host_waits, in_words, work_of

SYNC, LOCAL, TORCH = "segtrain's, synchronized", "nn.BatchNorm2d", "torch's SyncBatchNorm"
# What a CPU can do in the time.
_TINY = {"backbone": "resnet18", "output_stride": 16, "head_channels": 16, "aux_channels": 16}


def check_large(findings: Findings, device: torch.device, folder: Path) -> None:
    """As in recipes: two crops of 713."""
    if device.type == "cuda":
        _all_precisions(findings, device, (713, 713), 2, {"backbone": "resnet50"})
    else:
        _all_precisions(findings, device, (97, 97), 2, _TINY)


def check_small(findings: Findings, device: torch.device, folder: Path) -> None:
    """So small that the host may be slower than the device."""
    if device.type == "cuda":
        _all_precisions(findings, device, (257, 257), 2, {"backbone": "resnet18"})
    else:
        _all_precisions(findings, device, (65, 65), 2, _TINY)


def _all_precisions(
    findings: Findings,
    device: torch.device,
    size: tuple[int, int],
    images: int,
    model: dict[str, Any],
) -> None:
    with one_rank(device):
        for precision in ("bfloat16", "float32", "float16"):
            config = config_of(size, images, model=model, precision=precision)
            case = f"{model['backbone']}, {images} crops of {size[0]}, {precision}"
            try:
                _one_precision(findings, device, config, case)
            except torch.OutOfMemoryError as error:
                findings.measured(case, f"out of memory: {error}")


def contenders(config: Any, device: torch.device) -> dict[str, Training]:
    """A training with each layer; they differ in nothing else."""
    trainings = {
        SYNC: Training(config, device, synchronized=True),
        LOCAL: Training(config, device, nn.BatchNorm2d),
    }
    if device.type == "cuda":  # it refuses CPU tensors
        trainings[TORCH] = Training(config, device, TorchSyncBatchNorm2d)
    return trainings


def _one_precision(findings: Findings, device: torch.device, config: Any, case: str) -> None:
    trainings = contenders(config, device)
    rounds, warmup = (8, 4) if device.type == "cuda" else (2, 1)
    times = measure(trainings, device=device, rounds=rounds, warmup=warmup)
    for name, training in trainings.items():
        ms = statistics.median(times[name])
        ratio = estimate(ratios(times[name], times[LOCAL]))
        found = f"{ms:.1f} ms, {ratio} of {LOCAL}"
        figures = {"ms": ms, "ratio": ratio.median, "times_ms": times[name]}
        if device.type == "cuda":
            work, gib = work_of(training), added_gib(training)
            counted = (
                f"{work.kernels} kernels, {work.copies} copies" if work.kernels else "no count"
            )
            found += f"; {counted}; {gib:.2f} GiB"
            figures |= work._asdict() | {"gib": gib}
        findings.measured(f"{case}, {name}", found, **figures)
        if device.type == "cuda":
            judge_waits(findings, f"{case}, {name}: waits of the host", training)
    if device.type != "cuda":
        findings.needs_cuda(f"{case}: kernels, memory, waits of the host; {TORCH}")


def judge_waits(findings: Findings, what: str, training: Callable[[], object]) -> None:
    """A line with the places where a step waits for the device. Afterwards `training` is over."""
    waits = host_waits(training)
    place = first_wait(training)
    found = str(waits.total()) + (f": {in_words(waits)}" if waits else "")
    if place is not None:
        found += f"; the first: {place}"
    figures = {"waits": waits, "first": place}
    if SYNC in what:
        findings.judged(what, not waits and place is None, found, "0", **figures)
    else:
        findings.measured(what, found, **figures)
