"""What a step costs: named spans, a clock for its parts, operations, memory and device time."""

import threading
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path
from typing import Any

import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.profiler import ProfilerActivity, profile, record_function
from torch.utils.flop_counter import FlopCounterMode

from segtrain.config import Config, TrainConfig
from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.models.precision import autocast_dtype, dtype_of
from segtrain.types import DropoutMasks

FORWARD, BACKWARD, UPDATE, COMMUNICATION = "forward", "backward", "update", "communication"
# Where several run at the same time, the time is the first one's.
PARTS = (COMMUNICATION, BACKWARD, FORWARD, UPDATE)

# The functions of `collectives` through which everything is sent.
_SENDERS = ("_sum_processes", "_gather_processes")

_PEAK_SECONDS = 1.0

_running_clock: "PartClock | None" = None


@contextmanager
def span(name: str) -> Iterator[None]:
    """Around a part of a step, for torch's profiler and `PartClock`; costs a few microseconds."""
    clock = _running_clock
    with record_function(name), nullcontext() if clock is None else clock.part(name):
        yield


class PartClock:
    """Adds up the seconds of each part; together they are not more than the time that passed.

    Parts may run in several threads, and within each other: sums over ranks, within a forward pass.
    On a device the clock waits for it at every border, so nothing overlaps.
    """

    def __init__(self, device: torch.device) -> None:
        self.seconds: defaultdict[str, float] = defaultdict(float)
        self._device = device
        self._lock = threading.Lock()
        self._running: Counter[str] = Counter()
        self._since = time.perf_counter()

    @contextmanager
    def running(self) -> Iterator[None]:
        """Inside, the spans of all threads are clocked, and what is sent between ranks."""
        global _running_clock
        timed = self.part(COMMUNICATION)  # as a decorator
        senders = {name: getattr(dist, name) for name in _SENDERS}
        start_sum = dist.start_sum
        for name, function in senders.items():
            setattr(dist, name, timed(function))
        # What it returns waits for the end of the sum, and is clocked too.
        dist.start_sum = lambda tensor: timed(timed(start_sum)(tensor))
        _running_clock = self
        try:
            yield
        finally:
            _running_clock = None
            for name, function in senders.items():
                setattr(dist, name, function)
            dist.start_sum = start_sum

    @contextmanager
    def part(self, name: str) -> Iterator[None]:
        """Inside, the time of this thread belongs to the part."""
        self._turn(name, +1)
        try:
            yield
        finally:
            self._turn(name, -1)

    def _turn(self, name: str, change: int) -> None:
        synchronize(self._device)
        with self._lock:
            now = time.perf_counter()
            current = next((part for part in PARTS if self._running[part]), None)
            if current is not None:
                self.seconds[current] += now - self._since
            self._running[name] += change
            self._since = now


def synchronize(device: torch.device) -> None:
    """Waits until `device` has done what it was given."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)


def training_flops(config: Config, num_classes: int) -> float:
    """Floating point operations of the forward and backward pass of one training crop.

    Convolutions and matrix products, a multiplication and an addition as two. The backward pass
    counts as two forward passes, as usual: one for the weights, one for the inputs. (torch's own
    count of it takes grouped convolutions for whole ones.) What is computed twice to save memory
    counts once.
    """
    images = 2  # batch norm refuses one
    height, width = config.augment.crop_size
    channels = config.data.channels
    norm = make_norm(config.norm.model_copy(update={"images": "all"}))
    # Made as in a run: networks of plugins and of timm are tried when they are made, and may look
    # at the values of their weights.
    with dist.alone(), torch.random.fork_rng(devices=[]):
        model = build_model(config.model, num_classes=num_classes, in_channels=channels, norm=norm)
        fake = FakeTensorMode(allow_non_fake_inputs=True)
        with fake, FlopCounterMode(display=False) as counter:
            model.train()(torch.empty(images, channels, height, width), DropoutMasks())
    return 3 * counter.get_total_flops() / images


def matmul_peak(device: torch.device, train: TrainConfig) -> float:
    """Operations a second in products of large square matrices, on all ranks at the same time.

    In the type in which convolutions compute (collective).
    """
    dtype = autocast_dtype(train) or dtype_of(train)
    # On a CPU without instructions for bfloat16, a product of 2048 x 2048 takes a minute.
    side = 8192 if device.type == "cuda" else 1024
    a, b = (torch.randn(side, side, device=device).to(dtype) for _ in range(2))
    a @ b
    # All begin together, so that ranks on one machine compete as they do in a step.
    dist.barrier()
    synchronize(device)
    began, count, seconds = time.perf_counter(), 0, 0.0
    while seconds < _PEAK_SECONDS:
        a @ b
        count += 1
        # The host must not run ahead: it would queue products long after the time is over.
        if device.type == "cpu" or count % 10 == 0:
            synchronize(device)
            seconds = time.perf_counter() - began
    return count * 2 * side**3 / seconds


def peak_bytes(device: torch.device) -> int:
    """The most memory that this process has had: of the device, or resident on the host."""
    if device.type == "cuda":
        return torch.cuda.max_memory_allocated(device)
    from segtrain.distributed.machine import most_resident_bytes

    return most_resident_bytes()


def busy_share(
    work: Callable[[], object], device: torch.device, trace: Path | None
) -> float | None:
    """The part of the time of `work` in which the device ran kernels; None on a CPU.

    trace: a file for Perfetto (https://ui.perfetto.dev) or chrome://tracing, gzipped if it ends
        with .gz.
    """
    if trace is None and device.type != "cuda":
        return None
    activities = [ProfilerActivity.CPU]
    if device.type == "cuda":
        activities.append(ProfilerActivity.CUDA)
    with profile(activities=activities) as profiler:
        began = time.perf_counter()
        work()
        synchronize(device)
        seconds = time.perf_counter() - began
    if trace is not None:
        profiler.export_chrome_trace(str(trace))
    if device.type != "cuda":
        return None
    kernels = [(event.time_range.start, event.time_range.end) for event in device_work(profiler)]
    return covered(kernels) / 1e6 / seconds


def device_work(profiler: profile) -> list[Any]:
    """The kernels and copies on CUDA devices that `profiler` has seen, as its FunctionEvents."""
    return [
        event
        for event in profiler.events()
        if event.device_type == torch.autograd.DeviceType.CUDA
        # A region such as "forward" is an event of the device too: it lasts from its first kernel
        # to its last one, the pauses between them included.
        and not event.is_user_annotation
    ]


def covered(intervals: list[tuple[float, float]]) -> float:
    """The length of the union of intervals."""
    length, reached = 0.0, float("-inf")
    for start, end in sorted(intervals):
        length += max(0.0, end - max(start, reached))
        reached = max(reached, end)
    return length
