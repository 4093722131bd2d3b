"""Data sets, read from disk, checked and augmented.

`open_dataset` and `SegDataset` are imported on first use, so that a command that only needs a class
file waits for neither OpenCV nor torch.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segtrain.data.read.dataset import SegDataset
    from segtrain.data.read.opening import open_dataset

__all__ = ["SegDataset", "open_dataset"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from segtrain.data.read import dataset, opening

        return getattr(opening if name == "open_dataset" else dataset, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
