"""Images on their way to the device that computes, and label maps on their way back."""

import math
from collections.abc import Iterable, Iterator, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from segtrain.data.read.concurrent import delayed_by_one
from segtrain.distributed.collectives import wait_for_event
from segtrain.distributed.copies import CopyStream
from segtrain.task.prediction import LabelMap

T = TypeVar("T")


class Transfer:
    """Copies to and from `device`; on a CPU there is nothing to copy."""

    def __init__(self, device: torch.device) -> None:
        self.device = device
        self.is_cuda = device.type == "cuda"
        self._stream = CopyStream(device)

    def pinned(self, tensor: Tensor) -> Tensor:
        """`tensor` in memory from which a copy to the device needs no wait; for any thread."""
        return tensor.pin_memory() if self.is_cuda else tensor

    def to_device(self, tensor: Tensor) -> Tensor:
        """A pinned tensor on the device, for the work that is asked for from here on."""
        with self._stream.copying() as arrived:
            arrived.append(tensor.to(self.device, non_blocking=True))
        return arrived[0]

    def late_to_host(
        self, predicted: Iterable[tuple[T, Sequence[LabelMap]]]
    ) -> Iterator[tuple[T, list[LabelMap]]]:
        """`predicted` with its label maps on the host, each while the device works on the next.

        Handlers of signals run while the host waits.
        """
        if not self.is_cuda:
            yield from predicted
            return
        for item, maps, copied in delayed_by_one(map(self._ask_for_copy, predicted)):
            wait_for_event(copied, math.inf)  # no other rank takes part in this work
            yield item, maps

    def _ask_for_copy(
        self, predicted: tuple[T, Sequence[LabelMap]]
    ) -> tuple[T, list[LabelMap], "torch.cuda.Event"]:
        item, maps = predicted
        copies = [
            LabelMap(*(x if x is None else self._copy(x) for x in label_map)) for label_map in maps
        ]
        # Recorded behind the copies: when it is reached, all of them have arrived.
        copied = torch.cuda.Event()
        copied.record(torch.cuda.current_stream(self.device))
        return item, copies, copied

    def _copy(self, tensor: Tensor) -> Tensor:
        host = torch.empty_like(tensor, device="cpu", pin_memory=True)
        return host.copy_(tensor, non_blocking=True)
