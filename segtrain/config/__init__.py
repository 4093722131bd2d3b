"""The experiment file: its options, how it is loaded, and what is said about mistakes in it."""

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
from segtrain.config.loading import config_to_yaml, load_config, override_config, parse_config
from segtrain.config.model import ModelConfig, NormConfig
from segtrain.config.optim import LayerRule, OptimConfig, ScheduleConfig
from segtrain.config.section import Section, option
from segtrain.config.train import TrainConfig

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
