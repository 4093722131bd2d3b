"""What equal bits cost: time, bytes and memory of a training step with train.shares.

    python tools/bench_shares.py                                2 ranks of one thread
    python tools/bench_shares.py --nproc 1 --threads 2          one process

A PSPNet on random images, the whole step. The contenders take turns, and the slowest rank counts. A
ratio is the median over the rounds of the ratio within each round, with its 95 % interval. "cut"
computes the same shares apart, but adds up as usual: what it costs more than "whole" is the price
of cutting, and what "shares" costs more than "cut" is the price of sums that know no order.
"""

import argparse
import inspect
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial

import torch
from rounds import estimate, measure, on_ranks, ratios
from stepping import config_of, state_of, steps_of
from torch import Tensor, nn

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.training.gradients import GradientSum
from segtrain.training.measure import peak_bytes
from segtrain.training.state import TrainState

REPLICATED, WHOLE, CUT, SHARES = "DistributedDataParallel", "whole", "cut", "shares"
NUM_CLASSES = 11


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--nproc", type=int, default=2)
    parser.add_argument("--threads", type=int, default=1, help="of each rank")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--backbone", default="resnet18")
    parser.add_argument("--crop-size", type=int, nargs=2, default=(96, 128), help="pixels")
    parser.add_argument("--images", type=int, default=8, help="of all ranks together")
    parser.add_argument("--shares", type=int, default=8)
    parser.add_argument("--rounds", type=int, default=15)
    options = parser.parse_args()
    ranks = partial(on_ranks, options.nproc, options.device)
    times = ranks(step_times, options)
    base = REPLICATED if options.nproc > 1 else WHOLE
    print(f"{'':24} {'ms':>7} {'MB sent':>8} {'MiB':>6}  ratio to {base}")
    for name, values in times.items():
        sent, memory = ranks(bytes_of_a_step, options, name)
        print(
            f"{name:24} {estimate(values).median:7.0f} {sent / 1e6:8.1f} {memory / 2**20:6.0f}"
            f"  {estimate(ratios(values, times[base]))}"
        )
    return 0


def step_times(device: torch.device, options: argparse.Namespace) -> dict[str, list[float]]:
    """Milliseconds of a step in each round, by contender (collective)."""
    names = [WHOLE, CUT, SHARES] if options.nproc == 1 else [REPLICATED, WHOLE, CUT, SHARES]
    calls = {name: step_of(name, device, options) for name in names}
    return measure(calls, device=device, rounds=options.rounds)


def bytes_of_a_step(
    device: torch.device, options: argparse.Namespace, name: str
) -> tuple[int, int]:
    """What a rank hands over to collectives in a step, and the most memory of a process."""
    step, sent = step_of(name, device, options), [0]

    def counted(function: Callable[..., object], tensor: Tensor, *args: object) -> object:
        sent[0] += tensor.nbytes
        return function(tensor, *args)

    for _ in range(3):
        step()
    for place in ("start_sum", "_sum_processes", "_gather_processes"):
        setattr(dist, place, partial(counted, getattr(dist, place)))
    step()
    if name == REPLICATED:  # torch sends the gradients
        sent[0] += sum(p.nbytes for p in step.state.model.parameters())
    return sent[0], peak_bytes(device)


class Step:
    """One training step of a contender at every call."""

    def __init__(self, state: TrainState, config: Config, threads: int) -> None:
        self.state, self.threads = state, threads
        device = next(state.model.parameters()).device
        self._steps = steps_of(state, config, device, NUM_CLASSES)

    def __call__(self) -> None:
        torch.set_num_threads(self.threads)
        next(self._steps)


def step_of(name: str, device: torch.device, options: argparse.Namespace) -> Step:
    """A step of the contender `name` (collective)."""
    in_shares = name in (CUT, SHARES)
    config = config_of(
        tuple(options.crop_size),
        options.images,
        model={"backbone": options.backbone},
        shares=options.shares if in_shares else None,
    )
    torch.set_num_threads(options.threads)
    state = state_of(config, device, num_classes=NUM_CLASSES)
    if name == REPLICATED:
        state.wrapped, state.gradients = _replicated(state.wrapped, device), _NoSum()
    if name == CUT:
        state.gradients = _PlainSum(state)
        return _CutStep(state, config, 1)
    return Step(state, config, 1 if in_shares else options.threads)


class _CutStep(Step):
    """A step of shares whose sums depend on the grouping, as usual."""

    def __call__(self) -> None:
        original, dist.ordered_sum = dist.ordered_sum, _plain_sum
        try:
            super().__call__()
        finally:
            dist.ordered_sum = original


def _plain_sum(parts: Tensor, shares: Sequence[int]) -> Tensor:
    return dist._sum_processes(parts.sum(0), None)


class _NoSum:
    """DistributedDataParallel sums by itself."""

    @contextmanager
    def collected(self, *, last: bool) -> Iterator[None]:
        yield

    def finish(self) -> bool:
        return True

    def digest(self) -> None:
        return None


class _PlainSum:
    """Sums of the shares' gradients in floating point, in the order in which they come."""

    def __init__(self, state: TrainState) -> None:
        self._parameters = list(state.model.parameters())
        self._replicas = [list(replica.parameters()) for replica in state.replicas]
        self._sum = GradientSum(state.model.named_parameters(), overlap=False)

    @contextmanager
    def collected(self, *, last: bool) -> Iterator[None]:
        yield

    @torch.no_grad()
    def finish(self) -> bool:
        first, *others = ([p.grad for p in parameters] for parameters in self._replicas)
        for grads in others:
            torch._foreach_add_(first, grads)
        for parameter, grad in zip(self._parameters, first, strict=True):
            parameter.grad = grad
        for parameters in self._replicas:
            for parameter in parameters:
                parameter.grad = None
        with self._sum.collected(last=True):
            pass
        return True

    def digest(self) -> None:
        return None


def _replicated(module: nn.Module, device: torch.device) -> nn.Module:
    wrapper = nn.parallel.DistributedDataParallel
    # The new name of the option where torch has it, the old one elsewhere.
    new_name = "forward_sync_buffers" in inspect.signature(wrapper).parameters
    return wrapper(
        module,
        device_ids=[device.index] if device.type == "cuda" else None,
        gradient_as_bucket_view=True,
        **{"forward_sync_buffers" if new_name else "broadcast_buffers": False},
    )


if __name__ == "__main__":
    sys.exit(main())
