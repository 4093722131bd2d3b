"""Thirty steps of float16: are the losses finite, and does the loss scale settle?"""

import math
from pathlib import Path

import torch

from gpu_checks.findings import Findings
from gpu_checks.stepping import Training, config_of

_MOST_SKIPPED = 10  # the scale begins at 2^16 and halves with each


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Trains on one batch over and over, whose loss must fall."""
    is_cuda = device.type == "cuda"
    size, num_steps = ((257, 257), 30) if is_cuda else ((65, 65), 15)
    narrow = {"head_channels": 16, "aux_channels": 16, "output_stride": 16}
    model = {"backbone": "resnet18"} | ({} if is_cuda else narrow)
    config = config_of(size, 4, model=model, precision="float16", lr=0.01)
    losses, skipped, scale = train(Training(config, device), num_steps)

    finite = sum(map(math.isfinite, losses))
    findings.judged(f"finite losses of {num_steps}", finite == num_steps, str(finite), "all")
    first, last = losses[0], min(losses[-3:])
    found = f"{first:.3f} to {last:.3f}"
    findings.judged("loss of one batch", last < first, found, "falls", losses=losses)
    found = f"{skipped}, scale at the end {scale:g}"
    is_good = skipped <= min(_MOST_SKIPPED, num_steps // 2)
    wanted = f"at most {_MOST_SKIPPED}"
    findings.judged("steps left out by overflow", is_good, found, wanted, skipped=skipped)


def train(training: Training, num_steps: int) -> tuple[list[float], int, float]:
    """The losses, how many steps overflowed, and the loss scale at the end."""
    losses, skipped, scaler = [], 0, training.state.scaler
    for _ in range(num_steps):
        before = scaler.get_scale()
        losses.append(training().loss.item())
        skipped += scaler.get_scale() < before
    return losses, skipped, scaler.get_scale()
