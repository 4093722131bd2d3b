"""Counts what one synchronized batch norm costs a CUDA device, on a machine without any.

    python tools/count_kernels.py

The operations run on fake tensors, for which torch needs no device; see fake_device.py. An
operation counts as one kernel, though some start several: over many values in channels-last layout,
statistics and sums clear a counter first, and a mask is turned into indices.
"""

from collections.abc import Callable
from typing import NamedTuple

import torch
import torch.distributed as torch_dist
from fake_device import NoWaits, fake_ranks, stub_context
from torch import Tensor, nn
from torch.nn.modules._functions import SyncBatchNorm as TorchFunction

from segtrain.norm import SyncBatchNorm2d, tracked_together
from segtrain.norm.functional import _SyncBatchNorms

aten = torch.ops.aten
CHANNELS, NUM_LAYERS = 8, 60


class Cost(NamedTuple):
    """Of one pass through one layer."""

    launches: int  # without collectives
    collectives: int
    waits: int  # times that the host waits for the device
    passes: int  # full tensors that are read or written


class Counter(NoWaits):
    """Counts waits instead of refusing them, and passes over tensors as large as the input."""

    def __init__(self, size: int) -> None:
        super().__init__()
        self._size = size
        self.waits = self.passes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        if func.overloadpacket is aten.index:
            # A mask, whose number of true values the host must know; here all are.
            self._count(func)
            self.waits += 1
            return args[0].clone()
        before = len(self.launches)
        result = super().__torch_dispatch__(func, types, args, kwargs)
        # One operation takes the input for its dtype only.
        for_dtype = func.overloadpacket is aten.batch_norm_gather_stats_with_counts
        if len(self.launches) > before and not for_dtype:
            results = result if isinstance(result, tuple | list) else [result]
            touched = [t for t in (*args, *results) if isinstance(t, Tensor)]
            self.passes += sum(t.numel() == self._size for t in touched)
        return result


def cost(run: Callable[[], object], size: int) -> Cost:
    """What `run` costs, whose input has `size` values."""
    with torch.no_grad(), Counter(size) as counter:
        run()
    return Cost(len(counter.launches), len(counter.collectives), counter.waits, counter.passes)


def layer_input(dtype: torch.dtype) -> Tensor:
    x = torch.rand(2, CHANNELS, 33, 37, device="cuda", dtype=dtype)
    return x.to(memory_format=torch.channels_last)


def of_segtrain(dtype: torch.dtype) -> tuple[Cost, Cost]:
    """Forward and backward, the running statistics of a model left out."""
    x, parameters = layer_input(dtype), torch.rand(2, CHANNELS, device="cuda")
    context = stub_context([False, False, True, True, True])

    def forward() -> Tensor:
        return _SyncBatchNorms.forward(context, [1e-5], None, x, *parameters)[0]

    def backward() -> None:
        _SyncBatchNorms.backward(context, torch.empty_like(x), None, None, None)

    with torch.no_grad():
        forward(), backward()  # constants are made
    return cost(forward, x.numel()), cost(backward, x.numel())


def of_settling(num_layers: int) -> int:
    """The launches that update the running statistics of a model with so many layers."""
    layers = [SyncBatchNorm2d(CHANNELS, device="cuda") for _ in range(num_layers)]
    x = layer_input(torch.float32)

    def step() -> None:
        with tracked_together():
            for layer in layers:
                layer(x)

    with torch.no_grad():
        step()
    each = of_segtrain(torch.float32)[0].launches
    return cost(step, x.numel()).launches - num_layers * each


def of_torch(dtype: torch.dtype) -> tuple[Cost, Cost]:
    """torch.nn.SyncBatchNorm."""
    x = layer_input(dtype)
    layer = nn.SyncBatchNorm(CHANNELS, device="cuda")
    context = stub_context([True, True, True])
    buffers = layer.running_mean, layer.running_var
    group, size = torch_dist.group.WORLD, torch_dist.get_world_size()

    def forward() -> Tensor:
        layer.num_batches_tracked.add_(1)  # as the module does
        options = (1e-5, 0.1, group, size)
        return TorchFunction.forward(context, x, layer.weight, layer.bias, *buffers, *options)

    def backward() -> None:
        TorchFunction.backward(context, torch.empty_like(x))

    return cost(forward, x.numel()), cost(backward, x.numel())


def of_cudnn(dtype: torch.dtype) -> tuple[Cost, Cost]:
    """nn.BatchNorm2d by cuDNN. Its kernels read the input twice forward, and both backward."""
    x, layer = layer_input(dtype), nn.BatchNorm2d(CHANNELS, device="cuda")
    buffers = layer.running_mean, layer.running_var
    parameters = layer.weight, layer.bias

    def forward() -> None:
        layer.num_batches_tracked.add_(1)
        aten.cudnn_batch_norm(x, *parameters, *buffers, True, 0.1, 1e-5)

    def backward() -> None:
        saved = torch.empty(2, CHANNELS, device="cuda").unbind()
        reserve = torch.empty(0, dtype=torch.uint8, device="cuda")
        rest = (*buffers, *saved, 1e-5, reserve)
        aten.cudnn_batch_norm_backward(x, torch.empty_like(x), layer.weight, *rest)

    one, other = cost(forward, x.numel()), cost(backward, x.numel())
    return one._replace(passes=one.passes + 1), other._replace(passes=other.passes + 2)


def table() -> list[str]:
    """The rows of Markdown."""
    rows = [
        "| | kernels | collectives | host waits | full tensors read or written |",
        "|---|---|---|---|---|",
    ]
    kinds = {
        "segtrain": of_segtrain,
        "torch.nn.SyncBatchNorm": of_torch,
        "nn.BatchNorm2d by cuDNN, one device": of_cudnn,
    }
    for name, count in kinds.items():
        cost, narrow = (count(dtype) for dtype in (torch.float32, torch.bfloat16))
        assert cost == narrow
        cells = (f"{forward} + {backward}" for forward, backward in zip(*cost, strict=True))
        rows.append(f"| {name} | {' | '.join(cells)} |")
    return rows


def main() -> None:
    with fake_ranks():
        print(*table(), sep="\n")
        print(
            f"running statistics of {NUM_LAYERS} layers: {of_settling(NUM_LAYERS)} kernels a step"
        )


if __name__ == "__main__":
    main()
