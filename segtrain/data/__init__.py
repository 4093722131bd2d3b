"""Data sets, read from disk, checked and augmented."""

from segtrain.data.pack.opening import open_dataset
from segtrain.data.read.dataset import SegDataset

__all__ = ["SegDataset", "open_dataset"]
