"""What the training steps since the last log line amount to."""

import time

import torch
from torch import Tensor

from segtrain.training.engine import StepResult

_GIB = 2**30


class StepMeter:
    """Gathers step results on the device and reads them all at once, when a line is logged.

    Args:
        batch_size: images a step over all ranks.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._batch_size = batch_size
        self._device = device
        self._sums: Tensor | None = None
        self._num_steps = 0
        self._data_s = 0.0
        self._lr = 0.0
        self._since = time.perf_counter()

    def update(self, result: StepResult) -> None:
        """Takes in one step."""
        values = torch.stack([result.loss, result.aux_loss, result.grad_norm.double()])
        self._sums = values if self._sums is None else self._sums + values
        self._num_steps += 1
        self._data_s += result.data_s
        self._lr = result.lr

    def skip(self, seconds: float) -> None:
        """Leaves out time that was spent on something else than training."""
        self._since += seconds

    def read(self) -> dict[str, float]:
        """The means since the last call by tag, after waiting for the device.

        Raises:
            ValueError: no step since the last call.
        """
        if self._sums is None:
            raise ValueError("no step to read")
        loss, aux_loss, grad_norm = (self._sums / self._num_steps).tolist()
        now = time.perf_counter()
        step_s = (now - self._since) / self._num_steps
        values = {
            "train/loss": loss,
            "train/aux_loss": aux_loss,
            "train/grad_norm": grad_norm,
            "train/lr": self._lr,
            "time/step_s": step_s,
            "time/data_s": self._data_s / self._num_steps,
            "images_per_s": self._batch_size / step_s,
        }
        if self._device.type == "cuda":
            values["mem/peak_gib"] = torch.cuda.max_memory_allocated(self._device) / _GIB
        if aux_loss != aux_loss:  # no auxiliary head
            del values["train/aux_loss"]
        self._sums, self._num_steps, self._data_s, self._since = None, 0, 0.0, now
        return values
