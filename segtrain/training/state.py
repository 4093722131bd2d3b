"""Everything that training changes, and how it is made from a config."""

from collections.abc import Collection
from dataclasses import dataclass

import torch
from torch import nn

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed.shares import Shares
from segtrain.models.normalize import Normalize
from segtrain.models.precision import dtype_of
from segtrain.norm import make_groups
from segtrain.training import sam
from segtrain.training.arithmetic import fingerprint
from segtrain.training.exact_sum import ExactGradientSum, replica
from segtrain.training.gradients import GradientSum
from segtrain.training.losses import SegLoss
from segtrain.training.optim import (
    Start,
    WeightAverage,
    build_optimizer,
    freeze_layers,
    make_start,
)
from segtrain.training.share_rules import refuse_layers
from segtrain.training.wrap import share_weights, wrap


@dataclass
class TrainState:
    """Everything that an update changes: the contents of a checkpoint."""

    model: nn.Module
    normalize: nn.Module
    memory_format: torch.memory_format  # of images in the model
    criterion: SegLoss
    wrapped: nn.Module  # both as one module, compiled if the config says so
    shares: Shares | None  # train.shares
    arithmetic: str | None  # `arithmetic.fingerprint` of this rank, with shares
    replicas: list[nn.Module]  # of `wrapped`, one for each share of this rank
    gradients: GradientSum | ExactGradientSum
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: WeightAverage | None
    start: Start  # what updates need of the weights that training started from
    step: int = 0  # updates done

    @property
    def eval_model(self) -> nn.Module:
        """The model to evaluate and deploy: the average of the weights where one is kept."""
        return self.model if self.average is None else self.average.model


def make_state(
    model: nn.Module,
    config: Config,
    device: torch.device,
    *,
    loaded: Collection[str] | None = None,
    resumed: bool = False,
) -> TrainState:
    """The state before the first step, with `model` moved to `device` (collective).

    loaded: the names of the weights that come from a file; None: all. The others are new layers.
    resumed: a checkpoint is going to be restored, with what depends on the weights at the start.

    Raises:
        ConfigError: train.layers or train.hold_mask do not fit the model.
    """
    train = config.train
    freeze_layers(model, train, None if resumed else loaded)
    # Also where channels_last is off: the loader's images have that layout, and convolutions would
    # follow it.
    layout = torch.channels_last if train.channels_last else torch.contiguous_format
    model.to(device, dtype_of(train))
    if train.channels_last:
        model.to(memory_format=layout)
    share_weights(model)
    make_groups(model)
    start = make_start(model, train, loaded, resumed=resumed)
    if train.sam_rho is not None:
        sam.refuse_layers(model)
    normalize = Normalize(config.data.mean, config.data.std).to(device, dtype_of(train))
    sizes = {"passes": train.accumulate_steps, "batch_size": train.batch_size}
    criterion = SegLoss(config.loss, device, **sizes)
    wrapped = wrap(model, criterion, train)
    # Virtual ranks have a backward pass each, so their gradients wait for the end.
    summed = [] if train.parallel == "hogwild" else model.named_parameters()
    gradients = GradientSum(summed, overlap=train.virtual_ranks == 1)
    shares, replicas, digits = None, [], None
    if train.shares is not None:
        refuse_layers(model)
        shares = Shares.of_this_rank(train.shares, device)
        digits = fingerprint(device, train)
        replicas = [replica(wrapped).train() for _ in range(shares.counts[dist.rank()])]
        gradients = ExactGradientSum(
            model,
            replicas,
            shares=shares.counts,
            passes=train.accumulate_steps,
            num_threads=shares.at_once,
        )
    scaler = torch.amp.GradScaler(device.type, enabled=train.precision == "float16")
    scaler.scale(torch.zeros((), device=device))  # makes its tensors; shares would do it at once
    return TrainState(
        model=model,
        normalize=normalize,
        memory_format=layout,
        criterion=criterion,
        wrapped=wrapped,
        shares=shares,
        arithmetic=digits,
        replicas=replicas,
        gradients=gradients,
        optimizer=build_optimizer(model, train, start=start, loaded=loaded),
        scaler=scaler,
        average=WeightAverage(model, train.ema_decay) if train.ema_decay else None,
        start=start,
    )
