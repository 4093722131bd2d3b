"""What moves the weights.

schedule.py says how fast, layers.py what each weight is subject to (rate, decay, frozen or not),
optimizer.py makes the optimizer and averages weights, initial_weights.py keeps what an update needs
of the weights that training started from.
"""

from segtrain.training.optim.initial_weights import InitialWeights, make_initial_weights
from segtrain.training.optim.layers import freeze_layers, parameter_groups
from segtrain.training.optim.optimizer import (
    WeightAverage,
    build_optimizer,
    set_learning_rate,
)
from segtrain.training.optim.schedule import base_lr, learning_rate, one_cycle, poly

__all__ = [
    "InitialWeights",
    "WeightAverage",
    "base_lr",
    "build_optimizer",
    "freeze_layers",
    "learning_rate",
    "make_initial_weights",
    "one_cycle",
    "parameter_groups",
    "poly",
    "set_learning_rate",
]
