"""`train.precision`, `eval.precision`: the type of weights, and mixed precision by autocast."""

import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from segtrain.config import Config, TrainConfig

_AUTOCAST = {"bfloat16": torch.bfloat16, "float16": torch.float16}


def dtype_of(train: TrainConfig) -> torch.dtype:
    """The type of weights and images; mixed precision keeps them in float32."""
    return torch.float64 if train.precision == "float64" else torch.float32


def autocast_dtype(train: TrainConfig) -> torch.dtype | None:
    """The lower type of mixed precision; None without it."""
    return _AUTOCAST.get(train.precision)


def for_evaluation(config: Config) -> TrainConfig:
    """`config.train` with the precision of evaluations, for the functions of this module."""
    if config.eval.precision is None:
        return config.train
    return config.train.model_copy(update={"precision": config.eval.precision})


def autocast(dtype: torch.dtype | None, device: torch.device) -> AbstractContextManager[object]:
    """Mixed precision with `dtype` for a forward pass; without effect if it is None."""
    if dtype is None:
        return nullcontext()
    # A forward pass uses each weight once. torch's cache of converted weights belongs to all
    # threads of the process, and one of several shares would empty it for the others.
    return torch.autocast(device.type, dtype, cache_enabled=False)


def float32_products(train: TrainConfig) -> AbstractContextManager[None]:
    """Inside, products of float32 numbers on CUDA are as `train.precision` says: TF32 or exact."""
    return tf32_products(train.precision == "tf32")


@contextmanager
def tf32_products(is_tf32: bool) -> Iterator[None]:
    """Inside, products of float32 numbers on CUDA are TF32, or exact.

    By itself torch takes TF32 in convolutions and float32 in matrix products. The settings belong
    to the whole process; afterwards they are as before.
    """
    cudnn, matmul = torch.backends.cudnn, torch.backends.cuda.matmul
    # Not by the newer `fp32_precision`, after which torch itself fails where it reads these.
    before = cudnn.allow_tf32, matmul.allow_tf32
    cudnn.allow_tf32 = matmul.allow_tf32 = is_tf32
    try:
        yield
    finally:
        cudnn.allow_tf32, matmul.allow_tf32 = before


def has_tf32(device: torch.device) -> bool:
    """Whether products of float32 numbers on `device` can be TF32."""
    return device.type == "cuda" and torch.cuda.get_device_capability(device) >= (8, 0)


def precision_on(train: TrainConfig, device: torch.device) -> str:
    """The precision in which `device` computes: tf32 is float32 where it does not exist."""
    return "float32" if train.precision == "tf32" and not has_tf32(device) else train.precision


def precision_warnings(
    train: TrainConfig, device: torch.device, *, backward: bool = True
) -> list[str]:
    """A line if the precision costs time on `device`; `backward`: there are backward passes."""
    if train.precision == "float32" and has_tf32(device):
        # PSPNet-R50, 8 x 512x1024: a step of 637 and 141 ms on an H100.
        return [
            "train.precision: float32 takes this device up to 4.5 times as long as tf32, which "
            "torch itself takes in convolutions"
        ]
    lower = autocast_dtype(train)
    if lower is None or device.type != "cpu" or cpu_gain(lower, backward=backward) > _TOO_SLOW:
        return []
    return [f"{train.precision} takes this processor many times as long as float32"]


def evaluation_warnings(config: Config, device: torch.device) -> list[str]:
    """As `precision_warnings`, where a trained model is evaluated or predicts."""
    if device.type != "cpu":
        return []
    lines = precision_warnings(for_evaluation(config), device, backward=False)
    return [f"{line}; --set eval.precision=tf32 computes in float32 here" for line in lines]


def offers(train: TrainConfig, device: torch.device, model: nn.Module) -> list[str]:
    """A line for the log if bfloat16 is faster on `device`, a CPU, than what `train` has."""
    if device.type != "cpu" or train.precision not in ("float32", "tf32"):
        return []
    # Convolutions by channel are slower in it: DeepLabV3+ on MobileNetV2 takes 1.5 times as long.
    is_dense = all(getattr(layer, "groups", 1) == 1 for layer in model.modules())
    if not is_dense or (gain := cpu_gain()) < WORTH_AN_OFFER:
        return []
    return [f"precision  train.precision=bfloat16 would make convolutions {gain:.1f} times as fast"]


# With AMX it is 2.3 to 3.5, and a step is 1.7 to 2.6 times as fast.
WORTH_AN_OFFER = 1.5
# 0.7 without AMX, if there are other instructions for bfloat16; 0.3 or less without any.
_TOO_SLOW = 0.4


def cpu_gain(lower: torch.dtype = torch.bfloat16, *, backward: bool = True) -> float:
    """How many times as fast as in float32 this processor does a dense convolution in `lower`.

    backward: with its backward pass, which in float16 can be slow where the forward pass is not.
    """
    num_threads = torch.get_num_threads()
    # Where other programs run, several threads wait for each other longer than they compute.
    torch.set_num_threads(1)
    pairs: list[tuple[float, ...]] = []
    try:
        # In turns, and the least of each: the first calls also choose kernels.
        while len(pairs) < 5 and sum(map(sum, pairs)) < 0.2:
            pairs.append(tuple(_convolution_s(x, backward) for x in (torch.float32, lower)))
    finally:
        torch.set_num_threads(num_threads)
    exact, fast = map(min, zip(*pairs, strict=True))
    return exact / fast


def _convolution_s(dtype: torch.dtype, backward: bool) -> float:
    """The processor's seconds for a small convolution in this thread."""
    images = torch.zeros(1, 32, 32, 64, dtype=dtype).permute(0, 3, 1, 2)  # channels-last
    kernel = torch.zeros(64, 3, 3, 64, dtype=dtype).permute(0, 3, 1, 2)
    geometry = (1, 1), (1, 1), (1, 1), False, (0, 0), 1  # 3x3, padded to keep the size
    began = time.thread_time()
    result = torch.ops.aten.convolution(images, kernel, None, *geometry)
    if backward:
        wanted = True, True, False
        torch.ops.aten.convolution_backward(result, images, kernel, None, *geometry, wanted)
    return time.thread_time() - began


def to_eval_precision(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """`model`, in the precision of its evaluation; changed in place.

    Also in the memory format of the training, in which the same numbers come out in the same bits.
    """
    if for_evaluation(config).precision == "float64":
        model.double()
    return model.to(memory_format=torch.channels_last)


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switches mixed precision off."""
    # Where it is off already, switching it off would only add a node to exported graphs.
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
