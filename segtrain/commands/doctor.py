"""`segtrain doctor`: this machine and installation, and what is wrong; needs no library itself."""

import argparse
import os
import platform
import shutil
import sys
import sysconfig
from collections.abc import Iterator
from pathlib import Path

from segtrain import __version__
from segtrain.distributed.machine import SHARED_MEMORY, num_cores, unusable_device
from segtrain.errors import EXIT_CONFIG, EXIT_OK
from segtrain.run.environment import LIBRARIES, library_version
from segtrain.text import printable

_REQUIRED = (
    *(*LIBRARIES, "pydantic", "pyyaml", "safetensors", "tensorboard", "tqdm"),
    *("matplotlib", "jinja2", "scipy"),
)
_OPTIONAL = dict.fromkeys(("onnx", "onnxscript", "onnxruntime"), "segtrain export --format onnx")
_OPTIONAL |= {"timm": "model.backbone: timm/NAME", "pycocotools": "segtrain data import"}
_OPTIONAL |= {"monai": "segtrain eval --surface"}
_OPTIONAL |= dict.fromkeys(("rasterio", "shapely"), "GeoJSON")
_OPTIONAL |= dict.fromkeys(("fsspec", "s3fs", "aiohttp"), "s3:// and other addresses")
_OPTIONAL |= {"nibabel": "NIfTI", "pydicom": "DICOM"}
_OPTIONAL |= dict.fromkeys(("wandb", "mlflow-skinny", "clearml"), "log.trackers")
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
    if library_version("torch") is not None:
        import torch

        # The driver counts devices although torch cannot use them.
        count = torch.cuda.device_count() if torch.cuda.is_available() else 0
        devices = [torch.cuda.get_device_name(i) for i in range(count)]
        yield "CUDA devices", ", ".join(devices) or "none"


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
    if shutil.which(_COMPILER) is None:
        yield f"warning: {_COMPILER}: not found; train.compile needs a C++ compiler (CXX names it)"


def missing_for_triton() -> str:
    """What Triton lacks to build what it compiles; empty if it lacks nothing."""
    named = os.environ.get("CC")
    if not any(map(shutil.which, [named] if named else ["gcc", "clang"])):
        return named or "a C compiler (gcc, clang, or what CC names)"
    header = Path(sysconfig.get_path("include"), "Python.h")
    return "" if header.is_file() else f"{header} (in Debian a part of python3-dev)"
