"""Batch norm whose result does not depend on the number of devices.

    from segtrain.norm import SyncBatchNorm2d, convert

functional.py is the arithmetic, with kernels.py on a CPU and cuda_kernels.py on CUDA; sync.py are
the modules, partial.py shares statistics among some ranks, precise.py takes them over many batches,
kinds.py makes what a config names.
"""

from segtrain.norm.kinds import (
    FrozenBatchNorm2d,
    NormFactory,
    convert,
    describe_norm,
    freeze_statistics,
    make_inference_norm,
    make_norm,
)
from segtrain.norm.partial import PartialBatchNorm2d, sync_running_stats
from segtrain.norm.precise import precise_statistics
from segtrain.norm.sync import (
    SyncBatchNorm,
    SyncBatchNorm1d,
    SyncBatchNorm2d,
    SyncBatchNorm3d,
    make_groups,
    norm_relu_conv,
    normalize_together,
    tracked_together,
    until_all_end,
    untracked,
)

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
    "freeze_statistics",
    "make_groups",
    "make_inference_norm",
    "make_norm",
    "norm_relu_conv",
    "normalize_together",
    "precise_statistics",
    "sync_running_stats",
    "tracked_together",
    "until_all_end",
    "untracked",
]
