"""Gradients of shares, summed so that no bit depends on which rank computed which share.

Floating-point sums depend on order and brackets; sums of integers do not. So the gradient of every
share is turned into 64-bit fixed point before it is added to anything:

    integer = trunc(gradient * 2**exponent)     one exponent for each parameter tensor

The exponent follows the largest value of the step before: with 8 shares, that becomes 2**51. A
value 2**8 times larger still fits into 63 bits when all shares are added. A step that needs more
room is computed again with other exponents; so is one whose largest value in some tensor has fallen
by more than 2**10, and the first step, which knows nothing yet. So an element keeps all 24 digits
of float32 if it is above 2**-27 of the largest of its tensor, and at the worst, after a fall, above
2**-17.

All of this is decided by the largest value over all shares, which does not depend on their order
either. The exponents are part of a checkpoint.
"""

import copy
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from torch import Tensor, nn

from segtrain.distributed import collectives as dist
from segtrain.training.gradients import BucketSender, compare_ranks, compare_steps, make_buckets

# All shares together stay below 2**62: a largest value is known as a power of two only.
_SUM_BITS = 62
# How much larger than in the step before the largest value may be, and how much smaller.
_ROOM_BITS, _FALL_BITS = 8, 10
_EXPONENTS = (-90, 126)  # the least and the largest
# What is not below this, in float64, counts as infinite: no exponent brings it into range.
_INFINITE = 2.0**128


