"""Sums over ranks that activation checkpointing finds again instead of sending them twice.

A forward pass that is computed again has the same statistics. So they are kept: some KB a layer,
for which neither the input is read again nor the other ranks are waited for.
"""

import threading
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager

import torch
from torch import Tensor

_here = threading.local()  # autograd computes again in the thread of the backward pass


def once(compute: Callable[[], Tensor]) -> Tensor:
    """`compute()`; in the second context of `sums_once`, what it returned in the first.

    Do not write into it.
    """
    # Outside of checkpointing each pass sends for itself.
    if torch.compiler.is_compiling() or getattr(_here, "sums", None) is None:
        return compute()
    # The second pass asks in the order of the first.
    if isinstance(_here.sums, Iterator):
        return next(_here.sums)
    _here.sums.append(compute())
    return _here.sums[-1]


def sums_once() -> tuple[AbstractContextManager[None], AbstractContextManager[None]]:
    """Contexts of a forward pass and of the same pass again: `context_fn` of torch's checkpoint."""
    sums: list[Tensor] = []
    return _With(lambda: sums), _With(lambda: iter(sums))


class _With(AbstractContextManager[None]):
    """Inside, `once` uses what `make` returns; entered again in every backward pass."""

    def __init__(self, make: Callable[[], list[Tensor] | Iterator[Tensor]]) -> None:
        self._make = make

    def __enter__(self) -> None:
        self._before, _here.sums = getattr(_here, "sums", None), self._make()

    def __exit__(self, *_: object) -> None:
        _here.sums = self._before
