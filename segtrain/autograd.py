"""Backward passes of our own."""

from collections.abc import Callable
from functools import wraps
from typing import Any

import torch
from torch.autograd.function import once_differentiable


def differentiable_once(backward: Callable[..., Any]) -> Callable[..., Any]:
    """For `backward` of a torch.autograd.Function whose gradient has no gradient.

    torch's own decorator refuses a second derivative only by the incoming gradient; what depends on
    saved tensors alone, as a gradient penalty does, would be taken for a constant without a word.

    Raises:
        RuntimeError: it is called to be differentiated again (create_graph=True).
    """
    once = once_differentiable(backward)

    @wraps(backward)
    def checked(ctx: Any, *grads: Any) -> Any:
        if torch.is_grad_enabled() and not torch.compiler.is_compiling():
            raise RuntimeError(
                "a gradient of segtrain's layers cannot be differentiated again "
                "(create_graph=True, as for a gradient penalty)"
            )
        return once(ctx, *grads)

    return checked
