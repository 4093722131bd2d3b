"""Batch norm that does not know how many devices there are.

    from segtrain.norm import SyncBatchNorm2d, convert

functional.py is the arithmetic, composite.py the same from differentiable pieces, sync.py the
modules, convert.py the exchange in a finished model, precise.py statistics of a whole data set,
uneven.py ranks with different numbers of batches, debug.py a watch over the meetings of the ranks.
"""

from collections.abc import Callable
from functools import partial

from torch import nn

from segtrain.config import NormConfig
from segtrain.norm.convert import convert
from segtrain.norm.debug import watch_ranks
from segtrain.norm.functional import sync_batch_norm
from segtrain.norm.precise import precise_statistics
from segtrain.norm.sync import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    normalize_together,
)
from segtrain.norm.uneven import until_all_end

__all__ = [
    "NormFactory",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "convert",
    "make_norm",
    "normalize_together",
    "precise_statistics",
    "sync_batch_norm",
    "until_all_end",
    "watch_ranks",
]

NormFactory = Callable[[int], nn.Module]
"""Makes the norm layer for a number of channels; models take it as an argument."""


def make_norm(config: NormConfig) -> NormFactory:
    """The layer that `config` asks for."""
    kind = {"sync": SyncBatchNorm2d, "local": nn.BatchNorm2d}[config.kind]
    return partial(kind, eps=config.eps, momentum=config.momentum)
