"""The experiment file: its options, how it is loaded, and what is said about mistakes in it.

What reads and writes YAML is imported on first use: who is given a Config needs none of it.
"""

from typing import TYPE_CHECKING, Any

from segtrain.config.data import AugmentConfig, DataConfig, ExtraTransform
from segtrain.config.experiment import (
    CheckpointConfig,
    Config,
    EvalConfig,
    LogConfig,
    LossConfig,
    LossTerm,
    config_schema,
)
from segtrain.config.model import ModelConfig, NormConfig
from segtrain.config.optim import LayerRule, OptimConfig, ScheduleConfig
from segtrain.config.section import Section, option
from segtrain.config.train import TrainConfig

if TYPE_CHECKING:
    from segtrain.config.loading import config_to_yaml, load_config, override_config, parse_config

__all__ = [
    "AugmentConfig",
    "CheckpointConfig",
    "Config",
    "DataConfig",
    "EvalConfig",
    "ExtraTransform",
    "LayerRule",
    "LogConfig",
    "LossConfig",
    "LossTerm",
    "ModelConfig",
    "NormConfig",
    "OptimConfig",
    "ScheduleConfig",
    "Section",
    "TrainConfig",
    "config_schema",
    "config_to_yaml",
    "load_config",
    "option",
    "override_config",
    "parse_config",
]


def __getattr__(name: str) -> Any:
    if name in ("config_to_yaml", "load_config", "override_config", "parse_config"):
        from segtrain.config import loading

        return getattr(loading, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
