"""What a call does to a CUDA device: kernels, memory, and waits of the host."""

import traceback
import warnings
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import NamedTuple

import torch
from torch.profiler import ProfilerActivity, profile

from segtrain.training.measure import device_work

# torch's words, in a warning or an error (c10/cuda/CUDAFunctions.cpp).
_WAIT = "called a synchronizing CUDA operation"


class Work(NamedTuple):
    """What a device did in a call.

    copies: memcpy and memset, on the device too.
    """

    kernels: int
    copies: int


def host_waits(call: Callable[[], object]) -> Counter[str]:
    """How often `call` makes the host wait for the device, by file:line of the Python code.

    Waits in a backward pass that no Python code runs in count for the line that started it. torch
    does not see all of them: not those in torch.distributed.
    """
    torch.cuda.synchronize()
    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        torch.cuda.set_sync_debug_mode("warn")
        try:
            call()
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Counter(_place(w.filename, w.lineno) for w in seen if _WAIT in str(w.message))


def first_wait(call: Callable[[], object]) -> str | None:
    """The file:line where `call` first makes the host wait, which is an error there; None: never.

    Surer than `host_waits`, which sees only the warnings that arrive. Afterwards `call` may be
    unusable.
    """
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        call()
    except RuntimeError as error:
        if _WAIT not in str(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        return _place(last.filename, last.lineno)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    return None


def work_of(call: Callable[[], object]) -> Work:
    """What the device does for `call`; zeros if the driver does not let torch count it."""
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    names = [event.name for event in device_work(profiler)]
    copies = sum(name.startswith(("Memcpy", "Memset")) for name in names)
    return Work(len(names) - copies, copies)


def added_gib(call: Callable[[], object]) -> float:
    """The memory of the device that `call` needs beyond what is taken already."""
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def _place(file: str, line: int | None) -> str:
    """Short: the file's folder and name."""
    path = Path(file)
    return f"{path.parent.name}/{path.name}:{line}"


def in_words(waits: Counter[str]) -> str:
    """The places, most frequent first."""
    return ", ".join(f"{place} ({count})" for place, count in waits.most_common(6))
