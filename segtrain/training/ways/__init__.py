"""How the processes of a run take its steps: a file for each value of `train.parallel`.

A way that is not chosen is not imported. One more is a file here and a value of the option.
"""

from collections.abc import Callable
from importlib import import_module
from typing import Any

from torch import nn

from segtrain.config import Config, TrainConfig
from segtrain.distributed.layout import processes_with_images
from segtrain.training.part import Part
from segtrain.training.state import TrainState
from segtrain.training.step import TrainStep
from segtrain.training.step_sync import StepSync

Requests = tuple[Callable[[], bool], Callable[[], bool]]
"""Whether this rank is asked to stop, and to save; each is asked often."""


class Way(Part):
    """One of them, on each rank.

    step_sync: what all ranks agree on. step: in the place of the usual step; None: that one.
    """

    step: TrainStep | None = None

    def __init__(self, step_sync: StepSync) -> None:
        self.step_sync = step_sync

    @classmethod
    def begin(cls, state: TrainState, config: Config, requests: Requests) -> "Way":
        """The way of this rank, before the first step (collective)."""
        raise NotImplementedError

    @staticmethod
    def config_of_update(config: Config, ranks: int) -> Config:
        """The experiment as one update sees it, with its part of the learning rate."""
        return config

    @staticmethod
    def prepare(model: nn.Module) -> None:
        """Makes a model ready that has its weights (collective); ConfigError: it does not fit."""

    @staticmethod
    def lines(train: TrainConfig, processes: int) -> list[str]:
        """What the log says of it."""
        return []

    def have_met(self, step: int, *, due: bool, is_last: bool) -> bool:
        """After a step: whether all ranks have done the same steps and do something else now.

        Until `go_on` none of them begins another. A way may bring this rank to another step first.
        due: the config asks for it. is_last: the run ends here.
        """
        raise NotImplementedError

    def go_on(self, run: Any) -> None:
        """Steps begin, or go on after all have met (collective)."""


def way_of(train: TrainConfig) -> type[Way]:
    """That of a config."""
    return import_module(f"{__name__}.{train.parallel}_way").WAY


def by_process(config: Config, ranks: int) -> Config:
    """`Way.config_of_update` where each process's part of a batch is an update.

    There are so many times the updates, each with the mean gradient of so many times fewer images.
    """
    processes = processes_with_images(config.train, ranks)
    optim = config.optim.model_copy(update={"lr": config.optim.lr / processes})
    min_lr = config.schedule.min_lr / processes
    schedule = config.schedule.model_copy(update={"min_lr": min_lr})
    return config.model_copy(update={"optim": optim, "schedule": schedule})
