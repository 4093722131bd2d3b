"""What the ranks agree on in each step: sums of the loss; whether to stop, save or fail.

Everything rides in one small all-reduce between forward and backward. The flags are read one step
later, when they have long arrived, so that the host never waits for the device. Before anything
leaves the process (a checkpoint, an evaluation), `check_finite` reads the newest flags.
"""

from collections.abc import Callable

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.errors import NonFiniteError

# A loss scale that halves this often without one good step has left the range of float16.
MAX_OVERFLOWS = 50


class StepSync:
    """Keeps the ranks of one run together, step by step.

    stop_requested: asked in every step; true on one rank, all stop after the same step.
    save_requested: asked in every step; true on one rank, once, all save.
    overflow_allowed: for float16, which skips such steps; only many in a row are an error.
    timeout_s: how long the host waits for a device that in turn waits for other ranks.
    """

    def __init__(
        self,
        stop_requested: Callable[[], bool],
        *,
        save_requested: Callable[[], bool] = lambda: False,
        overflow_allowed: bool = False,
        timeout_s: float = 600.0,
    ) -> None:
        self.stopped = self.ended = False
        self._save_due = False
        self._requests = stop_requested, save_requested
        self._overflow_allowed = overflow_allowed
        self._overflows = 0
        self._timeout_s = timeout_s
        # (4,) each: ranks with a bad loss, whether this is one, requests to stop and save.
        self._microbatch_flags: list[Tensor] = []
        # Step, flags on their way to the host, and the names of the images on this rank.
        self._pending: tuple[int, _Readback, list[str]] | None = None

    def requests(self) -> list[float]:
        """What this rank is asked for, 1 or 0 each: to stop and to save."""
        return [float(requested()) for requested in self._requests]

    def reduce(self, sums: Tensor, requests: Tensor | None = None) -> Tensor:
        """The sums of the loss over all ranks, float64, in the shape of `sums` (collective).

        requests: (2,) float64, `requests` on the device; None: for nothing.
        """
        local = sums.detach().double().flatten()
        bad_here = (~local.isfinite().all()).double().view(1)
        requests = local.new_zeros(len(self._requests)) if requests is None else requests
        # The layout of the vector: sums of the loss, ranks with a bad one, requests.
        total = dist.all_reduce_sum(torch.cat([local, bad_here, requests]))
        sums_of_all, bad_ranks, requests_of_all = total.split([len(local), 1, len(requests)])
        self._microbatch_flags.append(torch.cat([bad_ranks, bad_here, requests_of_all]))
        return sums_of_all.view(sums.shape)

    def take_flags(self, grad_norm: Tensor) -> Tensor:
        """The flags of the microbatches since the last call, and of the gradient, (5,)."""
        # Nothing is sent for it: the gradient is a sum over ranks already, the same on all.
        bad_gradient = (~grad_norm.isfinite()).double()
        flags = torch.cat([torch.stack(self._microbatch_flags).sum(0), bad_gradient.view(1)])
        self._microbatch_flags.clear()
        return flags

    def drop_flags(self) -> None:
        """Forgets those of a step that has not come to its end."""
        self._microbatch_flags.clear()

    def record(self, step: int, flags: Tensor, names: list[str]) -> None:
        """Takes the flags of update number `step` and acts on those of the one before (collective).

        names: the images that this rank trained on in this step.

        Raises:
            NonFiniteError: on all ranks, naming step, ranks and images.
            LostRanksError: the device does not get on with the step before: it waits for a rank.
        """
        before, self._pending = self._pending, (step, _Readback(flags), names)
        if before is not None:
            self._act(*before)

    def check_finite(self) -> None:
        """Acts on the newest flags too: afterwards losses and gradients were good (collective).

        Raises:
            NonFiniteError: as `record`.
        """
        newest, self._pending = self._pending, None
        if newest is not None:
            self._act(*newest)

    def ask(self, stop: bool = False, save: bool = False, end: bool = False) -> None:
        """Stops, saves or ends after this step; called by all ranks."""
        self.stopped = self.stopped or stop
        self._save_due = self._save_due or save
        self.ended = self.ended or end

    @property
    def is_over(self) -> bool:
        """Whether training stops or ends after this step."""
        return self.stopped or self.ended

    @property
    def save_is_due(self) -> bool:
        """Whether a rank was asked to save since the last `pop_save_request`."""
        return self._save_due

    def pop_save_request(self) -> bool:
        """Whether a rank was asked to save since the last call; the same on all ranks."""
        due, self._save_due = self._save_due, False
        return due

    def _act(self, step: int, flags: "_Readback", names: list[str]) -> None:
        # But for `bad_here` these are sums over all ranks, or made from such, so all ranks take the
        # same branch below. They must: `_message` is collective.
        bad_losses, bad_here, *requests, bad_gradient = flags.read(self._timeout_s)
        if bad_losses:
            raise NonFiniteError(_message(step, names if bad_here else [], "the loss"))
        self._overflows = self._overflows + 1 if bad_gradient else 0
        if bad_gradient and not self._overflow_allowed:
            raise NonFiniteError(_message(step, names, "the gradient"))
        if self._overflows > MAX_OVERFLOWS:
            what = f"the gradient overflows float16 since {self._overflows} steps: it"
            raise NonFiniteError(_message(step, names, what))
        # Each microbatch carries the requests once more, so the number says nothing.
        self.ask(*(number > 0 for number in requests))


def _message(step: int, names: list[str], what: str) -> str:
    """What is not finite, with the images of all ranks that give any (collective)."""
    lines = [f"step {step}: {what} is not finite"]
    for rank, images in dist.all_gather_object([dist.rank(), names]):
        if images:
            lines.append(f"  rank {rank}: images {', '.join(images)}")
    lines.append(
        "  no checkpoint was written since; a lower optim.lr, "
        "schedule.warmup_steps or optim.clip_grad_norm usually help, else look at these images by "
        "'segtrain data check'"
    )
    return "\n".join(lines)


class LateVote:
    """Asks in each call whether any rank says yes; the answer is that to the call before.

    So the host never waits for `device`. timeout_s: as for `StepSync`.
    """

    def __init__(self, device: torch.device, timeout_s: float) -> None:
        self._device, self._timeout_s = device, timeout_s
        self._pending: _Readback | None = None

    def __call__(self, yes: bool) -> bool:
        """The same on all ranks (collective)."""
        vote = torch.zeros(1, dtype=torch.float64, device=self._device)
        # A kernel instead of a copy from the host, which would wait for the device.
        if yes:
            vote.fill_(1.0)
        before, self._pending = self._pending, _Readback(dist.all_reduce_sum(vote))
        return before is not None and before.read(self._timeout_s)[0] > 0


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

    def read(self, timeout_s: float) -> list[float]:
        """The numbers, once they have arrived.

        Raises:
            LostRanksError: they do not arrive within `timeout_s`, and there are other ranks.
        """
        if self._arrived is not None:
            dist.wait_for_event(self._arrived, timeout_s)
        return self._host.tolist()
