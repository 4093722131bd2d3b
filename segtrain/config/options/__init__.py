"""The experiment: every option with its type, range, default and meaning.

The defaults are the common recipe of the field (PSPNet, arXiv:1612.01105, section 5); an experiment
file says only what differs. Nothing here imports torch: a wrong file is refused at once.
"""

from segtrain.config.options.data import AugmentConfig, DataConfig, ExtraTransform
from segtrain.config.options.experiment import SECTIONS, Config, config_schema
from segtrain.config.options.loss import LossConfig, LossTerm, takes_class_weights
from segtrain.config.options.model import ModelConfig, NormConfig
from segtrain.config.options.run import CheckpointConfig, EvalConfig, LogConfig
from segtrain.config.options.train import TrainConfig
from segtrain.config.options.update import LayerRule

__all__ = [
    "SECTIONS",
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
    "takes_class_weights",
]
