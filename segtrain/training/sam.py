"""Sharpness aware minimization, SAM (Foret et al., arXiv:2010.01412, algorithm 1).

A step with SAM computes two gradients of the same batch, with the same augmentation and dropout:

    g = gradient at w
    update of the optimizer at w, by the gradient at  w + rho * g / ||g||

g is the gradient of the whole batch, over all ranks, microbatches and shares, and ||g|| the norm
over all parameters. So the number of ranks does not show. Other trainers perturb by the gradient of
each device's own images (m-sharpness, section 4.1), which is another method for another number of
devices: their rho need not be the best one here.

What belongs to w alone: the loss that is logged and the running statistics of batch norm. What
belongs to the second gradient: its norm, clipping, the exponents and the digest of train.shares.
Weight decay belongs to the optimizer and moves no weight before the second gradient.

A step keeps no state, so nothing of it is in a checkpoint.
"""

from collections.abc import Iterable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from segtrain.config import OptimConfig
from segtrain.norm import untracked


def sam_is_due(optim: OptimConfig, step: int) -> bool:
    """Whether update `step`, 0 .. steps - 1, takes a second gradient: the last of `sam_every`.

    As composer's SAM(interval=...) of MosaicML does.
    """
    return optim.sam_rho is not None and (step + 1) % optim.sam_every == 0


@contextmanager
def sam_perturbed(parameters: Iterable[nn.Parameter], rho: float) -> Iterator[None]:
    """Inside, the parameters are at w + rho * g / ||g||; afterwards at w again, bit for bit.

    g are the gradients, in any scale; they are freed. Where g is 0 or not finite, the parameters
    stay at w: then the second gradient is not finite either, and the step is treated as any other
    step of which that is so. Inside, running statistics stay as they are.
    """
    moved = [p for p in parameters if p.grad is not None]
    before = [p.detach().clone() for p in moved]
    try:
        _perturb(moved, rho)
        with untracked():
            yield
    finally:
        with torch.no_grad():
            for parameter, value in zip(moved, before, strict=True):
                parameter.copy_(value)


@torch.no_grad()
def _perturb(parameters: list[nn.Parameter], rho: float) -> None:
    norm = nn.utils.get_total_norm([p.grad for p in parameters])
    # Decided on the device: the host does not wait.
    is_usable = norm.isfinite() & (norm > 0)
    for parameter in parameters:
        parameter.add_(torch.where(is_usable, parameter.grad * (rho / norm), 0.0))
        parameter.grad = None