class ExactGradientSum:
    """Sums the gradients of a model over all microbatches and shares of a step.

    Args:
        model: its parameters are on one device and the same on all ranks. They get the sums.
        replicas: of the model, from `replica`, one for each share of this rank.
        shares: how many each rank has, in the order of ranks.
        microbatches: backward passes of each share in a step.
    """

    def __init__(
        self,
        model: nn.Module,
        replicas: Sequence[nn.Module],
        *,
        shares: Sequence[int],
        microbatches: int,
    ) -> None:
        parameters = {name: p for name, p in model.named_parameters() if p.requires_grad}
        self._names, self._parameters = list(parameters), list(parameters.values())
        # In the order of `_parameters`: a parameter and its copies have one index.
        self._replicas = [[p for p in r.parameters() if p.requires_grad] for r in replicas]
        # The threads of all shares add to the same sums.
        self._locks = [threading.Lock() for _ in parameters]
        # The most bits of one share's values, and those of the largest one in the next step. The
        # sum of n values takes up to bit_length(n - 1) bits more than one: 3 for 8 shares.
        self._most_bits = _SUM_BITS - (sum(shares) * microbatches - 1).bit_length()
        self._target_bits = self._most_bits - _ROOM_BITS
        self._used: set[str] | None = None  # names of the parameters that get a gradient
        device = self._parameters[0].device
        self._exponents = torch.zeros(len(parameters), dtype=torch.int64, device=device)
        self._buckets = make_buckets(self._parameters, torch.int64)
        places = {
            parameter: (i, view)
            for i, bucket in enumerate(self._buckets)
            for parameter, view in zip(bucket.parameters, bucket.views, strict=True)
        }
        # Of each parameter: the number of its bucket, and its sum, which is a view of the bucket.
        self._bucket_of, self._sums = zip(*(places[p] for p in self._parameters), strict=True)
        self._start_step()

    def _start_step(self) -> None:
        self._scales = _powers(self._exponents).unbind()
        # The largest absolute value of each parameter's gradient in any share of this rank.
        self._largest = torch.zeros_like(self._scales[0]).repeat(len(self._parameters))
        self._largest_views = self._largest.unbind()
        self._begun = [False] * len(self._parameters)

    @property
    def exponents(self) -> dict[str, int]:
        """That of each parameter for the next step, by name: a part of the training state.

        In the order of `digest`.
        """
        return dict(zip(self._names, self._exponents.tolist(), strict=True))

    @exponents.setter
    def exponents(self, exponents: dict[str, int]) -> None:
        self._exponents.copy_(torch.tensor([exponents[name] for name in self._names]))
        self._start_step()

    def digest(self) -> Tensor:
        """For each parameter a number that depends on its gradient in the last step, int64.

        The same on all ranks: the bits of the largest absolute value in any share.
        """
        return self._last_largest.view(torch.int64)

    @contextmanager
    def collected(self, *, last: bool) -> Iterator[None]:
        """Takes the gradients of a microbatch, of all shares of this rank; `grad` stays None.

        last: the last one of the step: what is complete is sent to the other ranks at once. Then
            `finish` follows (collective).
        """
        arrivals = None  # how many gradients each bucket gets; not known in the first step
        if last and self._used is not None:
            used = [b for n, b in zip(self._names, self._bucket_of, strict=True) if n in self._used]
            arrivals = [len(self._replicas) * used.count(i) for i in range(len(self._buckets))]
        self._sender = BucketSender(self._buckets, arrivals)
        hooks = [
            parameter.register_post_accumulate_grad_hook(partial(self._take, i))
            for parameters in self._replicas
            for i, parameter in enumerate(parameters)
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def _take(self, index: int, parameter: nn.Parameter) -> None:
        # The gradient is left alone: where a parameter was only reshaped and added, autograd still
        # needs its memory.
        grad, parameter.grad = parameter.grad, None
        low, high = grad.aminmax()  # NaN if there is one
        scaled = grad * self._scales[index]  # exact: by a power of two
        with self._locks[index]:
            if self._begun[index]:
                self._sums[index].add_(scaled.to(torch.int64))
            else:
                # Nobody has cleared the sum of the step before. The copy truncates, as `to` does.
                self._sums[index].copy_(scaled)
            self._begun[index] = True
            largest = self._largest_views[index]
            torch.maximum(largest, torch.maximum(-low, high), out=largest)
        # Only now that it is added: the call may send the bucket, if this gradient was the last.
        self._sender.arrived(self._bucket_of[index], parameter)

    @torch.no_grad()
    def finish(self) -> bool:
        """Gives the parameters their gradients; False: compute the whole step again (collective).

        A gradient that is not finite in some share becomes NaN altogether, and the step is not
        computed again.

        Raises:
            RuntimeError: parameters got a gradient on some ranks or in some steps only.
        """
        with_grad = {name for name, begun in zip(self._names, self._begun, strict=True) if begun}
        if self._used is None:
            compare_ranks(with_grad)
            self._used = with_grad
        if with_grad != self._used:
            # Only this rank sees it; NaN stops all ranks, but in float16, as an overflow.
            self._largest.fill_(torch.inf)
        self._sender.finish()
        # NaN compares as not smaller.
        largest = torch.where(self._largest < _INFINITE, self._largest, torch.inf)
        largest = dist.all_gather(largest).amax(0)
        # After the collectives, so that no rank waits for one that has raised here.
        compare_steps(with_grad, self._used)
        length = _bit_length(largest)
        bits, finite = length + self._exponents, largest.isfinite().all()
        fallen = (bits < self._target_bits - _FALL_BITS) & (self._exponents < _EXPONENTS[1])
        # Not where the largest is 0, which fits any exponent: another one would not change it.
        again = finite & (((bits > self._most_bits) | fallen) & (largest > 0)).any()
        # Nor there: nothing is known about the next gradient.
        fitting = (self._target_bits - length).clamp(*_EXPONENTS)
        exponents = torch.where((largest > 0) & finite, fitting, self._exponents)
        repeat = bool(again)  # the host waits for the device here, once a step
        if not repeat:
            self._last_largest = largest
            inverse = torch.where(largest.isfinite(), _powers(-self._exponents), torch.nan)
            for i, parameter in enumerate(self._parameters):
                if self._begun[i]:
                    parameter.grad = self._sums[i].to(parameter.dtype).mul_(inverse[i])
        # From here on the new exponents hold, also for the step that is computed again.
        self._exponents = exponents
        self._start_step()
        return not repeat


def replica(module: nn.Module) -> nn.Module:
    """A copy of `module` with the same values but gradients of its own.

    Parameters and buffers share their memory with those of `module`. Two threads that worked with
    the same parameters would add to one `grad` at the same time.
    """
    # What `deepcopy` finds in the memo it takes as it is: buffers themselves, and new parameters
    # on the memory of the old ones.
    memo: dict[int, Tensor] = {id(buffer): buffer for buffer in module.buffers()}
    for parameter in module.parameters():
        memo[id(parameter)] = nn.Parameter(parameter.detach(), parameter.requires_grad)
    return copy.deepcopy(module, memo)


def _bit_length(values: Tensor) -> Tensor:
    """The smallest e with values < 2**e; 0 for 0."""
    return torch.frexp(values.nan_to_num(posinf=0.0)).exponent.long()


def _powers(exponents: Tensor) -> Tensor:
    """2**exponents (int64) as float64, by its bits: older torch's ldexp has them from float32."""
    return (exponents.clamp(-1022, 1023) + 1023 << 52).view(torch.float64)
