"""The memory of a training step: the bytes of all living tensors, and those that autograd keeps.

It needs no GPU; what kernels use inside is not seen.
"""

from collections.abc import Callable
from contextlib import nullcontext
from typing import Any, NamedTuple
from unittest.mock import patch

import torch
from torch import Tensor, nn
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from segtrain.config import LossConfig, ModelConfig
from segtrain.distributed.offload import OnHost
from segtrain.models import build_model, resnet
from segtrain.norm import SyncBatchNorm2d
from segtrain.training.losses import SegLoss
from segtrain.types import DropoutMasks


class LiveBytes(TorchDispatchMode):
    """Counts the bytes of all living storages made inside, those of `others` and the host apart.

    peak: the most there have been at once.
    """

    def __init__(self, others: list[Tensor]) -> None:
        super().__init__()
        self._others = {tensor.untyped_storage()._cdata for tensor in others}
        self._storages: dict[int, tuple[StorageWeakRef, int]] = {}
        self._on_host: set[int] = set()
        self.peak = 0

    def forget(self, tensor: Tensor) -> None:
        """Leaves `tensor` out from now on: it stands for memory of the host."""
        self._on_host.add(tensor.untyped_storage()._cdata)

    def live(self) -> int:
        """The bytes alive now."""
        self._storages = {k: v for k, v in self._storages.items() if not v[0].expired()}
        self._on_host &= self._storages.keys()
        return sum(size for key, (_, size) in self._storages.items() if key not in self._on_host)

    def __torch_dispatch__(
        self, function: Any, types: Any, args: Any = (), kwargs: Any = None
    ) -> Any:
        """Runs `function` and looks at what it returns."""
        result = function(*args, **(kwargs or {}))
        for tensor in tree_leaves(result):
            if isinstance(tensor, Tensor):
                storage = tensor.untyped_storage()
                if storage._cdata not in self._others:
                    self._storages[storage._cdata] = (StorageWeakRef(storage), storage.nbytes())
        self.peak = max(self.peak, self.live())
        return result


class ClonesAsHost:
    """Lets `saved_on_host` work on a CPU: clones take the place of copies to a host and back.

    on_host: called with each clone that counts as the host's.
    """

    def __init__(self, on_host: Callable[[Tensor], None] = lambda _: None) -> None:
        self._on_host = on_host

    def to_host(self, tensor: Tensor) -> OnHost:
        host = tensor.detach().clone()
        self._on_host(host)
        return OnHost(host, tensor.device, None)

    def to_device(self, on_host: OnHost) -> Tensor:
        return on_host.host.clone()


def saved_bytes(function: Callable[[], Tensor]) -> tuple[int, Tensor]:
    """Bytes of the distinct storages that autograd keeps of `function`, parameters apart, and its
    result."""
    storages = {}

    def pack(tensor: Tensor) -> Tensor:
        if not isinstance(tensor, nn.Parameter):
            storage = tensor.untyped_storage()
            storages[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, lambda tensor: tensor):
        result = function()
    return sum(storages.values()), result


class StepBytes(NamedTuple):
    """What a training step needs beside parameters, their gradients and images.

    layers: kept for the backward pass by the triples of batch norm, ReLU and convolution alone.
    forward: alive between the forward and the backward pass.
    peak: the most at any time.
    """

    layers: int
    forward: int
    peak: int


def measure_step(config: ModelConfig, *, size: int, batch_size: int, num_classes: int) -> StepBytes:
    """The bytes of one forward and backward pass in one process."""
    torch.manual_seed(0)
    model = build_model(config, num_classes=num_classes, norm=SyncBatchNorm2d).train()
    for parameter in model.parameters():  # gradients exist before, as the parameters do
        parameter.grad = torch.zeros_like(parameter)
    images = torch.randn(batch_size, 3, size, size).to(memory_format=torch.channels_last)
    labels = torch.randint(num_classes, (batch_size, size, size))
    criterion = SegLoss(LossConfig(), images.device)
    layers = []

    def counted(*args: Any, **kwargs: Any) -> Tensor:
        num_bytes, y = saved_bytes(lambda: triple(*args, **kwargs))
        layers.append(num_bytes)
        return y

    triple = resnet._norm_relu_conv
    others = [p for parameter in model.parameters() for p in (parameter, parameter.grad)]
    with LiveBytes([*others, *model.buffers(), images, labels]) as mode:
        # Hooks within a recomputed block would take its tensors from the checkpoint.
        counting = patch.object(resnet, "_norm_relu_conv", counted)
        with nullcontext() if config.recompute == "blocks" else counting:
            logits = model(images, DropoutMasks())
        sums = criterion(logits, labels)
        del logits
        forward = mode.live()
        criterion.objective(sums, sums.detach()).backward()
    return StepBytes(sum(layers), forward, mode.peak)
