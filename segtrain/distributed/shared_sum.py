"""Small tensors of the ranks of one machine, added up or gathered through shared memory.

gloo sends even a few numbers through sockets, and every hop wakes a thread: 1 to 2 ms a call, a
tenth of a step with synchronized batch norm. Here each rank writes its numbers to its own slot and
adds up the slots of all in their order: about 50 us, and the same bits on all ranks.
"""

import fcntl
import mmap
import os
import platform
import tempfile
import time
from contextlib import suppress

import numpy as np
import torch

from segtrain.distributed.machine import SHARED_MEMORY, num_cores
from segtrain.errors import LostRanksError

# Longer tensors go through gloo. Statistics take 16 bytes a channel, of a few layers at most. A
# container may have no more than 64 MiB of shared memory, and the loader needs some too.
MAX_BYTES = 1 << 18

_DTYPES = (torch.float64, torch.float32, torch.int64)
# A cache line for each rank's counters, so that a rank that writes does not slow down the others.
_HEAD_BYTES = 64
# Spin briefly, then yield, then sleep: waking a thread costs more than a short spin.
_SPIN_S, _YIELD_S, _SLEEP_S = 5e-5, 2e-3, 1e-4
_CHECK_INTERVAL_S = 0.05


def is_possible() -> bool:
    """Whether processes of this machine can share memory in this way.

    A rank writes its numbers first and then the count that announces them. x86 makes both visible
    in that order; other processors do not promise it.
    """
    return platform.machine() in ("x86_64", "AMD64") and SHARED_MEMORY.is_dir()


class SharedSum:
    """Slots of all ranks, in a file that each of them has mapped.

    Double buffering: a rank reuses a slot only after all have finished the sum in between. Each
    rank locks a byte of the file, which the kernel unlocks when the process ends.

    path: made by `create` on one of `size` ranks.
    """

    def __init__(self, path: str, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        # Held until the process ends, however it does: a lock that others can take tells a death.
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        memory = np.frombuffer(mmap.mmap(self._file, _num_bytes(size)), np.uint8)
        heads = memory[: size * _HEAD_BYTES].view(np.int64).reshape(size, -1)
        # How many sums each rank has announced; and for each buffer, what it adds up.
        self._announced, self._kinds = heads[:, 0], (heads[:, 1], heads[:, 2])
        self._slots = memory[size * _HEAD_BYTES :].reshape(2, size, MAX_BYTES)
        self._count = 0
        # With fewer cores than ranks, a rank that waits must free its core at once.
        self._spin_s = _SPIN_S if num_cores() >= size else 0.0

    @staticmethod
    def create(size: int) -> str:
        """The path of a new file for `size` ranks, to be removed when all have opened it."""
        file, path = tempfile.mkstemp(prefix="segtrain-", dir=SHARED_MEMORY)
        try:
            # Reserves the memory now: later, a lack of it would end the process by SIGBUS.
            os.posix_fallocate(file, 0, _num_bytes(size))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(file)
        return path

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """Whether `add` and `gather` support `tensor`; equal for tensors of the same kind."""
        return (
            tensor.device.type == "cpu"
            and tensor.nbytes <= MAX_BYTES
            and tensor.dtype in _DTYPES
            and tensor.is_contiguous()
        )

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, overwritten with the sum over all ranks. Collective; raises as `gather`."""
        values = tensor.detach().view(-1).numpy()
        np.sum(self._exchange(tensor), axis=0, out=values)
        return tensor

    def gather(self, tensor: torch.Tensor) -> torch.Tensor:
        """The values of all ranks' `tensor`, (size, n). Collective.

        Raises:
            LostRanksError: another rank has ended or does not come.
            RuntimeError: another rank has a tensor of another length.
        """
        # A copy: the slots are written again in the next sum but one.
        return torch.from_numpy(self._exchange(tensor).copy())

    def _exchange(self, tensor: torch.Tensor) -> np.ndarray:
        """The slots of all ranks, (size, n), once each holds its values of `tensor`."""
        values = tensor.detach().view(-1).numpy()
        # Two buffers are enough. A rank that writes one again has waited for the sum in between,
        # which all ranks announce only after they have read the sum before it.
        self._count += 1
        buffer = self._count % 2
        slots = self._slots[buffer].view(values.dtype)[:, : values.size]  # (size, n)
        kinds = self._kinds[buffer]
        slots[self.rank] = values
        # Length and type in one number: ranks that differ in either must not add up bytes.
        kinds[self.rank] = kind = values.size * len(_DTYPES) + _DTYPES.index(tensor.dtype)
        self._announced[self.rank] = self._count  # last: the others may read from here on
        self._wait()
        if (kinds != kind).any():
            lengths = ", ".join(str(kind // len(_DTYPES)) for kind in kinds)
            raise RuntimeError(f"the ranks add up different numbers of values: {lengths}")
        return slots

    def close(self) -> None:
        """Unlocks and closes the file; the memory is freed with the last rank's."""
        os.close(self._file)

    def _wait(self) -> None:
        """Returns when all ranks have announced their numbers."""
        began = checked = time.perf_counter()
        # No lock and no wake-up: each rank looks for itself, less often the longer it waits.
        while self._announced.min() < self._count:
            now = time.perf_counter()
            if now - began < self._spin_s:
                continue
            if now - began < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(_SLEEP_S)
            if now - checked > _CHECK_INTERVAL_S:
                checked = now
                self._check_missing(now - began)

    def _check_missing(self, waited_s: float) -> None:
        missing = np.flatnonzero(self._announced < self._count)
        for rank in map(int, missing):
            with suppress(OSError):  # it holds its lock, so it is alive
                fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
                raise LostRanksError(f"rank {self.rank}: rank {rank} has ended")
        if waited_s > self._timeout_s:
            raise LostRanksError(
                f"rank {self.rank}: waited {waited_s:.0f} s for rank {missing[0]}, which is alive "
                "but does not come"
            )


def _num_bytes(size: int) -> int:
    return size * (_HEAD_BYTES + 2 * MAX_BYTES)
