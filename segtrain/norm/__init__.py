"""Batch norm that does not know how many devices there are.

    from segtrain.norm import SyncBatchNorm2d, convert

functional.py is the arithmetic, composite.py the same from differentiable pieces, sync.py the
modules, partial.py statistics over some of the ranks, recompute.py the same with half the memory,
kinds.py what a config can name, convert.py the exchange in a finished model, precise.py statistics
of a whole data set, uneven.py ranks with different numbers of batches, debug.py a watch over the
meetings of the ranks.
"""

from segtrain.norm.convert import convert
from segtrain.norm.debug import watch_ranks
from segtrain.norm.functional import sync_batch_norm
from segtrain.norm.kinds import (
    FrozenBatchNorm2d,
    NormFactory,
    describe_norm,
    make_inference_norm,
    make_norm,
)
from segtrain.norm.partial import PartialBatchNorm2d, settle_statistics
from segtrain.norm.precise import precise_statistics
from segtrain.norm.recompute import norm_relu_conv
from segtrain.norm.sync import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    make_groups,
    normalize_together,
)
from segtrain.norm.uneven import until_all_end

__all__ = [
    "FrozenBatchNorm2d",
    "NormFactory",
    "PartialBatchNorm2d",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "convert",
    "describe_norm",
    "make_groups",
    "make_inference_norm",
    "make_norm",
    "norm_relu_conv",
    "normalize_together",
    "precise_statistics",
    "settle_statistics",
    "sync_batch_norm",
    "until_all_end",
    "watch_ranks",
]
