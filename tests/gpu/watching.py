"""Training steps on one device, and what they do to it: kernels, memory, waits of the host."""

import os
import traceback
import warnings
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from processes import free_port
from stepping import state_of, steps_of
from torch import Tensor, nn
from torch.distributed import group
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction
from torch.profiler import ProfilerActivity, profile

from segtrain import kernels
from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed.process_group import process_group
from segtrain.models.precision import float32_products
from segtrain.norm import NormFactory
from segtrain.training.measure import device_work
from segtrain.training.step import StepResult

SYNC, LOCAL, TORCH = "segtrain's, synchronized", "nn.BatchNorm2d", "torch's SyncBatchNorm"
REPLAYED = "segtrain's, replayed"
# What a CPU can do in the time.
TINY = {"backbone": "resnet18", "output_stride": 16, "head_channels": 16, "aux_channels": 16}
# torch's words, in a warning or an error (c10/cuda/CUDAFunctions.cpp).
_WAIT = "called a synchronizing CUDA operation"


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone: NCCL on CUDA, otherwise gloo."""
    before = dict(os.environ)
    ranks = {"RANK": 0, "WORLD_SIZE": 1, "LOCAL_RANK": 0, "LOCAL_WORLD_SIZE": 1}
    os.environ.update({name: str(value) for name, value in ranks.items()})
    os.environ.update(
        MASTER_ADDR="127.0.0.1", MASTER_PORT=str(free_port()), NCCL_SOCKET_IFNAME="lo"
    )
    try:
        with process_group(device, timeout_s=120):
            yield
    finally:
        # Commands that are started later are no ranks of this group.
        os.environ.clear()
        os.environ.update(before)


@contextmanager
def as_among_two() -> Iterator[None]:
    """Inside, this rank takes the way of several ranks, though every sum is over it alone."""
    before = dist._num_processes
    dist._num_processes = lambda group=None: 2
    try:
        yield
    finally:
        dist._num_processes = before


@contextmanager
def without_kernels() -> Iterator[None]:
    """Inside, the plain way is taken."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(kernels, "_HAS_TRITON", False)
        yield


class LocalBatchNorm2d(nn.BatchNorm2d):
    """F.batch_norm in training and nothing else."""

    def forward(self, input: Tensor) -> Tensor:
        tracked, affine = (self.running_mean, self.running_var), (self.weight, self.bias)
        return F.batch_norm(input, *tracked, *affine, True, self.momentum, self.eps)


class TorchSyncBatchNorm2d(nn.BatchNorm2d):
    """torch.nn.SyncBatchNorm's own function, which the module leaves out for a single rank."""

    def forward(self, input: Tensor) -> Tensor:
        affine, tracked = (self.weight, self.bias), (self.running_mean, self.running_var)
        options = (self.eps, self.momentum, group.WORLD, dist.world_size())
        return TorchFunction.apply(input, *affine, *tracked, *options)


class Training:
    """A training, a step at each call.

    synchronized: its layers take the way of several ranks. replayed: as CUDA graphs.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        norm: NormFactory | None = None,
        *,
        synchronized: bool = False,
        replayed: bool = False,
    ) -> None:
        self.state = state_of(config, device, norm)
        self._steps = steps_of(self.state, config, device, replayed=replayed)
        self._train, self._synchronized = config.train, synchronized

    def __call__(self) -> StepResult:
        """One step."""
        among = as_among_two() if self._synchronized else nullcontext()
        with among, float32_products(self._train):
            return next(self._steps)


def contenders(config: Config, device: torch.device) -> dict[str, Training]:
    """A training with each layer, and on CUDA segtrain's as a graph; all else is the same."""
    trainings = {
        SYNC: Training(config, device, synchronized=True),
        LOCAL: Training(config, device, nn.BatchNorm2d),
    }
    if device.type == "cuda":  # torch's refuses CPU tensors
        trainings[TORCH] = Training(config, device, TorchSyncBatchNorm2d)
        trainings[REPLAYED] = Training(config, device, synchronized=True, replayed=True)
    return trainings


def host_waits(call: Callable[[], object], device: torch.device) -> dict[str, int]:
    """How often `call` makes the host wait for the device, by file:line of the Python code.

    First by torch's warnings, of which not all arrive; then its errors, which end the call at the
    first wait: afterwards `call` may be unusable. torch does not see waits in torch.distributed.
    On a CPU none.
    """
    if device.type == "cpu":
        call()
        return {}
    with warnings.catch_warnings(record=True) as seen, _sync_debug("warn"):
        warnings.simplefilter("always")
        call()
    found = Counter(_place(w.filename, w.lineno) for w in seen if _WAIT in str(w.message))
    try:
        with _sync_debug("error"):
            call()
    except RuntimeError as error:
        if _WAIT not in str(error):
            raise
        last = traceback.extract_tb(error.__traceback__)[-1]
        found.setdefault(_place(last.filename, last.lineno), 1)
    return dict(found)


@contextmanager
def _sync_debug(mode: str) -> Iterator[None]:
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode(mode)
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def _place(file: str, line: int | None) -> str:
    path = Path(file)
    return f"{path.parent.name}/{path.name}:{line}"


def num_kernels(call: Callable[[], object], device: torch.device) -> int:
    """What the device does in `call`, copies included; 0: the driver does not let torch count."""
    if device.type == "cpu":
        call()
        return 0
    with profile(activities=[ProfilerActivity.CPU, ProfilerActivity.CUDA]) as profiler:
        call()
        torch.cuda.synchronize()
    return len(list(device_work(profiler)))


def added_gib(call: Callable[[], object], device: torch.device) -> float:
    """The memory of the device that `call` needs beyond what is taken already; 0 on a CPU."""
    if device.type == "cpu":
        call()
        return 0.0
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    call()
    torch.cuda.synchronize()
    return (torch.cuda.max_memory_allocated() - before) / 2**30


def greatest_difference(one: object, other: object) -> float:
    """The largest |a - b| / |b| of the pairs; infinite with NaN."""
    a, b = (torch.as_tensor(values, dtype=torch.float64).cpu() for values in (one, other))
    difference = ((a - b) / b).abs().max().item()
    return difference if difference == difference else float("inf")
