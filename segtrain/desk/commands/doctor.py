"""`segtrain doctor`: this machine and installation, and what is wrong; needs no library itself."""

import argparse
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path

from segtrain import __version__
from segtrain.distributed.machine import (
    NCCL_ENGINE,
    SHARED_MEMORY,
    driver_version,
    num_cores,
    unusable_device,
)
from segtrain.errors import EXIT_CONFIG, EXIT_OK
from segtrain.run.environment import LIBRARIES, library_version
from segtrain.text import printable

_REQUIRED = (
    *(*LIBRARIES, "pydantic", "pyyaml", "safetensors", "tensorboard", "tqdm"),
    *("matplotlib", "jinja2", "scipy"),
)
_OPTIONAL = dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "segtrain export --format onnx")
_OPTIONAL |= {"timm": "model.backbone: timm/NAME", "pycocotools": "segtrain data import"}
_OPTIONAL |= dict.fromkeys(("rasterio", "shapely"), "GeoTIFF, GeoJSON")
_OPTIONAL |= dict.fromkeys(("fsspec", "s3fs", "aiohttp"), "s3:// and other addresses")
_OPTIONAL |= {"nibabel": "NIfTI", "SimpleITK": "DICOM"}
_OPTIONAL |= dict.fromkeys(("wandb", "mlflow-skinny"), "log.trackers")
_COMPILER = os.environ.get("CXX", "g++")  # as torch.compile finds it


def main(_: argparse.Namespace) -> int:
    """Prints what there is, then what is wrong; returns the exit code, 2 if nothing can train."""
    for name, value in _facts():
        print(f"{name:<24}{printable(value)}")
    problems = list(_problems())
    for line in problems or ["nothing is wrong"]:
        print(printable(line))
    return EXIT_CONFIG if any(line.startswith("error:") for line in problems) else EXIT_OK


def _facts() -> Iterator[tuple[str, str]]:
    yield "segtrain", __version__
    yield "Python", f"{platform.python_version()}, {sys.executable}"
    yield "system", platform.platform()
    for name in (*_REQUIRED, *_OPTIONAL):
        optional = f" ({_OPTIONAL[name]} needs it)" if name in _OPTIONAL else ""
        yield name, library_version(name) or f"none{optional}"
    yield "cores", f"{num_cores()} of {os.cpu_count()}"
    if SHARED_MEMORY.is_dir():
        memory = shutil.disk_usage(SHARED_MEMORY)
        yield "shared memory", f"{memory.free / 1e6:.0f} of {memory.total / 1e6:.0f} MB free"
    yield "C++ compiler", shutil.which(_COMPILER) or "none"
    # torch itself may be what is missing.
    if library_version("torch") is not None:
        import torch

        # The driver counts devices although torch cannot use them.
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.cuda.get_device_name(i) for i in range(count)]
        yield "CUDA devices", ", ".join(devices) or "none"
        if devices:
            yield from _stack_facts(count)
    if all(map(library_version, _REQUIRED)):
        yield "bfloat16 on the CPU", _bfloat16_words()


def _stack_facts(count: int) -> Iterator[tuple[str, str]]:
    """What several of the `count` devices would train on."""
    import torch

    from segtrain.distributed.stack import kept_verdicts

    nccl = ".".join(map(str, torch.cuda.nccl.version()))
    yield "CUDA, driver, NCCL", f"{torch.version.cuda}, {driver_version() or 'unknown'}, {nccl}"
    pairs = list(combinations(range(count), 2))
    apart = [f"{a}-{b}" for a, b in pairs if not torch.cuda.can_device_access_peer(a, b)]
    if pairs:
        yield "device to device", f"not between {', '.join(apart)}" if apart else "between all"
    words = {
        "proven": "replays compute what steps do",
        "differs": "a replay computed other numbers",
        "silent": "a replay did not come back",
    }
    for stack, verdict in kept_verdicts():
        yield "steps as CUDA graphs", f"{words[verdict]}: {stack}"
    if count > 1 and not kept_verdicts():
        yield "steps as CUDA graphs", "not tried with several devices yet; the first run does"


def _bfloat16_words() -> str:
    from segtrain.models.precision import WORTH_AN_OFFER, cpu_gain

    gain = cpu_gain()
    offer = ": set train.precision=bfloat16" if gain >= WORTH_AN_OFFER else ""
    return f"{gain:.1f} times as fast as float32 in dense convolutions{offer}"


def _problems() -> Iterator[str]:
    for name in _REQUIRED:
        if library_version(name) is None:
            yield f"error: {name}: not installed; pip install {name}"
    if library_version("opencv-python") and library_version("opencv-python-headless"):
        yield (
            "warning: opencv-python beside opencv-python-headless: each overwrites the other; "
            "pip uninstall -y opencv-python; "
            "pip install --force-reinstall --no-deps opencv-python-headless"
        )
    if library_version("torch") is not None:
        import torch

        if problem := unusable_device():
            yield f"warning: {problem}"
        if torch.cuda.is_available() and (missing := missing_for_triton()):
            yield f"warning: {missing}: not found; on CUDA train.compile needs it"
        if torch.cuda.is_available():
            yield from _nccl_problems()
    if shutil.which(_COMPILER) is None:
        yield f"warning: {_COMPILER}: not found; train.compile needs a C++ compiler (CXX names it)"


def _nccl_problems() -> Iterator[str]:
    """What is known to be wrong where the user has chosen otherwise than segtrain would."""
    for name in ("NCCL_GRAPH_REGISTER", "NCCL_LOCAL_REGISTER"):
        if os.environ.get(name, "0") != "0":
            yield (
                f"warning: {name}={os.environ[name]}: recorded steps may hang between machines "
                "(NCCL issue 2389); unset it, and segtrain switches that off"
            )
    if (engine := os.environ.get(NCCL_ENGINE, "0")) != "0":
        yield f"warning: {NCCL_ENGINE}={engine}: no device has run segtrain with it"


def missing_for_triton() -> str:
    """What Triton lacks to build what it compiles; empty if it lacks nothing."""
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        return named or "a C compiler (gcc, clang, or what CC names)"
    # Triton builds modules for Python, in C.
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else f"{header} (in Debian a part of python3-dev)"
