"""Steps of PSPNet-R50 at 512x1024: images/s, share of the device's peak, cost of batch norm."""

import gc
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import torch
from rounds import estimate, measure, ratios

from gpu_checks.findings import Findings
from gpu_checks.reference import ReferenceLoop
from gpu_checks.stepping import NUM_CLASSES, config_of, one_rank, random_batch
from gpu_checks.steps import LOCAL, SYNC, contenders, judge_waits
from gpu_checks.watching import added_gib
from segtrain.config import Config
from segtrain.training.measure import matmul_peak, training_flops

# What the issue of speed asks for on a CUDA device.
_TIMES_REFERENCE, _OF_PEAK, _SYNC_RATIO = 2.0, 0.4, 1.05
REFERENCE, WITH_AMP = "torchvision's loop", "torchvision's loop --amp"


class Sizes(NamedTuple):
    """What is measured."""

    model: dict[str, Any]
    crop: tuple[int, int]
    batches: tuple[int, ...]
    rounds: int
    warmup: int


CUDA_SIZES = Sizes({"backbone": "resnet50"}, (512, 1024), (2, 4, 8, 16), 10, 4)
CPU_SIZES = Sizes(
    {"backbone": "resnet18", "output_stride": 16, "head_channels": 16, "aux_channels": 16},
    (64, 128),
    (2,),
    3,
    1,
)


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Every batch size: segtrain in bfloat16 with three norm layers, and the reference loop."""
    sizes = CUDA_SIZES if device.type == "cuda" else CPU_SIZES
    with one_rank(device):
        peak = matmul_peak(device, _config(sizes, 2).train)
        found = f"{peak / 1e12:.3g} TFLOP/s"
        findings.measured("bfloat16 peak in matrix products", found, flops=peak)
        flops = training_flops(_config(sizes, 2), NUM_CLASSES)
        for images in sizes.batches:
            _one_batch(findings, device, sizes, images, flops / peak)
            _free(device)
    if device.type != "cuda":
        findings.needs_cuda("PSPNet-R50, 512x1024, batches 2 to 16; memory; waits of the host")
    findings.not_measured("mmsegmentation's loop", "see tools/bench_against.py")


def _config(sizes: Sizes, images: int) -> Config:
    return config_of(sizes.crop, images, model=sizes.model, precision="bfloat16")


def _one_batch(
    findings: Findings, device: torch.device, sizes: Sizes, images: int, peak_s: float
) -> None:
    """peak_s: seconds that an image would take at the peak."""
    config, case = _config(sizes, images), f"batch {images}"
    is_cuda = device.type == "cuda"
    own_ms = None
    try:
        trainings = contenders(config, device)
        times = measure(trainings, device=device, rounds=sizes.rounds, warmup=sizes.warmup)
        # Alone on a device, segtrain's layer is nn.BatchNorm2d.
        own_ms = statistics.median(times[LOCAL])
        for name in trainings:
            ms = statistics.median(times[name])
            share = 1e3 * images * peak_s / ms
            found = f"{1e3 * images / ms:.1f} images/s, {ms:.1f} ms, {share:.0%} of the peak"
            if is_cuda:
                gib = added_gib(trainings[name])
                found += f", {gib:.1f} GiB"
            findings.measured(f"{case}, {name}", found, ms=ms, share=share, times_ms=times[name])
        share = 1e3 * images * peak_s / own_ms
        ratio = estimate(ratios(times[SYNC], times[LOCAL]))
        _wanted(
            findings,
            device,
            f"{case}: of the peak",
            share,
            share >= _OF_PEAK,
            f"at least {_OF_PEAK}",
        )
        good = ratio.median <= _SYNC_RATIO
        what = f"{case}: synchronized / {LOCAL}"
        _wanted(findings, device, what, ratio.median, good, f"at most {_SYNC_RATIO}", str(ratio))
        if is_cuda:
            judge_waits(findings, f"{case}, {SYNC}: waits of the host", trainings[SYNC])
    except torch.OutOfMemoryError as error:
        findings.not_measured(f"{case}, segtrain", f"out of memory: {error}")
    trainings = None
    _free(device)
    # A CPU has no float16 to speak of.
    for name in (REFERENCE, WITH_AMP) if is_cuda else (REFERENCE,):
        ms = _reference_ms(findings, device, config, sizes, name)
        _free(device)
        if ms is not None and own_ms is not None:
            factor = ms / own_ms
            is_good, wanted = factor >= _TIMES_REFERENCE, f"at least {_TIMES_REFERENCE}"
            what = f"{case}: {name} / segtrain, time of a step"
            if name == REFERENCE:
                _wanted(findings, device, what, factor, is_good, wanted)
            else:
                findings.measured(what, f"{factor:.2f}", value=factor)


def _reference_ms(
    findings: Findings, device: torch.device, config: Config, sizes: Sizes, name: str
) -> float | None:
    """Milliseconds of a step of the reference loop; None: it does not fit in memory."""
    images = config.train.batch_size
    batch = random_batch(sizes.crop, images, torch.device("cpu"))
    try:
        loop: Callable[[], float] = ReferenceLoop(
            config, device, *batch[:2], num_classes=NUM_CLASSES, amp=name == WITH_AMP
        )
        times = measure({name: loop}, device=device, rounds=sizes.rounds, warmup=sizes.warmup)
    except torch.OutOfMemoryError as error:
        findings.not_measured(f"batch {images}, {name}", f"out of memory: {error}")
        return None
    ms = statistics.median(times[name])
    found = f"{1e3 * images / ms:.1f} images/s, {ms:.1f} ms"
    findings.measured(f"batch {images}, {name}", found, ms=ms, times_ms=times[name])
    return ms


def _wanted(
    findings: Findings,
    device: torch.device,
    what: str,
    value: float,
    is_good: bool,
    wanted: str,
    found: str | None = None,
) -> None:
    """A line that is judged on CUDA only: the aims are for such a device."""
    found = found or f"{value:.2f}"
    if device.type == "cuda":
        findings.judged(what, is_good, found, wanted, value=value)
    else:
        findings.measured(what, found, value=value)


def _free(device: torch.device) -> None:
    """Gives the memory of what is gone back to the device."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
