"""Copies to a device on a stream of their own, beside what the device computes."""

from collections.abc import Iterator
from contextlib import contextmanager

import torch
from torch import Tensor


class CopyStream:
    """The stream on which `device` gets its input; on a CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None

    @contextmanager
    def copying(self) -> Iterator[list[Tensor]]:
        """Inside, copies run while the device computes what was asked for before.

        Yields a list: put on it what later work may read, which then waits for these copies. They
        must come from pinned memory, or the host waits for each.
        """
        arrived: list[Tensor] = []
        if self._stream is None:
            yield arrived
            return
        computing = torch.cuda.current_stream(self._device)
        with torch.cuda.stream(self._stream):
            yield arrived
        computing.wait_stream(self._stream)
        for tensor in arrived:
            # Its memory must not go to the next copy before the computation has read it.
            tensor.record_stream(computing)
