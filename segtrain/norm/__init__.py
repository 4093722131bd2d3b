"""Batch norm whose result does not depend on the number of devices.

    from segtrain.norm import SyncBatchNorm2d, convert

functional.py is the arithmetic, with kernels.py on a CPU and cuda_kernels.py on CUDA; fused.py is
that of a layer with its activation and shortcut, by `segtrain.kernels`. sync.py are the modules,
together.py computes them with their neighbours. tracking.py and running.py move their running
statistics, group_sums.py says where to. groups.py tells which images share statistics, precise.py
takes them over many batches, kinds.py makes what a config names, uneven.py is for ranks with
different numbers of batches.
"""

from segtrain.norm.groups import most_images, placed
from segtrain.norm.kinds import (
    NUM_GROUPS,
    FrozenBatchNorm2d,
    NormFactory,
    convert,
    freeze_statistics,
    group_norm,
    is_batch_norm,
    keep_inside,
)
from segtrain.norm.precise import precise_statistics
from segtrain.norm.running import make_groups, sync_running_stats
from segtrain.norm.sync import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
)
from segtrain.norm.together import (
    norm_activation,
    norm_relu,
    norm_relu_conv,
    norm_relu_together,
    normalize_together,
)
from segtrain.norm.tracking import tracked_together, untracked
from segtrain.norm.uneven import until_all_end

__all__ = [
    "NUM_GROUPS",
    "FrozenBatchNorm2d",
    "NormFactory",
    "SyncBatchNorm",
    "SyncBatchNorm1d",
    "SyncBatchNorm2d",
    "SyncBatchNorm3d",
    "convert",
    "freeze_statistics",
    "group_norm",
    "is_batch_norm",
    "keep_inside",
    "make_groups",
    "most_images",
    "norm_activation",
    "norm_relu",
    "norm_relu_conv",
    "norm_relu_together",
    "normalize_together",
    "placed",
    "precise_statistics",
    "sync_running_stats",
    "tracked_together",
    "until_all_end",
    "untracked",
]
