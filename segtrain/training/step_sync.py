"""What the ranks agree on in every step: the pixels they share, whether to stop, and whether the
numbers are still finite.

All of it rides in one small reduction between forward and backward. The flags are read one step
late, when they have long arrived, so that the host never waits for the device; before anything
outlives the process (a checkpoint, an evaluation) `settle` reads the newest ones.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.errors import NonFiniteError
from segtrain.training.losses import StepLoss

# A loss scale that halves this often without one good step has left the range of float16.
MAX_OVERFLOWS = 50


@dataclass
class _Flags:
    """The flags of one step on their way to the host."""

    step: int
    # Ranks with a bad loss, this rank's loss bad, requests to stop and to save, bad gradient.
    values: "_Readback"
    names: list[str]


class StepSync:
    """Watches over the steps of one run.

    Args:
        stop_requested: asked in every step; true on one rank, it stops all after the same step.
        save_requested: asked in every step; true on one rank, once, it has all of them save.
        overflow_allowed: float16 skips steps whose gradient overflows; only a long row is an error.
    """

    def __init__(
        self,
        stop_requested: Callable[[], bool],
        *,
        save_requested: Callable[[], bool] = lambda: False,
        overflow_allowed: bool = False,
    ) -> None:
        self.stopped = False
        self._save_due = False
        self._requested = (stop_requested, save_requested)
        self._overflow_allowed = overflow_allowed
        self._overflows = 0
        self._loss_flags: list[Tensor] = []
        self._pending: _Flags | None = None

    def reduce(self, sums: StepLoss) -> tuple[Tensor, Tensor]:
        """The pixel weights and the mean losses over all ranks, each (2,) float64: head, auxiliary
        head (collective).

        A weight of zero, where every pixel of every rank is ignored, comes back as 1: the loss is
        then 0 and so are its gradients. Without an auxiliary head its mean is NaN.
        """
        out, aux = sums
        zero = out.weight.new_zeros(())
        values = [out.total, out.weight, aux.total if aux else zero, aux.weight if aux else zero]
        local = torch.stack([value.detach().to(torch.float64) for value in values])
        bad = (~local.isfinite().all()).to(torch.float64)
        requests = local.new_tensor([float(requested()) for requested in self._requested])
        total = dist.all_reduce_sum(torch.cat([local, bad.view(1), requests]))
        self._loss_flags.append(torch.cat([total[4:5], bad.view(1), total[5:]]))
        weights = torch.where(total[1:4:2] == 0, 1.0, total[1:4:2])
        means = total[0:4:2] / weights
        return weights, means if aux else torch.stack([means[0], torch.full_like(zero, torch.nan)])

    def record(self, step: int, grad_norm: Tensor, names: list[str]) -> None:
        """Takes the flags of update number `step` and acts on those of the one before (collective).

        Args:
            names: the images that this rank trained on in this step.

        Raises:
            NonFiniteError: on all ranks, naming step, ranks and images.
        """
        flags = torch.stack(self._loss_flags).sum(0)
        self._loss_flags.clear()
        bad_gradient = (~grad_norm.isfinite()).to(torch.float64)
        values = torch.cat([flags, bad_gradient.unsqueeze(0)])
        before, self._pending = self._pending, _Flags(step, _Readback(values), names)
        if before is not None:
            self._act(before)

    def settle(self) -> None:
        """Acts on the newest flags too: afterwards the weights are known to be good (collective).

        Raises:
            NonFiniteError: as `record`.
        """
        newest, self._pending = self._pending, None
        if newest is not None:
            self._act(newest)

    def pop_save_request(self) -> bool:
        """Whether a rank has been asked to save since the last call; alike on all ranks."""
        due, self._save_due = self._save_due, False
        return due

    def _act(self, flags: _Flags) -> None:
        bad_losses, bad_here, stops, saves, bad_gradient = flags.values.read()
        if bad_losses:
            raise NonFiniteError(self._report(flags, "the loss", bool(bad_here)))
        self._overflows = self._overflows + 1 if bad_gradient else 0
        if bad_gradient and not self._overflow_allowed:
            raise NonFiniteError(self._report(flags, "the gradient", True))
        if self._overflows > MAX_OVERFLOWS:
            what = f"the gradient overflows float16 since {self._overflows} steps: it"
            raise NonFiniteError(self._report(flags, what, True))
        self.stopped = self.stopped or stops > 0
        self._save_due = self._save_due or saves > 0

    @staticmethod
    def _report(flags: _Flags, what: str, concerned: bool) -> str:
        lines = [f"step {flags.step}: {what} is not finite"]
        for rank, (bad, names) in enumerate(dist.all_gather_object((concerned, flags.names))):
            if bad:
                lines.append(f"  rank {rank}: images {', '.join(names)}")
        lines.append(
            "  no checkpoint was written since; a lower train.lr, train.warmup_steps or "
            "train.clip_grad_norm usually help, else look at these images with "
            "'segtrain data check'"
        )
        return "\n".join(lines)


class _Readback:
    """A few numbers on their way from the device to the host, without waiting for them."""

    def __init__(self, values: Tensor) -> None:
        if values.device.type != "cuda":
            self._host, self._arrived = values, None
            return
        # Only a copy into pinned memory lets the host run on.
        self._host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
        self._host.copy_(values, non_blocking=True)
        self._arrived = torch.cuda.Event()
        self._arrived.record()

    def read(self) -> list[float]:
        """The numbers, once they have arrived."""
        if self._arrived is not None:
            self._arrived.synchronize()
        return self._host.tolist()
