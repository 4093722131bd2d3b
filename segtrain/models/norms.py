"""The norm layers that a config names."""

from functools import partial

from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.config import NormConfig
from segtrain.norm import NUM_GROUPS, FrozenBatchNorm2d, NormFactory, SyncBatchNorm2d, group_norm

_WORDS = {
    "pooled": "of all of them together",
    "mean": "the mean over the groups",
    "first": "of the first group",
    "sequential": "of one group after the other",
}


def make_norm(config: NormConfig) -> NormFactory:
    """The layers that `config` asks for; with `images` see `placed` and `sync_running_stats`."""
    if config.kind == "group":
        return group_norm
    options = {"momentum": config.momentum}
    if config.kind == "frozen":
        return partial(FrozenBatchNorm2d, **options)
    if config.images != "all":
        # Left out otherwise: the defaults of the layer are statistics of all images.
        options |= {"images": config.images, "running": config.running}
    return partial(SyncBatchNorm2d, **options)


def make_inference_norm(config: NormConfig) -> NormFactory:
    """torch's own layers with the same keys and the same results in evaluation mode."""
    if config.kind == "group":
        return make_norm(config)
    return nn.BatchNorm2d


def describe_norm(config: NormConfig) -> str:
    """`config` in words: whose statistics are used in training, and which in evaluation."""
    if config.kind == "group":
        return f"group norm, at most {NUM_GROUPS} groups"
    if config.kind == "frozen":
        return "frozen batch norm, statistics of the initial weights"
    words = "synchronized batch norm"
    if config.images != "all":
        words = f"batch norm over groups of {config.images} images, running statistics "
        words += _WORDS[config.running]
    if config.precise_batches is not None:
        words += f", precise over {config.precise_batches} batches"
    return words


def kept_norms(backbone: nn.Module) -> str:
    """What to say of the norms that a network of another library keeps; nothing without any."""
    leaves = [one for one in backbone.modules() if "norm" in type(one).__name__.lower()]
    leaves = [one for one in leaves if not any(one.children())]
    own = [one for one in leaves if isinstance(one, _BatchNorm | type(group_norm(1)))]
    kept = ", ".join(sorted({type(one).__name__ for one in leaves if one not in own}))
    if not kept:
        return ""
    return f"; the backbone has {kept} {'too' if own else 'instead'}, of each image alone"
