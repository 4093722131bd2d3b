"""The memory of training and of windows: refused where it cannot suffice, and named where it ends.

Before anything is allocated a lower bound is checked: images, the scores of every class at their
size, what the losses keep of these, weights, and the features that wait for the backward pass. What
kernels and losses need for a moment comes on top: `segtrain train --fit` measures it.
"""

import os
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress

import torch
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode

from segtrain.config import Config
from segtrain.config.model import TIMM
from segtrain.config.plugin_names import all_plugins
from segtrain.distributed import collectives as dist
from segtrain.distributed.machine import host_memory, process_memory, resident_bytes
from segtrain.errors import MemoryLimitError
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.models.precision import autocast, autocast_dtype, dtype_of

# Bytes a sample of an image as stored, at least, and normalized, in float32.
_STORED, _NORMALIZED = 1, 4
# Bytes a pixel of a label as stored and in int64.
_LABEL = 9
# Bytes a pixel and class: the scores of a head, in float32.
_SCORES = 4
# What every loss keeps of the scores of a head and one set of labels, at least: the probabilities
# or their logarithms, in float32.
_KEPT = 4
# Losses that kernels compute from the logits of a head (`enlarged`), on most CUDA devices.
_OF_SMALL_LOGITS = {"cross_entropy", "focal", "ohem"}
# More than a network keeps of a pixel (ResNet-101 in float64: 18 KB), and weights, their copies and
# the process.
_MOST_FEATURES, _MOST_WEIGHTS = 2**15, 2**32
_GIB = 2**30


def memory_bytes(device: torch.device) -> int:
    """The memory of `device`; for a CPU what the machine has or the container may use of it."""
    if device.type == "cuda":
        return torch.cuda.get_device_properties(device).total_memory
    return host_memory()


def rank_bytes(device: torch.device, ranks: int) -> int:
    """What each of `ranks` may take that share the memory of `device`."""
    limit = process_memory() if device.type == "cpu" else None
    shared = memory_bytes(device) // ranks
    return shared if limit is None else max(0, min(shared, limit))


def training_finding(
    config: Config, num_classes: int, images: int, device: torch.device, ranks: int
) -> str | None:
    """Why a training step cannot fit into the memory of `device`; None: it may.

    images: the most that a rank holds at a time.
    ranks: how many share the device's memory.
    """
    size = config.augment.crop_size
    needed = training_bytes(config, num_classes, images, device)
    what = f"augment.crop_size: {images} crops"
    repair = "use segtrain train --fit, smaller crops or a smaller train.batch_size"
    # Going through the network takes a second: not if it can change nothing.
    most = needed + images * size[0] * size[1] * _MOST_FEATURES + _MOST_WEIGHTS
    if needed <= rank_bytes(device, ranks) < most:
        needed += network_bytes(config, num_classes, images, device)
    return _finding(what, size, needed, device, ranks, repair)


