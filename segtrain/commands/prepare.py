"""What `segtrain eval` and `segtrain predict` do with a loaded model before they use it."""

from collections.abc import Sequence

import torch
from torch import nn

from segtrain.config import Config
from segtrain.errors import ConfigError
from segtrain.models.precision import for_evaluation, precision_warnings


def check_precision(overrides: Sequence[str], config: Config) -> None:
    """Refuses a train.precision of the command line that eval.precision takes the place of.

    overrides: `section.key=value`, which `config` has already taken in.
    """
    given = [text for text in overrides if text.partition("=")[0].strip() == "train.precision"]
    if given and config.eval.precision is not None:
        raise ConfigError(
            f"--set {given[-1].strip()}: no effect with eval.precision {config.eval.precision}; "
            "set eval.precision instead, or to null"
        )


def precision_lines(config: Config, device: torch.device) -> list[str]:
    """Warnings about a precision that `device` does not have."""
    key = "train.precision" if config.eval.precision is None else "eval.precision"
    return precision_warnings(for_evaluation(config), device, key=key)


def prepare(model: nn.Module, config: Config, device: torch.device) -> nn.Module:
    """`model`, in the precision and memory format of its evaluation; changed in place."""
    if for_evaluation(config).precision == "float64":
        model.double()
    if config.train.channels_last and device.type == "cuda":
        model.to(memory_format=torch.channels_last)
    return model
