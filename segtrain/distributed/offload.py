"""What a forward pass keeps for its backward pass, in host memory instead of on the device."""

import threading
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

# Below this a copy costs more than it frees.
_LEAST_BYTES = 1 << 16


class _OnHost(NamedTuple):
    """A tensor whose content is on the host, or will be when `copied` has passed."""

    host: Tensor
    device: torch.device
    copied: Any  # torch.cuda.Event, or None


class _Traffic:
    """The way to the host and back, for the tensors of one thread."""

    def __init__(self, staying: set[int], pack: Any, unpack: Any) -> None:
        self._staying = staying
        self._pack = pack
        self._unpack = unpack
        # What came back lately and need not travel to the host again. Weakly, and by the storage:
        # its place in memory may have become another tensor's by then.
        self._returned: deque[tuple[StorageWeakRef, _OnHost]] = deque(maxlen=8)

    def send(self, tensor: Tensor) -> Tensor | _OnHost:
        if tensor.nbytes < _LEAST_BYTES or tensor.data_ptr() in self._staying:
            return tensor
        return self._pack(tensor)

    def send_again(self, tensor: Tensor) -> Tensor | _OnHost:
        storage = tensor.untyped_storage()
        for returned, packed in self._returned:
            if returned.cdata == storage._cdata and packed.host.shape == tensor.shape:
                return packed
        return self.send(tensor)

    def fetch(self, packed: Tensor | _OnHost) -> Tensor:
        if not isinstance(packed, _OnHost):
            return packed
        tensor = self._unpack(packed)
        self._returned.append((StorageWeakRef(tensor.untyped_storage()), packed))
        return tensor


_this_thread = threading.local()


@contextmanager
def saved_on_host(
    device: torch.device,
    parameters: Iterable[Tensor] = (),
    *,
    on_copy: Callable[[Tensor], None] | None = None,
) -> Iterator[None]:
    """Inside, tensors that autograd saves travel to the host and come back when they are needed.

    On CUDA into pinned memory on a stream of their own, beside the computation. On a CPU the host's
    memory is the device's, so the tensors stay where they are.

    Args:
        parameters: what stays on the device anyway and is not copied.
        on_copy: makes a CPU behave like a device, for measurements: tensors are copied both ways,
            and this is called with each copy that counts as the host's.
    """
    if device.type == "cuda":
        pack, unpack = _pack_cuda(_copy_stream(device)), _unpack_cuda
    elif on_copy is not None:
        pack, unpack = _pack_copy(on_copy), _unpack_copy
    else:
        yield
        return
    # By their memory: what autograd saves of a parameter is another object.
    staying = {parameter.data_ptr() for parameter in parameters}
    _this_thread.traffic = traffic = _Traffic(staying, pack, unpack)
    try:
        with torch.autograd.graph.saved_tensors_hooks(traffic.send, traffic.fetch):
            yield
    finally:
        del _this_thread.traffic


def offload(tensor: Tensor) -> Any:
    """`tensor`, or what stands for it on the host inside `saved_on_host`, for use across a wait.

    The caller drops its own references and gets the tensor back by `reload`.
    """
    traffic = getattr(_this_thread, "traffic", None)
    return tensor if traffic is None else traffic.send_again(tensor)


def reload(parked: Any) -> Tensor:
    """The tensor that was put away."""
    traffic = getattr(_this_thread, "traffic", None)
    return parked if traffic is None else traffic.fetch(parked)


def _pack_copy(on_copy: Callable[[Tensor], None]) -> Callable[[Tensor], _OnHost]:
    def pack(tensor: Tensor) -> _OnHost:
        host = tensor.detach().clone()
        on_copy(host)
        return _OnHost(host, tensor.device, None)

    return pack


def _unpack_copy(packed: _OnHost) -> Tensor:
    return packed.host.clone()


_streams: dict[torch.device, Any] = {}


def _copy_stream(device: torch.device) -> Any:
    if device not in _streams:
        _streams[device] = torch.cuda.Stream(device)
    return _streams[device]


def _pack_cuda(stream: Any) -> Callable[[Tensor], _OnHost]:
    def pack(tensor: Tensor) -> _OnHost:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        stream.wait_stream(torch.cuda.current_stream(tensor.device))
        with torch.cuda.stream(stream):
            host.copy_(tensor.detach(), non_blocking=True)
            copied = torch.cuda.Event()
            copied.record(stream)
        # The allocator must not give the memory away before it has been read.
        tensor.record_stream(stream)
        return _OnHost(host, tensor.device, copied)

    return pack


def _unpack_cuda(packed: _OnHost) -> Tensor:
    torch.cuda.current_stream(packed.device).wait_event(packed.copied)
    return packed.host.to(packed.device, non_blocking=True)
