"""Synchronized batch norm beside F.batch_norm in float64 on the CPU, and the tests of the layer."""

import importlib.util
import os
import subprocess
import sys
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import torch
import torch.nn.functional as F
from torch import Tensor

from gpu_checks.findings import Findings
from gpu_checks.stepping import as_among_two, greatest_difference, one_rank
from segtrain.norm import SyncBatchNorm2d

_ROOT = Path(__file__).resolve().parent.parent.parent
_CHANNELS = 8
_SHAPE = (4, _CHANNELS, 129, 65)
# The largest error of an output or a gradient, in standard deviations of the exact values. Rounding
# to the type is 2^-24, 2^-11 and 2^-8 of a value, of which the largest are about 5.
_ATOL = {torch.float32: 1e-5, torch.float16: 6e-3, torch.bfloat16: 4e-2}
# How far the mean lies from 0, in standard deviations; beside it how exact the variance must be.
_RATIOS = {1.0: 1e-5, 1e2: 1e-5, 1e4: 1e-3}


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Compares the layer, alone but on the way of several ranks, and runs its tests."""
    with one_rank(device), as_among_two():
        for dtype, atol in _ATOL.items():
            for layout in (torch.contiguous_format, torch.channels_last):
                error = largest_error(device, dtype, layout)
                name = f"{_name(dtype)}, {_name(layout)}: largest error of y, dx, dweight, dbias"
                findings.judged(name, error <= atol, f"{error:.1e}", f"at most {atol}", error=error)
        for ratio, rtol in _RATIOS.items():
            error = variance_error(device, ratio)
            name = f"variance in float32, mean {ratio:g} standard deviations from 0"
            findings.judged(name, error <= rtol, f"{error:.1e}", f"at most {rtol}", error=error)
    if device.type != "cuda":
        findings.needs_cuda("tests/test_norm_cuda.py")
    elif importlib.util.find_spec("pytest") is None:
        findings.not_measured("tests/test_norm_cuda.py", "pytest is not installed")
    else:
        run_tests(findings, folder / "norm.xml")


def largest_error(device: torch.device, dtype: torch.dtype, layout: torch.memory_format) -> float:
    """Of output and gradients, divided by the standard deviation of the exact ones."""
    generator = torch.Generator().manual_seed(0)
    x, grad = (torch.randn(_SHAPE, generator=generator).to(dtype) for _ in range(2))
    x = x * 3 + 2
    weight, bias = torch.linspace(0.5, 2, _CHANNELS), torch.linspace(-1, 1, _CHANNELS)

    layer = SyncBatchNorm2d(_CHANNELS).to(device)
    with torch.no_grad():
        layer.weight.copy_(weight)
        layer.bias.copy_(bias)
    mine = [t.to(device).to(memory_format=layout) for t in (x, grad)]
    got = _both_ways(layer, mine[0], [layer.weight, layer.bias], mine[1])

    exact = [t.double().requires_grad_() for t in (weight, bias)]
    wanted = _both_ways(
        lambda one: F.batch_norm(one, None, None, *exact, training=True),
        x.double(),
        exact,
        grad.double(),
    )
    pairs = zip(got, wanted, strict=True)
    return max(((a.double().cpu() - b).abs().max() / b.std()).item() for a, b in pairs)


def _both_ways(layer: object, x: Tensor, parameters: list[Tensor], grad: Tensor) -> list[Tensor]:
    x = x.requires_grad_()
    y = layer(x)
    return [y.detach(), *torch.autograd.grad(y, [x, *parameters], grad)]


def variance_error(device: torch.device, ratio: float) -> float:
    """The largest relative error of a channel's variance."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(_SHAPE, generator=generator) + ratio
    layer = SyncBatchNorm2d(_CHANNELS, momentum=1.0).to(device)
    layer(x.to(device))
    exact = x.double().transpose(0, 1).reshape(_CHANNELS, -1).var(dim=1)
    return greatest_difference(layer.running_var, exact)


def run_tests(findings: Findings, report: Path) -> None:
    """tests/test_norm_cuda.py by pytest: a line for all that passed, and one for each failure."""
    command = [
        sys.executable,
        "-m",
        "pytest",
        "-q",
        "-p",
        "no:cacheprovider",
        f"--junitxml={report}",
    ]
    subprocess.run(
        [*command, "tests/test_norm_cuda.py"],
        cwd=_ROOT,
        env=os.environ | {"SEGTRAIN_CUDA_TESTS": "1"},
    )
    cases = list(ElementTree.parse(report).iter("testcase"))
    broken = [case for case in cases if case.find("failure") is not None or _error(case)]
    skipped = sum(case.find("skipped") is not None for case in cases)
    passed = len(cases) - len(broken) - skipped
    found = f"{passed} passed, {len(broken)} failed, {skipped} skipped"
    findings.judged("tests/test_norm_cuda.py", passed > 0 and not broken, found, "none fails")
    for case in broken:
        problem = case.find("failure") if case.find("failure") is not None else case.find("error")
        message = problem.get("message", "").splitlines()
        findings.judged(case.get("name", ""), False, message[0] if message else "", "passes")


def _error(case: ElementTree.Element) -> bool:
    return case.find("error") is not None


def _name(value: object) -> str:
    return str(value).removeprefix("torch.")
