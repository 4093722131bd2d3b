"""Names for the parts of a training step, for whoever measures them.

They name regions in torch's profiler. `watched` sends them to a listener, such as a clock.
"""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Protocol

from torch.profiler import record_function

FORWARD, BACKWARD, UPDATE = "forward", "backward", "update"


class Listener(Protocol):
    """What is told where parts begin and end."""

    def enter(self, name: str) -> None:
        """A part begins."""

    def leave(self, name: str) -> None:
        """It ends, also by an exception."""


_listener: Listener | None = None


@contextmanager
def span(name: str) -> Iterator[None]:
    """Around a part of a step; costs a few microseconds where nobody listens."""
    listener = _listener
    with record_function(name):
        if listener is not None:
            listener.enter(name)
        try:
            yield
        finally:
            if listener is not None:
                listener.leave(name)


@contextmanager
def watched(listener: Listener) -> Iterator[None]:
    """Inside, `listener` is told of every part, in whichever thread it runs."""
    global _listener
    _listener = listener
    try:
        yield
    finally:
        _listener = None
