"""What travels between modules, and tables of choices."""

from __future__ import annotations

import math
from collections.abc import Mapping
from importlib import import_module
from typing import TYPE_CHECKING, Any, NamedTuple, TypeVar

if TYPE_CHECKING:  # reading a class file needs IGNORE_INDEX, but not the seconds of this import
    import numpy as np
    from torch import Tensor

# Labels are train ids 0 .. K-1 in one byte each; this value marks pixels that count for nothing.
# Those of plugins may be floats, see `ignored`.
IGNORE_INDEX = 255


def ignored(label: np.ndarray) -> int | float:
    """What a label has where nothing is known: IGNORE_INDEX, or NaN where it holds floats."""
    return math.nan if label.dtype.kind == "f" else IGNORE_INDEX


Choice = TypeVar("Choice")


class Choices(dict[str, Choice]):
    """What the names of an option stand for."""

    def __init__(self, entries: Mapping[str, Choice]) -> None:
        super().__init__(entries)
        self._first = dict(entries)

    def changed(self) -> list[str]:
        """The names that were added, taken away or given to something else in this process."""
        names = sorted(self.keys() | self._first.keys())
        return [name for name in names if self.get(name) is not self._first.get(name)]


class Imported:
    """What stands at "module:name" of segtrain, imported when it is called for the first time."""

    def __init__(self, place: str) -> None:
        self._place = place

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """As what stands there."""
        module, name = self._place.split(":")
        return getattr(import_module(f"segtrain.{module}"), name)(*args, **kwargs)


class Batch(NamedTuple):
    """What the loader yields: the part of one batch that belongs to this rank.

    images: (N, C, H, W) as stored: uint8 RGB, or what the data set has (`ImageForm`).
    labels: (N, H, W) uint8, train ids or IGNORE_INDEX; of other tasks what their `Targets` read.
    names: N image names, for messages; "a + b" if a sample is made of two images.
    made_s: seconds that one process took to make it.
    pixels: the sum of `hash_pixels` of its samples, for receipts; None: not taken.
    """

    images: Tensor
    labels: Tensor
    names: list[str]
    made_s: float = 0.0
    pixels: int | None = None

    def empty(self) -> Batch:
        """The batch without its samples."""
        pixels = None if self.pixels is None else 0
        return Batch(self.images[:0], self.labels[:0], [], self.made_s, pixels)


class DropoutMasks(NamedTuple):
    """Channel masks of one forward pass, already divided by the keep probability.

    out, aux: (N, C, 1, 1) for the dropout before the classifier of the head and of the auxiliary
    head; None where the model has no such dropout.
    """

    out: Tensor | None = None
    aux: Tensor | None = None


class SegLogits(NamedTuple):
    """What every model returns, in training and in evaluation.

    out: (N, K, H, W) at the size of the input image; to losses also an `Enlarged`.
    aux: the same from the auxiliary head; None in evaluation or without one.
    """

    out: Tensor
    aux: Tensor | None = None
