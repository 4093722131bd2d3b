"""Hogwild!: processes that change the same weights without waiting (arXiv:1106.5730).

The weights and the running statistics of the model lie in memory that all processes share. Each
computes the gradient of its own part of every batch and updates the weights at once, without a
lock. Updates overwrite each other, and a gradient belongs to weights that have changed since. So
nothing is promised of the result.
"""

from torch import nn

from segtrain.config import Config
from segtrain.distributed.shared_memory import shared_copies


def share_model(model: nn.Module) -> None:
    """Lets weights and statistics of `model` lie in memory that all ranks share (collective)."""
    parameters = list(model.parameters())
    buffers = [
        (layer, name) for layer in model.modules() for name, _ in layer.named_buffers(recurse=False)
    ]
    copies = iter(shared_copies([*parameters, *(getattr(*place) for place in buffers)]))
    for parameter in parameters:
        parameter.data = next(copies)
    for layer, name in buffers:
        setattr(layer, name, next(copies))


def config_of_process(config: Config, processes: int) -> Config:
    """The experiment as one of the processes trains it, with its part of the learning rate.

    Together they do `processes` times the updates, each with the mean gradient of so many times
    fewer images.
    """
    train = config.train
    lr = {"lr": train.lr / processes, "min_lr": train.min_lr / processes}
    return config.model_copy(update={"train": train.model_copy(update=lr)})
