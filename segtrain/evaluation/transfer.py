"""Copies between the host and a device for which the host does not wait.

The host asks for the work of the next images while the device computes. A stream of its own brings
these images, in parallel to the computation. Predictions come back late, once they are there.
"""

import math

import torch
from torch import Tensor

from segtrain.distributed.collectives import wait_for_event


class Transfer:
    """Copies to and from `device`; on a CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._stream = torch.cuda.Stream(device) if self.is_cuda else None

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor` in memory from which a copy to the device needs no wait; for any thread."""
        return tensor.pin_memory() if self.is_cuda else tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """A pinned tensor on the device, for the work that is asked for from here on."""
        if self._stream is None:
            return tensor
        computing = torch.cuda.current_stream(self.device)
        with torch.cuda.stream(self._stream):
            moved = tensor.to(self.device, non_blocking=True)
        computing.wait_stream(self._stream)
        # Its memory must not go to the next image before the computation has read it.
        moved.record_stream(computing)
        return moved

    def to_host(self, tensor: Tensor) -> Tensor:
        """A copy on the host; read it after `wait` for a mark that was set later."""
        if not self.is_cuda:
            return tensor
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)

    def mark(self) -> "torch.cuda.Event | None":
        """A place in the device's work so far; None on a CPU."""
        if not self.is_cuda:
            return None
        event = torch.cuda.Event()
        event.record(torch.cuda.current_stream(self.device))
        return event

    def wait(self, mark: "torch.cuda.Event | None") -> None:
        """Returns when the device has come to `mark`; handlers of signals run meanwhile."""
        if mark is not None:
            wait_for_event(mark, math.inf)  # no other rank takes part in this work
