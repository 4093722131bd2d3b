"""torch.compile: does it train the same, in one graph, and how much faster?

The check runs with TORCH_LOGS=recompiles: its output tells why torch compiled again, if it did.
"""

import statistics
import time
from pathlib import Path

import torch
from rounds import estimate, measure, ratios
from torch._dynamo.utils import counters

from gpu_checks.findings import Findings
from gpu_checks.stepping import Training, config_of, greatest_difference

_COMPARED = 3  # steps; later ones amplify rounding errors
# Compiled code rounds bfloat16 at other places, where it joins operations.
_RTOL = {"float32": 1e-4, "bfloat16": 2e-2}


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Trains with and without it, on equal batches."""
    if device.type == "cuda":
        cases = {"bfloat16": ((512, 1024), 4), "float32": ((257, 257), 4)}
        model = {"backbone": "resnet18"}
    else:
        cases = {"float32": ((49, 49), 2)}
        model = {"backbone": "resnet18", "output_stride": 16}
        model |= {"head_channels": 8, "aux_channels": 8}
    for precision, (size, images) in cases.items():
        trainings = {}
        for name in ("eager", "compiled"):
            options = {"precision": precision, "compile": name == "compiled"}
            trainings[name] = Training(config_of(size, images, model=model, **options), device)
        _compare(findings, device, trainings, precision)
        torch.compiler.reset()


def _compare(
    findings: Findings, device: torch.device, trainings: dict[str, Training], precision: str
) -> None:
    counters.clear()
    losses, first_s = {}, {}
    for name, training in trainings.items():
        began = time.perf_counter()
        losses[name] = [training().loss.item()]
        first_s[name] = time.perf_counter() - began
        losses[name] += [training().loss.item() for _ in range(_COMPARED - 1)]
    difference = greatest_difference(losses["compiled"], losses["eager"])
    what = f"{precision}: difference of the first {_COMPARED} losses"
    is_good = difference <= _RTOL[precision]
    wanted = f"at most {_RTOL[precision]}"
    findings.judged(what, is_good, f"{difference:.1e}", wanted, losses=losses)

    rounds = 8 if device.type == "cuda" else 3
    times = measure(trainings, device=device, rounds=rounds, warmup=2)
    ratio = estimate(ratios(times["eager"], times["compiled"]))
    ms = statistics.median(times["compiled"])
    found = f"{ratio}, {ms:.1f} ms compiled, first step {first_s['compiled']:.0f} s"
    findings.measured(f"{precision}: eager / compiled", found, times_ms=times, first_s=first_s)
    graphs = counters["stats"]["unique_graphs"]
    findings.judged(f"{precision}: graphs compiled", graphs == 1, str(graphs), "1", graphs=graphs)