def network_bytes(config: Config, num_classes: int, images: int, device: torch.device) -> int:
    """The least memory of weights, optimizer, and features that wait for the backward pass.

    The forward pass runs on tensors without content; what kernels need for themselves comes on top.
    On a CPU this process as it is counts too. 0 where less is kept (compiled, on the host, frozen
    layers), or where the network is tried on tensors of its own (timm, plugins).
    """
    train, optim = config.train, config.optim
    on_host = device.type == "cuda" and train.virtual_ranks > 1
    keeps_less = train.compile or on_host or any(rule.freeze for rule in optim.layers)
    is_timm = config.model.backbone.startswith(TIMM)
    if keeps_less or is_timm or all_plugins(config.model):
        return 0
    kept: dict[int, int] = {}

    def keep(tensor: Tensor) -> Tensor:
        storage = tensor.untyped_storage()
        kept[storage._cdata] = storage.nbytes()
        return tensor

    channels = config.data.channels
    norm = make_norm(config.norm.model_copy(update={"images": "all"}))
    shape = max(images, 2), channels, *config.augment.crop_size
    weights, own, described = 0, set(), config.model
    is_fused = described.recompute == "norm"
    if is_fused:  # its kernel looks at values; it keeps at least half
        described = described.model_copy(update={"recompute": "none"})
    # The weights of the run are drawn later, from the generator as it is now. A backbone of the
    # user's own may do what tensors without content cannot.
    with suppress(RuntimeError), torch.random.fork_rng(devices=[]), dist.alone(), FakeTensorMode():
        model = build_model(
            described, num_classes=num_classes, in_channels=channels, norm=norm
        ).train()
        crops = torch.empty(shape)
        weights = sum(p.nbytes for p in model.parameters())
        own = {t.untyped_storage()._cdata for t in (crops, *model.parameters(), *model.buffers())}
        counted = torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor)
        with counted, autocast(autocast_dtype(train), crops.device):
            # What is counted lives as long as the graph: no two have the same address.
            graph = model.small_logits(crops)
        del graph
    moments = {"sgd": bool(optim.momentum), "adamw": 2, "muon": 1}.get(optim.kind, 0)
    copies = 1 + moments + bool(optim.ema_decay)
    features = sum(size for storage, size in kept.items() if storage not in own)
    if is_fused:
        features //= 2
    elif device.type == "cuda":
        # Kernels of batch norm keep no output for the activation alone: of ResNets 1 to 11 % less
        # than what is counted, of MobileNetV2 31 %.
        features = features * 2 // 3
    numbers = (copies * weights + features * images // max(images, 2)) * dtype_of(train).itemsize
    process = resident_bytes(os.getpid()) if device.type == "cpu" else 0
    return process + numbers // torch.float32.itemsize


def training_bytes(config: Config, num_classes: int, images: int, device: torch.device) -> int:
    """The least memory that a step takes beside the network.

    images: crops that a rank holds at a time.
    """
    train = config.train
    height, width = config.augment.crop_size
    needed = images * (config.data.channels * (_STORED + _NORMALIZED) + _LABEL)
    by_kernels = device.type == "cuda" and {t.kind for t in config.loss.terms} <= _OF_SMALL_LOGITS
    if train.compile or by_kernels:  # such a loss may never store the scores
        return height * width * needed
    # Recomputed, the scores of one head are there at a time.
    heads = 2 if config.model.aux_head and config.model.recompute != "blocks" else 1
    # On CUDA, virtual ranks keep on the host what waits for the backward pass.
    waits_on_host = device.type == "cuda" and train.virtual_ranks > 1
    kept = _KEPT
    if not waits_on_host and config.model.recompute != "blocks":
        kept *= heads * len(config.loss.terms)
    return height * width * (needed + images * num_classes * (heads * _SCORES + kept))


def window_finding(
    config: Config, num_classes: int, device: torch.device, ranks: int
) -> str | None:
    """The same of an evaluation's sliding window; None also if it is not used."""
    if config.eval.mode != "slide":
        return None
    size = config.eval.crop_size or config.augment.crop_size
    together = config.eval.batch_size or 1
    needed = (
        together * size[0] * size[1] * (config.data.channels * _NORMALIZED + _SCORES * num_classes)
    )
    what, repair = "eval.crop_size: sliding windows", "use smaller windows"
    if together > 1:
        what, repair = f"eval.batch_size: {together} windows", f"{repair} or batches"
    return _finding(what, size, needed, device, ranks, repair)


def check_windows(config: Config, num_classes: int, device: torch.device, ranks: int = 1) -> None:
    """Raises MemoryLimitError with what `window_finding` finds, for the ranks of this machine."""
    sharing = ranks if device.type == "cpu" else 1
    if finding := window_finding(config, num_classes, device, sharing):
        raise MemoryLimitError(finding)


# torch has no class for these: of a CPU, C++, the CUDA driver, and cuBLAS or cuDNN; and all that
# oneDNN says, which says more where it cannot compute something.
_OUT_OF_MEMORY = ("can't allocate memory", "bad_alloc", "out of memory", "ALLOC_FAILED")
_OF_ONEDNN = ("could not create a primitive", "could not execute a primitive")


def is_out_of_memory(error: BaseException) -> bool:
    """Whether `error` says that an allocation failed."""
    return isinstance(error, torch.OutOfMemoryError | MemoryError) or (
        isinstance(error, RuntimeError)
        and (str(error) in _OF_ONEDNN or any(words in str(error) for words in _OUT_OF_MEMORY))
    )


@contextmanager
def memory_failures(message: Callable[[], str]) -> Iterator[None]:
    """Turns an allocation that fails inside into a MemoryLimitError with `message()`."""
    try:
        yield
    except (RuntimeError, MemoryError) as error:
        if not is_out_of_memory(error):
            raise
        raise MemoryLimitError(message()) from error


def training_failure(config: Config, device: torch.device) -> str:
    """What to say when training runs out of the memory of `device`."""
    train, (height, width) = config.train, config.augment.crop_size
    return (
        f"out of memory: {device} has {rank_bytes(device, 1) / _GIB:.1f} GiB, which do not hold a "
        f"step of train.batch_size {train.batch_size} with crops of {height}x{width} beside what "
        "else is there; segtrain train --fit looks for a way that fits and gives the same result; "
        "else use smaller crops, a smaller batch or more devices"
    )


def _finding(
    what: str,
    size: tuple[int, int],
    bytes_a_rank: int,
    device: torch.device,
    ranks: int,
    repair: str,
) -> str | None:
    there = rank_bytes(device, ranks)
    if bytes_a_rank <= there:
        return None
    each = f" on each of {ranks} ranks" if ranks > 1 else ""
    needed, there = ranks * bytes_a_rank / _GIB, ranks * there / _GIB
    return (
        f"{what} of {size[0]}x{size[1]}{each} take at least {needed:,.1f} GiB of memory, and "
        f"{device} has {there:,.1f} GiB; {repair}"
    )
