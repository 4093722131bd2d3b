"""Gradients summed over all ranks, in buckets that depend on the list of parameters alone.

On three or more ranks, the position of a gradient in a bucket decides in which order the ranks are
added, and so the last bits. DistributedDataParallel rearranges its buckets after the first step of
every process, so a resumed run gets other bits.
"""

import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.text import first_of

# Large enough to use the whole bandwidth, and small enough for the sums of batch norms, for which
# backward passes wait and which NCCL sends in one row with the buckets. The first bucket is
# small, so that sending starts early. They are no options: other buckets give other
# bits on three or more ranks.
FIRST_BUCKET_BYTES = 1 << 20
BUCKET_BYTES = 25 << 20
# Gradients begin at multiples of this many values, because vector kernels want aligned memory.
_ALIGNMENT = 16


class GradientSum:
    """Sums the gradients of a model over all ranks; does nothing in a single process.

    Afterwards `grad` of every parameter is a view of a bucket, with the strides of the parameter. A
    parameter that gets no gradient on any rank keeps None. Which ones get a gradient must be the
    same on all ranks, which compare it in the first step, and in all steps of the process.

    Args:
        named_parameters: in the order of registration, the same on all ranks, on one device.
        overlap: send while the last backward pass of a step runs, of which there may be only one.
    """

    def __init__(
        self, named_parameters: Iterable[tuple[str, nn.Parameter]], *, overlap: bool = True
    ) -> None:
        self._parameters: dict[str, nn.Parameter] = {}
        self._overlap = overlap
        if dist.world_size() > 1:
            self._parameters = {name: p for name, p in named_parameters if p.requires_grad}
        self._buckets = make_buckets(list(self._parameters.values()))
        self._used: set[str] | None = None  # names of the parameters that get a gradient

    def finish(self) -> bool:
        """True: the step never has to be computed again (see `ExactGradientSum.finish`)."""
        return True

    def digest(self) -> None:
        """Only exact sums leave one (see `ExactGradientSum.digest`)."""

    @contextmanager
    def collected(self, *, last: bool) -> Iterator[None]:
        """Around a microbatch; after the last one, gradients are sums over all ranks (collective).

        Raises:
            RuntimeError: the parameters with a gradient differ between the ranks, or from those of
                the first step; or with `overlap` there was a second backward pass.
        """
        if not (last and self._buckets):
            yield
            return
        # In the first step it is not known which parameters get a gradient.
        used = {self._parameters[name] for name in self._used or () if self._overlap}
        followed = [[p for p in bucket.parameters if p in used] for bucket in self._buckets]
        sender = BucketSender(self._buckets, [*map(len, followed)] if used else None, Bucket.fill)
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(sender.arrived, i))
            for i, parameters in enumerate(followed)
            for parameter in parameters
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()
        found = {name for name, p in self._parameters.items() if p.grad is not None}
        if self._used is None:
            compare_ranks(found)
            self._used = found
        # Only this rank sees the mismatch; NaN in the last bucket stops all ranks, but in
        # float16, which takes it for an overflow. The error comes after the sums, for which the
        # other ranks wait.
        sender.finish(spoil=found != self._used)
        compare_steps(found, self._used)


