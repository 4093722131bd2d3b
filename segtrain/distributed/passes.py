"""What layers and sums know of the forward and backward pass that runs: the one ambient value.

A layer that is computed again, by activation checkpointing, looks again, perhaps in a thread of
autograd's: so it is one value of the process, not of a thread. Context managers replace it and put
it back; nobody changes it in between.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, NamedTuple


class Pass(NamedTuple):
    """Set by `norm.placed`, `norm.untracked`, `norm.tracked_together` and `collectives.alone`.

    parts: the images in each part of each rank; None: not told.
    tracked: whether running statistics follow the batches.
    waiting: layers with the statistics of a batch that they follow at the end; None: at once.
    alone: whether every sum is over this process only.
    """

    parts: tuple[tuple[int, ...], ...] | None = None
    tracked: bool = True
    waiting: list[Any] | None = None
    alone: bool = False


_current = Pass()


def current() -> Pass:
    """That of now."""
    return _current


@contextmanager
def passing(**changes: Any) -> Iterator[Pass]:
    """Inside, `current` has these fields."""
    global _current
    before, _current = _current, _current._replace(**changes)
    try:
        yield _current
    finally:
        _current = before
