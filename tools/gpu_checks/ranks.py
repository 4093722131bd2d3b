"""One, two and three ranks that share the device over gloo: do they train the same model?

NCCL refuses two ranks on one device; gloo takes CUDA tensors through the host.
"""

import os
from concurrent.futures import ProcessPoolExecutor
from datetime import timedelta
from multiprocessing import get_context
from pathlib import Path

import torch
import torch.distributed as torch_dist

from gpu_checks.findings import Findings
from gpu_checks.stepping import (
    Training,
    config_of,
    free_port,
    greatest_difference,
    group_variables,
)

_RANKS = (1, 2, 3)
_STEPS, _IMAGES = 3, 6
_RTOL = 1e-9  # in float64, where numbers of ranks differ in rounding only
_AGREED = 1e-12  # between ranks, which have the same sums
_TIMEOUT_S = 90


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Trains three steps of float64 on each number of ranks."""
    losses, norms = {}, {}
    for num in _RANKS:
        losses[num], norms[num] = on_ranks(num, device.type)
    for num in _RANKS[1:]:
        for what, values in (("losses", losses), ("gradient norms", norms)):
            difference = greatest_difference(values[num], values[1])
            case = f"{num} ranks: {_STEPS} {what}, difference to one rank"
            is_good = difference <= _RTOL
            figures = {"one": values[1], "these": values[num]}
            findings.judged(case, is_good, f"{difference:.1e}", f"at most {_RTOL}", **figures)
    if device.type != "cuda":
        findings.needs_cuda("ranks that share a CUDA device")


def on_ranks(num: int, device: str) -> tuple[list[float], list[float]]:
    """Losses and gradient norms of a training on `num` fresh ranks.

    Raises:
        RuntimeError: the ranks disagree.
    """
    port = free_port()
    # Not by a fork: CUDA does not survive one.
    with ProcessPoolExecutor(num, get_context("spawn")) as pool:
        tasks = [pool.submit(_rank, rank, num, port, device) for rank in range(num)]
        results = [task.result() for task in tasks]
    first = [*results[0][0], *results[0][1]]
    if any(greatest_difference([*one, *other], first) > _AGREED for one, other in results):
        raise RuntimeError(f"the {num} ranks disagree: {results}")
    return results[0]


def _rank(rank: int, num: int, port: int, kind: str) -> tuple[list[float], list[float]]:
    os.environ.update(group_variables(rank, num, port))
    torch.set_num_threads(1)
    device = torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")
    if kind == "cuda":
        torch.cuda.set_device(device)
    # segtrain would choose NCCL; a group that exists is kept.
    torch_dist.init_process_group("gloo", timeout=timedelta(seconds=_TIMEOUT_S))
    model = {"backbone": "resnet18", "output_stride": 16, "head_channels": 16, "aux_channels": 16}
    size = (65, 81) if kind == "cuda" else (33, 41)
    config = config_of(size, _IMAGES, model=model, precision="float64")
    training = Training(config, device)
    steps = [training() for _ in range(_STEPS)]
    results = [one.loss.item() for one in steps], [one.grad_norm.item() for one in steps]
    torch_dist.destroy_process_group()
    return results
