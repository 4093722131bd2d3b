"""Kernels in Triton: what torch moves through memory several times, in one pass.

Each is used where `takes` says so, and beside a plain way in torch's own operations, which serves
every other device and is its oracle. They add without atomics: the same bits in every run.
"""

from functools import cache
from importlib.util import find_spec

import torch
from torch import Tensor

from segtrain.text import MAX_NAME, printable

# Options of every launch: versions of Triton differ in what they do unasked, and so would the bits.
LAUNCH = {"enable_fp_fusion": True}

_DTYPES = (torch.float32, torch.bfloat16, torch.float16)
_HAS_TRITON = find_spec("triton") is not None
# Tests compute with CPU tensors, by Triton's interpreter (TRITON_INTERPRET=1).
interpreted = False
# Older devices have no bfloat16.
_LEAST_CAPABILITY = (8, 0)


def why_not(device: torch.device) -> str | None:
    """Why kernels do not compute on `device`; None: they do; empty: nobody would expect them to."""
    if device.type != "cuda":
        return ""
    if not _HAS_TRITON:
        return "Triton is not installed"
    found = torch.cuda.get_device_capability(device)
    if found < _LEAST_CAPABILITY:
        return "they need compute capability {}.{}; this device has {}.{}".format(
            *_LEAST_CAPABILITY, *found
        )
    return _failure(device)


@cache
def _failure(device: torch.device) -> str | None:
    """Why Triton cannot launch a kernel here; None: it has launched one."""
    from segtrain.kernels import bilinear

    try:
        grad = torch.zeros(1, 1, 2, 2, device=device)
        bilinear.resize_gradient(grad, (1, 1), grad.dtype, align_corners=False)
    except Exception as error:  # it builds a launcher with a C compiler and Python's headers
        first = str(error).strip().partition("\n")[0]
        return f"Triton fails ({type(error).__name__}: {printable(first, 2 * MAX_NAME)})"
    return None


def takes(x: Tensor) -> bool:
    """Whether kernels may compute with `x`; what watches or changes operations needs torch's."""
    if x.dtype not in _DTYPES:
        return False
    if torch.compiler.is_compiling() or torch.jit.is_tracing():
        return False
    if torch._C._len_torch_dispatch_stack() or torch._C._are_functorch_transforms_active():
        return False
    if x.is_cpu:
        return interpreted
    if not x.is_cuda:
        return False
    # Triton launches on the current device, wherever the tensors are.
    return x.get_device() == torch.cuda.current_device() and why_not(x.device) is None
