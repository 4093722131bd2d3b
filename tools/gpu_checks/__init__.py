"""The checks of tools/gpu_check.py, each in a process of its own.

A check is a function `check(findings, device, folder)`: it asks its questions on `device`, smaller
on a CPU, and may write into `folder`. Importing this package imports no torch.
"""

from collections.abc import Mapping
from types import MappingProxyType
from typing import NamedTuple


class Check(NamedTuple):
    """One check.

    place: "module:function".
    limit_s: after which it is killed.
    environment: variables that it is started with.
    """

    place: str
    question: str
    limit_s: float
    environment: Mapping[str, str] = MappingProxyType({})


# The most telling ones first: a run that is cut has answered them.
CHECKS = {
    "norm": Check("gpu_checks.norm:check", "is synchronized batch norm exact?", 240),
    "steps_713": Check(
        "gpu_checks.steps:check_large",
        "steps of PSPNet-R50 at 713: waits, kernels, ms, memory",
        240,
    ),
    "steps_257": Check(
        "gpu_checks.steps:check_small",
        "steps of PSPNet-R18 at 257: waits, kernels, ms, memory",
        180,
    ),
    "ranks": Check(
        "gpu_checks.ranks:check", "do 1, 2 and 3 ranks on one device train the same model?", 180
    ),
    "throughput": Check(
        "gpu_checks.throughput:check",
        "PSPNet-R50 at 512x1024 beside torchvision's reference loop",
        420,
    ),
    "pack": Check("gpu_checks.pack:check", "does a step wait for data from a pack?", 240),
    "demo": Check(
        "gpu_checks.demonstration:check", "the demo, whole and with two virtual ranks", 300
    ),
    "deterministic": Check(
        "gpu_checks.deterministic:check", "are bits equal after a kill, and what does it cost?", 240
    ),
    "layers": Check(
        "gpu_checks.layers:check", "the layer beside cuDNN's, torch's and a prototype", 150
    ),
    "float16": Check("gpu_checks.half:check", "thirty steps of float16", 90),
    "compile": Check(
        "gpu_checks.compiled:check",
        "torch.compile: equal losses, graphs, speed",
        300,
        # Otherwise the first step would be short where code is left of another run.
        {"TORCH_LOGS": "recompiles", "TORCHINDUCTOR_FORCE_DISABLE_CACHES": "1"},
    ),
    "workers": Check(
        "gpu_checks.workers:check", "is a killed loader worker noticed and named?", 300
    ),
    "evaluation": Check(
        "gpu_checks.evaluation:check", "eval, predict and export beside the CPU's", 240
    ),
}
