"""Keeps what a forward pass saves for its backward pass in host memory instead of on the device."""

import functools
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from typing import NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# A smaller copy costs more than the memory that it frees.
_LEAST_BYTES = 1 << 16

# What may be on its way to the host: 20 ms of a bus of 25 GB/s.
_MOST_BYTES_IN_FLIGHT = 512 << 20
_POLL_S = 0.0002


class OnHost(NamedTuple):
    """A tensor whose content is on the host, once the device has passed `copied`."""

    host: Tensor
    device: torch.device
    copied: "torch.cuda.Event | None"


class InFlight:
    """Tensors on their way to the host, whose memory on the device is not free yet.

    The host runs ahead of the bus. Without a bound it would ask for the memory of the next layers
    while that of the last ones still waits to be copied.
    """

    def __init__(self, most_bytes: int = _MOST_BYTES_IN_FLIGHT) -> None:
        self._most_bytes = most_bytes
        self._copies: deque[tuple[torch.cuda.Event, int]] = deque()  # in the order of the stream
        self._num_bytes = 0

    def add(self, copied: "torch.cuda.Event", num_bytes: int) -> None:
        """Takes in a copy; the host waits until all fit, or until this one is alone."""
        self._copies.append((copied, num_bytes))
        self._num_bytes += num_bytes
        while self._copies:
            oldest, size = self._copies[0]
            if oldest.query():
                self._copies.popleft()
                self._num_bytes -= size
            elif self._num_bytes <= self._most_bytes or len(self._copies) == 1:
                return
            else:  # not by `synchronize`, in which Python runs no signal handlers
                time.sleep(_POLL_S)


class CudaCopies:
    """Copies through pinned memory on a stream of its own, in parallel to the computation."""

    def __init__(self, device: torch.device) -> None:
        self._stream, self._in_flight = torch.cuda.Stream(device), InFlight()

    def to_host(self, tensor: Tensor) -> OnHost:
        """A copy of `tensor` on the host."""
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        # The copy must not begin before the values are computed.
        self._stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(self._stream):
            host.copy_(tensor.detach(), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(self._stream)
        # The allocator must not reuse the memory before it has been copied.
        tensor.record_stream(self._stream)
        self._in_flight.add(copied, tensor.nbytes)
        return OnHost(host, tensor.device, copied)

    def to_device(self, on_host: OnHost) -> Tensor:
        """A copy of the tensor on its device."""
        torch.cuda.current_stream(on_host.device).wait_event(on_host.copied)
        return on_host.host.to(on_host.device, non_blocking=True)


_copies_of = functools.cache(CudaCopies)  # by device


class _Offloader:
    """Moves the tensors of one thread."""

    def __init__(self, copies: CudaCopies, parameters: Iterable[Tensor]) -> None:
        self._copies = copies
        # By their memory: autograd saves another Tensor object of the same parameter.
        self._parameters = {parameter.data_ptr() for parameter in parameters}
        # The last tensors that came back, which need not be copied to the host again. Weak
        # references to their storage: its memory may belong to another tensor by then.
        self._returned: deque[tuple[StorageWeakRef, OnHost]] = deque(maxlen=8)

    def send(self, tensor: Tensor) -> Tensor | OnHost:
        if tensor.nbytes < _LEAST_BYTES or tensor.data_ptr() in self._parameters:
            return tensor
        return self._copies.to_host(tensor)

    def send_again(self, tensor: Tensor) -> Tensor | OnHost:
        storage = tensor.untyped_storage()
        layout = tensor.shape, tensor.stride()  # a transposed view has the same memory and shape
        for returned, on_host in self._returned:
            host = on_host.host
            if returned.cdata == storage._cdata and (host.shape, host.stride()) == layout:
                return on_host
        return self.send(tensor)

    def fetch(self, sent: Tensor | OnHost) -> Tensor:
        if not isinstance(sent, OnHost):
            return sent
        tensor = self._copies.to_device(sent)
        self._returned.append((StorageWeakRef(tensor.untyped_storage()), sent))
        return tensor


_this_thread = threading.local()


@contextmanager
def saved_on_host(
    device: torch.device, parameters: Iterable[Tensor] = (), *, copies: CudaCopies | None = None
) -> Iterator[None]:
    """Inside, tensors that autograd saves wait on the host; on a CPU they stay where they are.

    parameters: tensors that stay on the device anyway and are not copied.
    copies: replaces CudaCopies, so that a CPU can be tested as if it were a device.
    """
    if copies is None and device.type == "cuda":
        copies = _copies_of(device)
    if copies is None:
        yield
        return
    _this_thread.offloader = offloader = _Offloader(copies, parameters)
    try:
        with torch.autograd.graph.saved_tensors_hooks(offloader.send, offloader.fetch):
            yield
    finally:
        del _this_thread.offloader


def offload(tensor: Tensor) -> Tensor | OnHost:
    """Moves `tensor` to the host, inside `saved_on_host`; `reload` brings it back."""
    offloader = getattr(_this_thread, "offloader", None)
    return tensor if offloader is None else offloader.send_again(tensor)


def reload(offloaded: Tensor | OnHost) -> Tensor:
    """The tensor that `offload` moved to the host."""
    offloader = getattr(_this_thread, "offloader", None)
    return offloaded if offloader is None else offloader.fetch(offloaded)
