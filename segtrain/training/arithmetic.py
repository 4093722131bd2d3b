"""Does this machine compute the same bits as another one?

With shares the program leaves nothing open, but processors, devices and libraries do: a kernel for
another instruction set adds up in another order. A small step that uses the operations of training
shows it before the first real one.
"""

import hashlib

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.config import TrainConfig
from segtrain.models.precision import autocast, autocast_dtype, dtype_of
from segtrain.models.pspnet import adaptive_avg_pools
from segtrain.models.resizing import resize

_SHAPES = (
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
        layout = torch.channels_last if train.channels_last else torch.contiguous_format
        return values.to(memory_format=layout).requires_grad_() if values.dim() == 4 else values

    images, kernels = random(2, 16, 29, 37), [random(*shape) for shape in _SHAPES]
    labels = torch.randint(9, (2, 58, 74), generator=generator).to(device)
    with autocast(autocast_dtype(train), device):
        x = F.conv2d(images, kernels[0], padding=2, dilation=2)
        x = F.conv2d(F.relu(_normalized(x)), kernels[1], padding=1, groups=32)
        x = F.conv2d(F.relu(_normalized(x)), kernels[2])
        x = x + resize(_pooled(x), x.shape[2:], align_corners=False)
        logits = F.conv2d(F.relu(_normalized(x)), kernels[3])
    logits = resize(logits.to(dtype), labels.shape[1:], align_corners=False)
    losses = F.cross_entropy(logits, labels, reduction="none")
    gradients = torch.autograd.grad(losses.sum(dtype=torch.float64), [images, *kernels])
    digest = hashlib.sha256()
    for values in (logits.detach(), losses.detach(), *gradients):
        digest.update(values.contiguous().cpu().numpy().tobytes())
    return digest.hexdigest()[:16]


def _pooled(x: Tensor) -> Tensor:
    # torch's own operator has no deterministic backward pass on CUDA.
    return F.adaptive_avg_pool2d(x, 3) if x.is_cpu else adaptive_avg_pools(x, (3,))[0]


def _normalized(x: Tensor) -> Tensor:
    return F.batch_norm(x, None, None, training=True)
