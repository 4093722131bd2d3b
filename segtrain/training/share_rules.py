"""What train.shares asks of a model and of the machines.

Shares are computed by several threads, in an order that differs from rank to rank and from run to
run. Shared generators of random numbers, or buffers that each share changes, would silently change
the result. So would another processor, device or library, whose kernels add up in another order:
`fingerprint` shows it before the first step.
"""

import hashlib
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.config import TrainConfig
from segtrain.errors import ConfigError
from segtrain.models.precision import autocast, autocast_dtype, dtype_of
from segtrain.models.pspnet import adaptive_avg_pools
from segtrain.models.resizing import resize
from segtrain.norm import FrozenBatchNorm2d, SyncBatchNorm
from segtrain.parts import changed_state, draws_random_numbers


def refuse_layers(model: nn.Module, option: str) -> None:
    """Raises ConfigError for torch's own dropout and batch norm; `watch` finds other layers.

    Two forward passes for one step, which `option` asks for, would draw different dropout masks and
    update running statistics twice.
    """
    for name, layer in model.named_modules():
        is_own_norm = isinstance(layer, SyncBatchNorm | FrozenBatchNorm2d)
        if draws_random_numbers(layer) or (isinstance(layer, _BatchNorm) and not is_own_norm):
            raise ConfigError(
                f"{option}: {name}, a {type(layer).__name__}, draws random numbers or updates "
                "statistics in each forward pass; take `DropoutMasks`, and make norms by `norm`"
            )


@contextmanager
def watch(model: nn.Module) -> Iterator[None]:
    """Raises ConfigError if what is inside, a step, has drawn random numbers or changed buffers.

    Those of synchronized batch norm are changed in order.
    """
    with changed_state(model) as changed:
        yield
    if changed:
        raise ConfigError(
            f"train.shares: computing a share changes {changed[0]}, which all shares have in "
            "common; let random numbers be arguments, as `DropoutMasks` is, keep statistics only "
            "in layers that `norm` makes, or set train.shares to null"
        )


_KERNEL_SHAPES = (
    (32, 16, 3, 3),  # a convolution, dilated
    (32, 1, 3, 3),  # by channel
    (64, 32, 1, 1),
    (9, 64, 1, 1),  # the classifier
)


def fingerprint(device: torch.device, train: TrainConfig) -> str:
    """16 hexadecimal digits of a small forward and backward pass in the precision of `train`.

    Equal digits do not prove that all bits of a training are equal; different ones prove that they
    are not. Call it with one thread.
    """
    generator, dtype = torch.Generator().manual_seed(0), dtype_of(train)

    def random(*shape: int) -> Tensor:
        values = torch.randn(*shape, generator=generator).to(device, dtype)
        if values.dim() != 4:
            return values
        return values.to(memory_format=torch.channels_last).requires_grad_()

    def normalized(x: Tensor) -> Tensor:
        return F.relu(F.batch_norm(x, None, None, training=True))

    images, kernels = random(2, 16, 29, 37), [random(*shape) for shape in _KERNEL_SHAPES]
    labels = torch.randint(9, (2, 58, 74), generator=generator).to(device)
    with autocast(autocast_dtype(train), device):
        x = F.conv2d(images, kernels[0], padding=2, dilation=2)
        x = F.conv2d(normalized(x), kernels[1], padding=1, groups=32)
        x = F.conv2d(normalized(x), kernels[2])
        # On CUDA torch's own pooling has no deterministic backward pass.
        pooled = F.adaptive_avg_pool2d(x, 3) if x.is_cpu else adaptive_avg_pools(x, (3,))[0]
        x = x + resize(pooled, x.shape[2:], align_corners=False)
        logits = F.conv2d(normalized(x), kernels[3])
    logits = resize(logits.to(dtype), labels.shape[1:], align_corners=False)
    losses = F.cross_entropy(logits, labels, reduction="none")
    gradients = torch.autograd.grad(losses.sum(dtype=torch.float64), [images, *kernels])
    digest = hashlib.sha256()
    for values in (logits.detach(), losses.detach(), *gradients):
        digest.update(values.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]