class Bucket:
    """Gradients that are summed together, side by side in the tensor `flat`.

    dtype: of the sums; None: that of the parameters.
    """

    def __init__(
        self, parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
    ) -> None:
        self.parameters = parameters
        # -(-a // b) rounds up.
        sizes = [-(-p.numel() // _ALIGNMENT) * _ALIGNMENT for p in parameters]
        self.flat = parameters[0].new_zeros(sum(sizes), dtype=dtype, requires_grad=False)
        # The strides are those that autograd gives to gradients, channels-last ones for example.
        self.views = [
            part.as_strided(p.size(), torch.empty_like(p).stride())
            for p, part in zip(parameters, self.flat.split(sizes), strict=True)
        ]

    def fill(self) -> None:
        """Moves the gradients of the parameters here; zeros stand for those without one."""
        moves = []
        for parameter, view in zip(self.parameters, self.views, strict=True):
            if parameter.grad is None:
                view.zero_()
            elif parameter.grad is not view:
                moves.append((view, parameter.grad))
                parameter.grad = view
        # One call for the whole bucket instead of a copy for each gradient.
        if moves:
            torch._foreach_copy_(*zip(*moves, strict=True))


class BucketSender:
    """Sums buckets over the ranks, in the same order on all of them, each when it is complete.

    On CUDA the sums come after the stream of the thread that computed the gradients.

    arrivals: how many gradients complete each bucket; None: all are sent at the end.
    prepare: is called with a bucket before it is sent.
    """

    def __init__(
        self,
        buckets: Sequence[Bucket],
        arrivals: list[int] | None,
        prepare: Callable[[Bucket], None] = lambda bucket: None,
    ) -> None:
        self._buckets = buckets if dist.world_size() > 1 else []
        self._missing, self._prepare = arrivals, prepare
        self._waits: list[Callable[[], object]] = []  # one for every bucket that was sent
        self._arrived: set[nn.Parameter] = set()
        self._lock = threading.Lock()  # shares arrive in threads of their own

    def arrived(self, bucket: int, parameter: nn.Parameter) -> None:
        """Counts the gradient of a parameter; RuntimeError if it is the second one."""
        with self._lock:
            if parameter in self._arrived:
                raise RuntimeError(
                    f"rank {dist.rank()}: a parameter of shape {tuple(parameter.shape)} got a "
                    "second gradient in a microbatch; run one backward pass"
                )
            self._arrived.add(parameter)
            if self._missing is None:
                return
            self._missing[bucket] -= 1
            # From the first bucket on, even if a later one is complete before: all ranks must start
            # the sums in one order. The last is for `finish`, which knows whether all is well.
            while len(self._waits) < len(self._buckets) - 1 and not self._missing[len(self._waits)]:
                self._send()

    def _send(self, *, spoil: bool = False) -> None:
        bucket = self._buckets[len(self._waits)]
        self._prepare(bucket)
        if spoil:
            bucket.flat.fill_(torch.nan)
        self._waits.append(dist.start_sum(bucket.flat))

    @torch.no_grad()
    def finish(self, *, spoil: bool = False) -> None:
        """Sends what is left and waits for all sums; `spoil` makes the last ones NaN everywhere."""
        while left := len(self._buckets) - len(self._waits):
            self._send(spoil=spoil and left == 1)
        for wait in self._waits:
            wait()


def make_buckets(
    parameters: Sequence[nn.Parameter], dtype: torch.dtype | None = None
) -> list[Bucket]:
    """Buckets of `parameters` from the last to the first, as backward passes reach them.

    The first one takes up to 1 MiB, which is 262,144 numbers in float32.

    >>> sizes = (300_000, 200_000, 100_000, 50_000)
    >>> buckets = make_buckets([nn.Parameter(torch.zeros(size)) for size in sizes])
    >>> [[p.numel() for p in bucket.parameters] for bucket in buckets]
    [[50000, 100000], [200000, 300000]]
    """
    groups: list[list[nn.Parameter]] = []
    for parameter in reversed(parameters):
        # len(groups) is 0 only for the first parameter, for which no limit counts.
        limit = FIRST_BUCKET_BYTES if len(groups) == 1 else BUCKET_BYTES
        last = groups[-1] if groups else []
        fits = sum(p.nbytes for p in last) + parameter.nbytes <= limit
        if last and fits and parameter.dtype == last[0].dtype:
            last.append(parameter)
        else:
            groups.append([parameter])
    return [Bucket(group, dtype) for group in groups]


def compare_steps(found: set[str], used: set[str]) -> None:
    """Raises RuntimeError if parameters got a gradient in this step, or in the first, only."""
    if found != used:
        names = first_of(sorted(found ^ used), 1)
        raise RuntimeError(f"rank {dist.rank()}: {names}: got a gradient in some steps only")


def compare_ranks(found: set[str]) -> None:
    """Raises the same RuntimeError on all ranks if they differ in `found` (collective)."""
    everyone = [set(names) for names in dist.all_gather_object(sorted(found))]
    some = set.union(*everyone) - set.intersection(*everyone)
    if some:
        raise RuntimeError(f"{first_of(sorted(some), 1)}: got a gradient on some ranks only")
