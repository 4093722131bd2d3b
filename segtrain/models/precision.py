"""`train.precision`, `eval.precision`: the type of weights, and mixed precision by autocast."""

import time
from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext

import torch
from torch import nn

from segtrain.config import Config, TrainConfig
from segtrain.config.loading import given_key
from segtrain.errors import ConfigError

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


def precision_warnings(train: TrainConfig, device: torch.device) -> list[str]:
    """A line if the precision costs time on `device`."""
    if train.precision == "float32" and has_tf32(device):
        # PSPNet-R50, 8 x 512x1024: a step of 637 and 141 ms on an H100.
        return [
            "train.precision: float32 takes this device up to 4.5 times as long as tf32, which "
            "torch itself takes in convolutions"
        ]
    lower = autocast_dtype(train)
    if lower is None or device.type != "cpu":
        return []
    if _convolution_s(lower) < _WORTH_A_WARNING * _convolution_s(torch.float32):
        return []
    return [
        f"{train.precision} takes this processor, which has no instructions for it, many times as "
        "long as float32"
    ]


def evaluation_warnings(config: Config, device: torch.device) -> list[str]:
    """As `precision_warnings`, where a trained model is evaluated or predicts."""
    lines = precision_warnings(for_evaluation(config), device) if device.type == "cpu" else []
    return [f"{line}; --set eval.precision=tf32 computes in float32 here" for line in lines]


# Where processors have the instructions, the lower precision is about as fast or faster.
_WORTH_A_WARNING = 4


def _convolution_s(dtype: torch.dtype) -> float:
    """The seconds of a small convolution on the CPU, the fastest of three."""
    images, kernel = torch.zeros(1, 64, 32, 32, dtype=dtype), torch.zeros(64, 64, 3, 3, dtype=dtype)
    seconds = []
    with torch.inference_mode():
        for _ in range(3):
            began = time.perf_counter()
            torch.conv2d(images, kernel, padding=1)
            seconds.append(time.perf_counter() - began)
    return min(seconds)


def check_eval_precision(overrides: Sequence[str], config: Config) -> None:
    """Refuses a train.precision of the command line that eval.precision takes the place of.

    overrides: `section.key=value`, which `config` has already taken in.
    """
    given = [text for text in overrides if given_key(text) == "train.precision"]
    if given and config.eval.precision is not None:
        raise ConfigError(
            f"--set {given[-1].strip()}: no effect with eval.precision {config.eval.precision}; "
            "set eval.precision instead, or to null"
        )


def to_eval_precision(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """`model`, in the precision and memory format of its evaluation; changed in place."""
    if for_evaluation(config).precision == "float64":
        model.double()
    if device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    return model


def without_autocast(device: torch.device) -> AbstractContextManager[object]:
    """Switches mixed precision off."""
    # Where it is off already, switching it off would only add a node to exported graphs.
    if not torch.is_autocast_enabled(device.type):
        return nullcontext()
    return torch.autocast(device.type, enabled=False)
