"""Memory that the ranks of one machine share: a file that each of them has mapped."""

import mmap
import os
import tempfile
from collections.abc import Iterable
from itertools import accumulate

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.distributed.machine import SHARED_MEMORY
from segtrain.errors import ExecutionError

# Vector kernels want aligned memory, and two tensors in one cache line slow each other down.
_ALIGNMENT = 64


def create_file(num_bytes: int) -> str:
    """The path of a new file in the machine's shared memory; OSError: there is no room for it."""
    file, path = tempfile.mkstemp(prefix="segtrain-", dir=SHARED_MEMORY)
    try:
        # Reserves the memory now: later, a lack of it would end the process by SIGBUS.
        os.posix_fallocate(file, 0, num_bytes)
    except OSError:
        os.unlink(path)
        raise
    finally:
        os.close(file)
    return path


def shared_copies(tensors: Iterable[Tensor]) -> list[Tensor]:
    """Tensors of the same sizes, strides and types in memory that all ranks share (collective).

    They hold the values of rank 0.

    tensors: on the CPU, dense, the same on all ranks but for the values.

    Raises:
        ExecutionError: the ranks run on several machines, or there is not enough shared memory.
    """
    tensors = [tensor.detach() for tensor in tensors]
    sizes = [-(-tensor.nbytes // _ALIGNMENT) * _ALIGNMENT for tensor in tensors]
    offsets = accumulate(sizes, initial=0)
    path = dist.run_on_rank0(lambda: _create(sum(sizes)))
    with open(path, "r+b") as file:
        memory = mmap.mmap(file.fileno(), sum(sizes))
    dist.barrier()
    if dist.is_main():
        os.unlink(path)
    # Each has a storage of its own, or autograd would take a change of one for a change of all.
    copies = [
        torch.frombuffer(
            memory, dtype=tensor.dtype, count=tensor.numel(), offset=offset
        ).as_strided(tensor.size(), tensor.stride())
        for tensor, offset in zip(tensors, offsets, strict=False)
    ]
    if dist.is_main():
        for copy, tensor in zip(copies, tensors, strict=True):
            copy.copy_(tensor)
    dist.barrier()
    return copies


def _create(num_bytes: int) -> str:
    if dist.local_world_size() != dist.world_size():
        raise ExecutionError("processes of several machines cannot share memory")
    try:
        return create_file(num_bytes)
    except OSError as error:
        raise ExecutionError(
            f"{SHARED_MEMORY}: no room for {num_bytes / 1e6:.1f} MB that the processes share: "
            f"{error.strerror}; give the container more shared memory (docker run --shm-size)"
        ) from None
