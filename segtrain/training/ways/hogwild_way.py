"""Hogwild!: processes that change the same weights without waiting (arXiv:1106.5730).

The weights and the running statistics of the model lie in memory that all processes share. Each
computes the gradient of its own part of every batch and updates the weights at once, without a
lock. Updates overwrite each other, and a gradient belongs to weights that have changed since. So
nothing is promised of the result.
"""

import mmap
import os
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, frombuffer, nn

from segtrain.config import Config, TrainConfig
from segtrain.distributed import collectives as dist
from segtrain.errors import ExecutionError, LostRanksError
from segtrain.files import os_errors_as
from segtrain.training.local import LocalStep
from segtrain.training.state import TrainState
from segtrain.training.step import StepResult
from segtrain.training.step_sync import StepSync
from segtrain.training.ways import Requests, Way, by_process

# Vector kernels want aligned memory, and two tensors in one cache line slow each other down.
_ALIGNMENT = 64


def shared_copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Tensors of the same sizes, strides and types in memory that all ranks share (collective).

    They hold the values of rank 0. A single process keeps the tensors it has.

    tensors: on the CPU, dense, the same on all ranks but for the values.

    Raises:
        ExecutionError: the ranks run on several machines, or there is not enough memory.
    """
    if dist.world_size() == 1:
        return list(tensors)
    tensors = [tensor.detach() for tensor in tensors]
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    memory = _shared_bytes(sum(sizes))
    # Each has a storage of its own, or autograd would take a change of one for a change of all.
    copies = [
        frombuffer(memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset).as_strided(
            tensor.size(), tensor.stride()
        )
        for tensor, offset in zip(tensors, accumulate(sizes, initial=0), strict=False)
    ]
    if dist.is_main():
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
    # Nobody reads the memory, or updates it, before rank 0 has filled it.
    dist.barrier()
    return copies


def _shared_bytes(size: int) -> mmap.mmap:
    """Zeros that all ranks have mapped (collective).

    The file has no name, so whatever ends the ranks, nothing stays behind. Nor does it count among
    what a container may put into /dev/shm.
    """
    if dist.local_world_size() != dist.world_size():
        raise ExecutionError("processes of several machines cannot share memory")
    with ExitStack() as stack:

        def make() -> str:
            what = f"the processes cannot share {size / 1e6:.1f} MB of memory"
            with os_errors_as(ExecutionError, "train.parallel hogwild", what):
                handle = os.memfd_create("segtrain", os.MFD_CLOEXEC)
                stack.callback(os.close, handle)
                # Reserves the memory now: later, a lack of it would end the process by SIGBUS.
                os.posix_fallocate(handle, 0, size)
            return f"/proc/{os.getpid()}/fd/{handle}"

        with open(dist.run_on_rank0(make), "r+b") as file:
            memory = mmap.mmap(file.fileno(), size)
        dist.barrier()  # rank 0 closes its handle
    return memory


def share_model(model: nn.Module) -> None:
    """Lets weights and statistics of `model` lie in memory that all ranks share (collective)."""
    parameters = list(model.parameters())
    buffers = [
        (layer, name) for layer in model.modules() for name, _ in layer.named_buffers(recurse=False)
    ]
    copies = iter(shared_copies([*parameters, *(getattr(*place) for place in buffers)]))
    for parameter in parameters:
        parameter.data = next(copies)
    for layer, name in buffers:
        setattr(layer, name, next(copies))


# Steps by which a process may be ahead of the slowest. Each has its part of the images, so a faster
# process gains nothing and delays a stop.
_MAX_LEAD = 4
_SLEEP_S = 1e-3


class Hogwild(Way):
    """Brings the processes to the same step, where a run evaluates, saves or stops (collective).

    A process that is asked to tells the others through shared memory. All then go on to the step of
    the one that is farthest.

    step: updates done so far. timeout_s: how long to wait for a slower process.
    step_sync: of this process alone; gets what all agree on.
    """

    def __init__(
        self, step_sync: StepSync, requests: Requests, *, step: int, timeout_s: float
    ) -> None:
        super().__init__(step_sync)
        self._requests, self._timeout_s = requests, timeout_s
        # Of all processes: whether one asked to meet, and the updates that each has done.
        self._asked, self._steps = shared_copies(
            [torch.zeros(1, dtype=torch.int64), torch.full((dist.world_size(),), step)]
        )
        self._wanted = [False] * 2  # to stop, to save
        self._next: int | None = None  # the step after which all meet, once it is agreed

    @classmethod
    def begin(cls, state: TrainState, config: Config, requests: Requests) -> "Hogwild":
        """At the step of `state`, which is that of all processes."""
        alone = StepSync(lambda: False)
        return cls(alone, requests, step=state.step, timeout_s=config.train.timeout_s)

    config_of_update = staticmethod(by_process)

    @staticmethod
    def prepare(model: nn.Module) -> None:
        """Puts weights and statistics into memory that all processes share."""
        share_model(model)

    @staticmethod
    def lines(train: TrainConfig, processes: int) -> list[str]:
        """What is no longer promised."""
        if processes == 1:
            about = "is about several processes; this is only one"
            return [f"warning: train.parallel hogwild {about}"]
        return [
            f"parallel   hogwild: {processes} processes change the same weights without waiting; "
            "what is logged is of rank 0, and another run ends with other weights"
        ]

    @contextmanager
    def around(self, run: Any) -> Iterator[None]:
        """A step of this process alone.

        Raises:
            LostRanksError: another process stands still.
        """
        self._wait_for_slowest()
        with dist.alone():
            yield

    def after_step(self, run: Any, local: LocalStep, result: StepResult) -> None:
        """Tells the other processes."""
        # Each rank writes its own element only, so no lock is needed.
        self._steps[dist.rank()] = result.step

    def go_on(self, run: Any) -> None:
        """Until rank 0 has written or evaluated the weights, nobody changes them (collective)."""
        dist.barrier()

    def _wait_for_slowest(self) -> None:
        began = time.monotonic()
        while self._steps[dist.rank()] - self._steps.min() >= _MAX_LEAD:
            if self._asked.item():
                return  # that process waits at the barrier, after the next step
            if time.monotonic() - began > self._timeout_s:
                raise LostRanksError(
                    f"rank {dist.rank()}: waited {self._timeout_s:.0f} s for rank "
                    f"{self._steps.argmin()}, which is alive but does not come"
                )
            time.sleep(_SLEEP_S)

    def have_met(self, step: int, *, due: bool, is_last: bool) -> bool:
        """Whether all processes have done `step` and wait for each other here.

        Raises:
            NonFiniteError: a loss or gradient of this process was not finite.
        """
        # A request is kept until all meet: a source may answer only once.
        requests = zip(self._requests, self._wanted, strict=True)
        self._wanted = [requested() or before for requested, before in requests]
        if any(self._wanted):
            self._asked.fill_(1)
        asked = due or is_last or self._asked.item()
        is_here = step == self._next if self._next is not None else asked
        if not is_here:
            return False
        # Alone: its message would otherwise gather the images of ranks that are not here yet.
        with dist.alone():
            self.step_sync.check_finite()
        # A process that is behind leaves the loop, takes its steps up to `_next` and comes back;
        # the others wait for it in the next gather. So all call it equally often.
        while True:
            steps, *wanted = zip(*dist.all_gather_object([step, *self._wanted]), strict=True)
            self._next = max(steps)
            if step < self._next:
                return False
            if min(steps) == step:
                break  # nobody is on the way any more
        self._next, self._wanted = None, [False] * 2
        if dist.is_main():
            self._asked.zero_()  # a later request is repeated after the next step
        self.step_sync.ask(*map(any, wanted))
        return True


WAY = Hogwild
