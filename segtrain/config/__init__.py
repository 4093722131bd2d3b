"""The experiment file: its options, how it is loaded, and what is said about mistakes in it."""

from segtrain.config.loading import (
    config_to_yaml,
    load_config,
    override_config,
    parse_config,
)
from segtrain.config.options import (
    AugmentConfig,
    CheckpointConfig,
    Config,
    DataConfig,
    EvalConfig,
    ExtraTransform,
    LayerRule,
    LogConfig,
    LossConfig,
    LossTerm,
    ModelConfig,
    NormConfig,
    TrainConfig,
    config_schema,
)

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
    "TrainConfig",
    "config_schema",
    "config_to_yaml",
    "load_config",
    "override_config",
    "parse_config",
]
