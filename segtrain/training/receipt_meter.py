"""What steps leave: means between two log lines, receipts with shares, and hashes of weights."""

import hashlib
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import numpy as np
import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.distributed.machine import most_resident_bytes, num_cores
from segtrain.run.receipts import GRADIENT, WEIGHT, Receipt, pack
from segtrain.training.local import LocalStep
from segtrain.training.part import Part
from segtrain.training.state import TrainState
from segtrain.training.step import StepResult

_GIB = 2**30


class StepMeter:
    """Gathers step results on the device and reads them all at once, when a line is logged.

    batch_size: images a step over all ranks.
    """

    def __init__(self, batch_size: int, device: torch.device) -> None:
        self._batch_size, self._device = batch_size, device
        self._results: list[StepResult] = []
        self._earlier: list[Tensor] = []
        self._since = time.perf_counter()

    def start(self) -> None:
        """Starts the clock."""
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
        numbers = torch.tensor([loss, aux_loss, grad_norm], dtype=torch.float64)
        self._earlier.append(numbers.to(self._device))

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
        numbers, self._earlier = [*self._earlier, *map(_numbers, results)], []
        means = sum(numbers) / len(numbers)
        # With a limit: `tolist` alone would wait for a lost rank for ever.
        dist.wait_for_device(self._device)
        loss, aux_loss, grad_norm = means.tolist()
        now = time.perf_counter()
        step_s, self._since = (now - self._since) / len(results), now
        is_cuda = self._device.type == "cuda"
        peak = torch.cuda.max_memory_allocated(self._device) if is_cuda else most_resident_bytes()
        values = {
            "train/loss": loss,
            "train/aux_loss": aux_loss,
            "train/grad_norm": grad_norm,
            "train/lr": results[-1].lr,
            "time/step_s": step_s,
            "time/data_s": sum(r.data_s for r in results) / len(results),
            "images_per_s": self._batch_size / step_s,
            "mem/peak_gib": peak / _GIB,
        }
        if aux_loss != aux_loss:  # no auxiliary head
            del values["train/aux_loss"]
        return values


def _numbers(result: StepResult) -> Tensor:
    """(loss, aux_loss, grad_norm), (3,) float64."""
    return torch.stack([result.loss, result.aux_loss, result.grad_norm.double()])


# An odd number spreads every bit of a factor into the upper bits of the product: 2**64 / golden
# ratio, as in Fibonacci hashing.
_SPREAD = np.uint64(0x9E3779B97F4A7C15)


class ReceiptMeter(Part):
    """Gathers what the receipts need and reads it all at once; made on all ranks.

    names: of the whole batch of a step, counted from 1, in order.
    weights_due: whether the receipt of a step, counted from 1, has hashes of the weights.
    """

    def __init__(
        self,
        state: TrainState,
        *,
        names: Callable[[int], Sequence[str]],
        weights_due: Callable[[int], bool],
    ) -> None:
        self._state, self._names, self._weights_due = state, names, weights_due
        self._results: list[StepResult] = []
        self._weights: dict[int, tuple[str, str | None]] = {}
        self._start: str | None = None

    def take_start(self) -> None:
        """Lets the next receipt have hashes of the weights as they are now."""
        self._start, _ = weights_fields(self._state)

    def after_step(self, run: Any, local: LocalStep, result: StepResult) -> None:
        """Takes in the step that was just done."""
        self._results.append(result)
        # On rank 0 alone: all have the same weights, and hashing them waits for the device.
        if dist.is_main() and self._weights_due(result.step):
            self._weights[result.step] = weights_fields(self._state)

    def take_receipts(self) -> list[Receipt]:
        """The receipts of the steps since the last call, on rank 0 (collective)."""
        results, self._results = self._results, []
        weights, self._weights = self._weights, {}
        if not results:
            return []
        # All ranks take part in this sum; what follows is work of rank 0.
        pixels = _pixels(results)
        if not dist.is_main():
            return []
        starts, self._start = [self._start] + [None] * (len(results) - 1), None
        numbers = list(map(_numbers, results))
        digests = torch.stack([r.digest for r in results]).cpu().numpy()
        rows = zip(results, torch.stack(numbers).tolist(), digests, pixels, starts, strict=True)
        return [
            Receipt(
                result.step,
                _samples(self._names(result.step)),
                loss.hex(),
                None if aux_loss != aux_loss else aux_loss.hex(),
                grad_norm.hex(),
                pack(_mixed(digest)),
                *weights.get(result.step, (None, None)),
                pixels=hashed,
                start=start,
            )
            for result, (loss, aux_loss, grad_norm), digest, hashed, start in rows
        ]


def _pixels(results: Sequence[StepResult]) -> list[str | None]:
    """The field `pixels` of the receipts, the sum of the ranks' mod 2**64 (collective)."""
    if results[0].pixels is None:
        return [None] * len(results)
    # As int64, which torch can add: in two's complement the sum wraps to the same 64 bits.
    sums = np.array([result.pixels % 2**64 for result in results], np.uint64).view(np.int64)
    sums = dist.all_reduce_sum(torch.from_numpy(sums).to(results[0].loss.device))
    dist.wait_for_device(sums.device)
    return [f"{number % 2**64:016x}" for number in sums.tolist()]


def weights_fields(state: TrainState) -> tuple[str, str | None]:
    """The fields `weights` and `average` of a receipt; waits for the device."""
    average = None if state.average is None else _packed(state.average.model.state_dict())
    return _packed(state.model.state_dict()), average


def weights_lines(state: TrainState) -> list[str]:
    """Lines for the log with one hash of the model and one of its average, if there is one."""
    models = {"weights": state.model}
    if state.average is not None:
        models["average"] = state.average.model
    # Of the hashes of all tensors, in the order of the state dict.
    hashes = {name: b"".join(_hashes(model.state_dict())) for name, model in models.items()}
    return [f"{name}    sha256 {hashlib.sha256(h).hexdigest()}" for name, h in hashes.items()]


def hash_tensor(name: str, tensor: Tensor) -> bytes:
    """The SHA-256 of name, type, shape and values; the layout in memory does not matter."""
    values = tensor.detach().cpu().contiguous()
    digest = hashlib.sha256(f"{name} {values.dtype} {tuple(values.shape)}\n".encode())
    digest.update(values.reshape(-1).view(torch.uint8).numpy())
    return digest.digest()


def _packed(weights: Mapping[str, Tensor]) -> str:
    first = b"".join(digest[: WEIGHT.itemsize] for digest in _hashes(weights))
    return pack(np.frombuffer(first, WEIGHT))


def _hashes(weights: Mapping[str, Tensor]) -> list[bytes]:
    """`hash_tensor` of each, by as many threads as this machine has cores: training waits."""
    with ThreadPoolExecutor(num_cores()) as threads:
        return list(threads.map(hash_tensor, weights.keys(), weights.values()))


def _samples(names: Sequence[str]) -> str:
    # No file name can hold a zero byte.
    text = "\0".join(names).encode(errors="surrogateescape")
    return hashlib.sha256(text).hexdigest()[:16]


def _mixed(digest: np.ndarray) -> np.ndarray:
    """16 bits of each int64, uint16; numbers that differ in any bit usually give different ones."""
    return (digest.view(np.uint64) * _SPREAD >> np.uint64(48)).astype(GRADIENT)
