"""What the training steps since the last log line amount to."""

import time

import torch

from segtrain.distributed import collectives as dist
from segtrain.training.engine import StepResult

_GIB = 2**30


class StepMeter:
    """Gathers step results on the device and reads them all at once, when a line is logged.

    batch_size: images a step over all ranks.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._batch_size, self._device = batch_size, device
        self._results: list[StepResult] = []
        self._earlier: list[torch.Tensor] = []  # (loss, aux_loss, grad_norm) each
        self._since = time.perf_counter()

    def update(self, result: StepResult) -> None:
        """Takes in one step."""
        self._results.append(result)

    @property
    def num_steps(self) -> int:
        """Steps since the last `read`."""
        return len(self._results)

    def update_earlier(self, loss: float, aux_loss: float, grad_norm: float) -> None:
        """Takes in the numbers of a step before an interruption, for the next means."""
        numbers = [loss, aux_loss, grad_norm]
        self._earlier.append(torch.tensor(numbers, dtype=torch.float64, device=self._device))

    def skip(self, seconds: float) -> None:
        """Leaves out time that was spent on something else than training."""
        self._since += seconds

    def read(self) -> dict[str, float]:
        """The means since the last call by tag, after waiting for the device.

        Raises:
            ValueError: no step since the last call.
        """
        results, self._results = self._results, []
        if not results:
            raise ValueError("no step to read")
        numbers = [torch.stack([r.loss, r.aux_loss, r.grad_norm.double()]) for r in results]
        numbers, self._earlier = [*self._earlier, *numbers], []
        means = sum(numbers) / len(numbers)
        dist.wait_for_device(self._device)
        loss, aux_loss, grad_norm = means.tolist()
        now = time.perf_counter()
        step_s, self._since = (now - self._since) / len(results), now
        values = {
            "train/loss": loss,
            "train/aux_loss": aux_loss,
            "train/grad_norm": grad_norm,
            "train/lr": results[-1].lr,
            "time/step_s": step_s,
            "time/data_s": sum(r.data_s for r in results) / len(results),
            "images_per_s": self._batch_size / step_s,
        }
        if self._device.type == "cuda":
            values["mem/peak_gib"] = torch.cuda.max_memory_allocated(self._device) / _GIB
        if aux_loss != aux_loss:  # no auxiliary head
            del values["train/aux_loss"]
        return values
