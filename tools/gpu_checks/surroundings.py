"""What the figures were measured on: device, driver and libraries."""

import platform
import subprocess
from pathlib import Path
from typing import Any

import torch
import torchvision

_DRIVER = Path("/proc/driver/nvidia/version")


def describe(device: str) -> dict[str, Any]:
    """The machine, for `auto`, `cpu` or `cuda`; `device` is the one to use.

    Raises:
        RuntimeError: `cuda` was asked for, and torch finds no device.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    is_cuda = device == "cuda"
    if is_cuda and not torch.cuda.is_available():
        raise RuntimeError("--device cuda: torch finds no CUDA device")
    return {
        "device": device,
        "name": torch.cuda.get_device_name(0) if is_cuda else _processor(),
        "memory_gib": torch.cuda.get_device_properties(0).total_memory / 2**30 if is_cuda else None,
        "driver": driver() if is_cuda else None,
        "python": platform.python_version(),
        "torch": torch.__version__,
        "torchvision": torchvision.__version__,
        "CUDA": torch.version.cuda if is_cuda else None,
        "cuDNN": cudnn_version() if is_cuda else None,
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())) if is_cuda else None,
        "threads": torch.get_num_threads(),
    }


def cudnn_version() -> str:
    """As 9.1.0; torch gives 90100."""
    number = torch.backends.cudnn.version()
    return f"{number // 10000}.{number // 100 % 100}.{number % 100}"


def driver() -> str | None:
    """The version of NVIDIA's driver; None if nothing tells it."""
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=30, check=True)
        return done.stdout.splitlines()[0].strip()
    except (OSError, subprocess.SubprocessError, IndexError):
        pass
    # "NVRM version: NVIDIA UNIX x86_64 Kernel Module  570.86.15  Wed ..."
    words = _DRIVER.read_text().split() if _DRIVER.exists() else []
    return next((word for word in words if word[0].isdigit() and "." in word), None)


def _processor() -> str:
    """The name of the processor."""
    lines = Path("/proc/cpuinfo").read_text().splitlines()
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    name = names[0] if names and names[0] != "unknown" else platform.machine()
    return f"CPU {name}"
