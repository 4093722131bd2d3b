"""Small sums over the ranks of one machine, through memory they share.

gloo sends even a few numbers through sockets, and every hop wakes a sleeping thread: one to two
milliseconds a call where ranks keep all cores busy, which is a tenth of a training step with
synchronized batch norm. Here each rank writes its numbers into a place of its own, and adds up
those of all ranks, in their order, when they are there: some fifty microseconds, and the same bits
on all ranks.
"""

import fcntl
import mmap
import os
import platform
import tempfile
import time
from pathlib import Path

import numpy as np
import torch

from segtrain.errors import LostRanksError

# What fits is shared, longer tensors are not. Statistics are 16 bytes a channel, of a few layers at
# most; a container may have no more than 64 MiB of such memory, and the loader wants some too.
MAX_BYTES = 1 << 18

_FOLDER = Path("/dev/shm")
_TYPES = (torch.float64, torch.float32, torch.int64)
# A cache line for each rank's counts, so that one who writes does not disturb the others.
_HEAD_BYTES = 64
# Meetings are seconds apart at most but in the end; until then a core is better used than woken.
_SPIN_S, _YIELD_S, _NAP_S = 5e-5, 2e-3, 1e-4
_LOOK_AROUND_S = 0.05


def is_possible() -> bool:
    """Whether processes of this machine can share memory in this way.

    Numbers are written before the count that announces them, which x86 keeps visible in that order
    and other processors do not promise.
    """
    return platform.machine() in ("x86_64", "AMD64") and _FOLDER.is_dir()


class SharedSum:
    """The ranks' places, in a file that all of them have mapped and that has no name any more.

    Each rank has two places, used in turn: whoever writes the next but one has seen that all have
    written the next, and so have read what it overwrites. A rank holds a lock on a byte of the
    file, which the kernel lifts when its process ends: so others notice.

    Args:
        path: made by `create` on one rank.
        rank, size: this process's number and how many there are.
        timeout_s: how long to wait for the others.
    """

    def __init__(self, path: str, rank: int, size: int, *, timeout_s: float) -> None:
        self.rank, self.size, self._timeout_s = rank, size, timeout_s
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        self._memory = memoryview(mmap.mmap(self._file, _num_bytes(size)))
        heads = np.frombuffer(self._memory, np.int64, size * _HEAD_BYTES // 8).reshape(size, -1)
        self._meetings, self._kinds = heads[:, 0], (heads[:, 1], heads[:, 2])
        self._count = 0
        # Where ranks have to take turns on a core, one that waits must let go of it at once.
        self._spin_s = _SPIN_S if len(os.sched_getaffinity(0)) >= size else 0.0

    @staticmethod
    def create(size: int) -> str:
        """The path of memory for `size` ranks, to be removed once all have opened it."""
        number, path = tempfile.mkstemp(prefix="segtrain-", dir=_FOLDER)
        try:
            # Now, and not in the midst of training, is the time to learn that there is no room.
            os.posix_fallocate(number, 0, _num_bytes(size))
        except OSError:
            os.unlink(path)
            raise
        finally:
            os.close(number)
        return path

    @staticmethod
    def takes(tensor: torch.Tensor) -> bool:
        """Whether `add` can do the work; alike on all ranks for tensors that are alike."""
        return (
            tensor.device.type == "cpu"
            and tensor.nbytes <= MAX_BYTES
            and tensor.dtype in _TYPES
            and tensor.is_contiguous()
        )

    def add(self, tensor: torch.Tensor) -> torch.Tensor:
        """`tensor`, overwritten with the sum over all ranks (collective).

        Raises:
            LostRanksError: another rank has ended, or does not come.
            RuntimeError: another rank has come with a tensor of another length.
        """
        values = tensor.detach().view(-1).numpy()
        self._count += 1
        places = self._places(values)
        places[self.rank] = values
        kinds = self._kinds[self._count % 2]
        kinds[self.rank] = kind = values.size * len(_TYPES) + _TYPES.index(tensor.dtype)
        self._meetings[self.rank] = self._count
        self._wait()
        if (kinds != kind).any():
            lengths = ", ".join(str(kind // len(_TYPES)) for kind in kinds)
            raise RuntimeError(f"the ranks add up different numbers of values: {lengths}")
        np.sum(places, axis=0, out=values)
        return tensor

    def close(self) -> None:
        """Lets go of the memory, which is freed with the last rank's."""
        os.close(self._file)

    def _places(self, values: np.ndarray) -> np.ndarray:
        """The places of all ranks for this meeting, (size, n)."""
        offset = self.size * (_HEAD_BYTES + self._count % 2 * MAX_BYTES)
        all_places = np.frombuffer(
            self._memory, values.dtype, self.size * MAX_BYTES // values.itemsize, offset
        )
        return all_places.reshape(self.size, -1)[:, : values.size]

    def _wait(self) -> None:
        """Returns when all ranks have written."""
        began = time.perf_counter()
        looked = began
        while self._meetings.min() < self._count:
            now = time.perf_counter()
            if now - began < self._spin_s:
                continue
            if now - began < _YIELD_S:
                os.sched_yield()
                continue
            time.sleep(_NAP_S)
            if now - looked > _LOOK_AROUND_S:
                looked = now
                self._look_around(now - began)

    def _look_around(self, waited_s: float) -> None:
        missing = [int(rank) for rank in np.flatnonzero(self._meetings < self._count)]
        gone = [rank for rank in missing if self._has_ended(rank)]
        if gone:
            raise LostRanksError(f"rank {self.rank}: rank {gone[0]} has ended")
        if waited_s > self._timeout_s:
            raise LostRanksError(
                f"rank {self.rank}: waited {waited_s:.0f} s for rank {missing[0]}, which lives but "
                "does not come"
            )

    def _has_ended(self, rank: int) -> bool:
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB, 1, rank)
        except OSError:
            return False
        return True


def _num_bytes(size: int) -> int:
    return size * (_HEAD_BYTES + 2 * MAX_BYTES)
