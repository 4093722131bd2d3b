"""What a machine is: devices, how they are joined, versions of everything below segtrain.

python -m gpus.stack cuda     prints it as JSON
"""

import json
import os
import platform
import re
import subprocess
import sys
from contextlib import suppress
from pathlib import Path
from typing import Any

import torch
from commands import ROOT

from segtrain.distributed.machine import driver_version, num_cores
from segtrain.run.environment import library_version

_SAFE = re.compile(r"[\w.,:=^+-]*")  # neither a path nor a name of a person


def machine(device: str) -> dict[str, Any]:
    """What figures were measured on."""
    found = {"device": device, "python": platform.python_version()}
    found |= {name: library_version(name) for name in ("torch", "torchvision")}
    if device == "cpu":
        return found | {"name": f"CPU, {platform.machine()}", "threads": torch.get_num_threads()}
    properties = torch.cuda.get_device_properties(0)
    return found | {
        "name": properties.name,
        "memory_gib": round(properties.total_memory / 2**30, 1),
        "driver": driver_version(),
        "CUDA": torch.version.cuda,
        "cuDNN": torch.backends.cudnn.version(),
        # Of the library that is loaded, which LD_PRELOAD may have put in front.
        "NCCL": ".".join(map(str, torch.cuda.nccl.version())),
    }


def describe(device: str) -> dict[str, Any]:
    """`machine`, and all that concerns several devices.

    device: auto, cpu or cuda; the answer's is cpu or cuda.
    """
    if device == "auto":
        device = "cuda" if torch.cuda.is_available() else "cpu"
    found = machine(device) if device == "cpu" or torch.cuda.is_available() else {"device": "none"}
    found |= {"commit": _output("git", "-C", ROOT, "rev-parse", "--short", "HEAD").strip()}
    found |= {"cores": num_cores(), "devices": [], "environment": _environment()}
    if found["device"] != "cuda":
        return found
    count = range(torch.cuda.device_count())
    reaches = torch.cuda.can_device_access_peer
    return found | {
        "devices": [torch.cuda.get_device_name(i) for i in count],
        "peers": [[i == j or reaches(i, j) for j in count] for i in count],
        "topology": _output("nvidia-smi", "topo", "-m").splitlines(),
    }


def _environment() -> dict[str, str]:
    """The variables that change what NCCL and torch do; of paths only that they are set."""
    return {
        name: value if _SAFE.fullmatch(value) else "(set)"
        for name, value in sorted(os.environ.items())
        if name.startswith(("NCCL_", "TORCH_", "CUDA_", "CUBLAS_", "PYTORCH_"))
    }


def _output(*command: str | Path) -> str:
    """What a command says; empty where there is none, or it fails."""
    with suppress(OSError, subprocess.SubprocessError):
        done = subprocess.run(command, capture_output=True, text=True, timeout=20)
        return done.stdout if done.returncode == 0 else ""
    return ""


if __name__ == "__main__":
    print(json.dumps(describe(sys.argv[1])))
