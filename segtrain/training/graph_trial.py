"""The first replay of a step on a new stack of torch, NCCL and devices, beside the step itself.

Whether sums over ranks work inside a CUDA graph depends on versions and devices that nobody can
try all. A replay that computes other numbers, or waits for ever, would be a silent wrong result or
a dead run. So the first one is compared, within a limit, and what was found is kept.
"""

import math
import os
import statistics
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager

import torch
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.distributed import liveness
from segtrain.distributed.stack import DeviceStack, Verdict
from segtrain.errors import EXIT_SYSTEM
from segtrain.run.console import say

# For a recording and a replay, which take seconds.
LIMIT_S = 120.0
# Kernels that add in no fixed order give two runs of a step other last bits, so a replay may differ
# from one of them, too, in units of what the step changes: this many times as much as they do, and
# a little in any case. A sum over ranks that is missing changes about half of it.
_SPREADS, _LITTLE, _MUCH = 100.0, 1e-3, 0.05
_MOST_SPREAD = 0.01  # of two runs; beyond that nothing can be said


class GraphTrial:
    """Compares one replay with the step itself, on all ranks.

    stack: gets the verdict. timeout_s: of all other waits for a rank, which must be longer.
    """

    def __init__(self, stack: DeviceStack, timeout_s: float) -> None:
        self.stack, self._limit_s = stack, min(LIMIT_S, 0.8 * timeout_s)
        self._replays = False

    @contextmanager
    def limited(self) -> Iterator[None]:
        """Inside, this process ends after the limit."""
        over = threading.Event()

        # In a thread: a replay that hangs keeps the main one in the driver, where nothing can be
        # raised.
        def wait() -> None:
            if not over.wait(self._limit_s):
                self._end()

        threading.Thread(target=wait, daemon=True).start()
        try:
            yield
        finally:
            over.set()

    def replays(self) -> None:
        """Notes that all ranks have recorded the step: from now on silence is the stack's."""
        self._replays = True

    def _end(self) -> None:
        """Ends this process; its launcher starts the ranks again, without graphs."""
        what = "to record a step as a CUDA graph took all ranks"
        if self._replays:
            self.stack.keep("silent")
            what = "a step that was recorded as a CUDA graph did not come back within"
        message = f"{what} {self._limit_s:.0f} s; {report(self.stack)}"
        # All ranks of a machine run into the limit; the launcher's folder tells who speaks.
        has_launcher = liveness.has_launcher()
        if not has_launcher or liveness.is_first_to_print(message):
            say(message)
        if has_launcher:
            liveness.ask_without_graphs()
            liveness.write_exit_status(EXIT_SYSTEM)
        os._exit(EXIT_SYSTEM)

    def settle(
        self, before: list[Tensor], runs: Sequence[list[Tensor]], replayed: list[Tensor]
    ) -> str | None:
        """Keeps the verdict; why the replay is not trusted, None: it is (collective).

        Arguments as for `compared`. The same on all ranks.
        """
        outcomes = dist.all_gather_object(compared(before, runs, replayed))
        others = [(rank, *pair) for rank, pair in enumerate(outcomes) if pair[0] != "proven"]
        # What is known of one rank counts more than that another cannot tell.
        rank, verdict, why = min(
            others, key=lambda pair: pair[1] is None, default=(0, "proven", "")
        )
        if verdict is None:  # the next start tries again
            return f"rank {rank}: {why}"
        # Each machine has a cache of its own.
        if dist.local_rank() == 0:
            self.stack.keep(verdict)
        return f"rank {rank}: {why}; {report(self.stack)}" if others else None


def report(stack: DeviceStack) -> str:
    """What to tell a user whose stack does not replay."""
    return (
        f"please report this line ({stack}); later runs on it take steps as they are, unless "
        "train.graph=true"
    )


def compared(
    before: Sequence[Tensor], runs: Sequence[Sequence[Tensor]], replayed: Sequence[Tensor]
) -> tuple[Verdict | None, str]:
    """Whether a replay computes what two runs of the same step do, and if not, how it differs.

    Bit by bit where the two runs have the same bits; otherwise, see `_SPREADS`. None: the two
    differ so much that nothing can be said.

    before: what the step changes, as it was. runs, replayed: the same tensors afterwards, behind
        other results.
    """
    first, second = runs
    if all(map(same_bits, first, second)):
        wrong = sum(not same_bits(a, b) for a, b in zip(first, replayed, strict=True))
        what = f"a replay left {wrong} of {len(first)} tensors with other bits"
        return ("differs", what) if wrong else ("proven", "")
    others = len(first) - len(before)
    spread, apart = (_distance(before, first[others:], x[others:]) for x in (second, replayed))
    # `not <=` instead of `>`: a distance may be NaN, which is no agreement.
    if not spread <= _MOST_SPREAD:
        what = f"two runs of a step differ by {spread:.0e} of what it changes"
        return None, f"{what}: train.deterministic=true lets a replay be compared with them"
    if not apart <= min(max(_SPREADS * spread, _LITTLE), _MUCH):
        what = f"a replay differs by {apart:.0e} of what a step changes, two runs by {spread:.0e}"
        return "differs", what
    return "proven", ""


def _distance(before: Sequence[Tensor], first: Sequence[Tensor], second: Sequence[Tensor]) -> float:
    """|second - first| / |first - before|, the median of all tensors of floating-point numbers."""
    parts = []
    for start, a, b in zip(before, first, second, strict=True):
        if a.is_floating_point():
            moved = (a.double() - start.double()).norm().item()
            apart = (b.double() - a.double()).norm().item()
            # A tensor that the step left alone: 0 if the other did too, else infinitely far.
            parts.append(apart / moved if moved else apart and math.inf)
    return math.nan if any(map(math.isnan, parts)) else statistics.median(parts)


def same_bits(a: Tensor, b: Tensor) -> bool:
    """Whether all bits are equal, those of NaN too."""
    return torch.equal(a.flatten().view(torch.uint8), b.flatten().view(torch.uint8))


def copies(tensors: Sequence[Tensor]) -> list[Tensor]:
    """Copies on the host; waits for the device."""
    return [tensor.detach().to("cpu", copy=True) for tensor in tensors]


@torch.no_grad()
def restore(tensors: Sequence[Tensor], values: Sequence[Tensor]) -> None:
    """Overwrites `tensors` with `values`."""
    for tensor, value in zip(tensors, values, strict=True):
        tensor.copy_(value)
