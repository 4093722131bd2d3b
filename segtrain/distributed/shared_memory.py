"""Tensors in memory that the ranks of one machine share."""

import mmap
import os
from collections.abc import Sequence
from itertools import accumulate

from torch import Tensor, frombuffer

from segtrain.distributed import collectives as dist
from segtrain.errors import ExecutionError

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
    dist.barrier()
    return copies


def _shared_bytes(size: int) -> mmap.mmap:
    """Zeros that all ranks have mapped (collective).

    The file has no name, so whatever ends the ranks, nothing stays behind. Nor does it count among
    what a container may put into /dev/shm.
    """
    made: list[int] = []
    mapped: list[mmap.mmap] = []

    def make() -> str:
        if dist.local_world_size() != dist.world_size():
            raise ExecutionError("processes of several machines cannot share memory")
        try:
            made.append(os.memfd_create("segtrain", os.MFD_CLOEXEC))
            # Reserves the memory now: later, a lack of it would end the process by SIGBUS.
            os.posix_fallocate(made[0], 0, size)
        except (OSError, AttributeError) as error:  # only Linux has memfd_create
            raise _unshared(size, error) from error
        return f"/proc/{os.getpid()}/fd/{made[0]}"

    def open_here() -> None:
        try:
            with open(path, "r+b") as file:
                mapped.append(mmap.mmap(file.fileno(), size))
        except OSError as error:
            raise _unshared(size, error) from error

    try:
        path = dist.run_on_rank0(make)
        dist.run_on_all_ranks(open_here)
    finally:
        for file in made:
            os.close(file)
    return mapped[0]


def _unshared(size: int, error: Exception) -> ExecutionError:
    return ExecutionError(f"the processes cannot share {size / 1e6:.1f} MB of memory: {error}")
