"""Everything that training changes, and how it is made from a config."""

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.config import Config, TrainConfig
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout, split_of
from segtrain.errors import ConfigError
from segtrain.kernels import takes
from segtrain.models import SegModel
from segtrain.models.blocks import Normalize, recomputed
from segtrain.models.enlarged import Enlarged, enlarged
from segtrain.models.precision import autocast, autocast_dtype, dtype_of
from segtrain.norm import make_groups, placed
from segtrain.task.targets import targets_of
from segtrain.training.losses import SegLoss
from segtrain.training.optim.layers import InitialWeights, freeze_layers, make_initial_weights
from segtrain.training.optim.optimizer import WeightAverage, build_optimizer, may_be_captured
from segtrain.training.optim.saved import check_finite, optimizer_fields, restore_optimizer
from segtrain.training.rank_passes import RankPasses
from segtrain.types import DropoutMasks, SegLogits


def passes_of(train: TrainConfig) -> type[RankPasses]:
    """How a rank makes its passes with this config."""
    if train.shares is None:
        return RankPasses
    from segtrain.training.share_passes import SharePasses

    return SharePasses


class ModelWithLoss(nn.Module):
    """A model and its loss: a rank's part of a batch in, its sums of the loss out.

    Compiling both together lets torch fuse them and skip the logits at full size. The parameters
    stay those of `model`: checkpoints, averages and evaluation use it alone.

    recompute: `model` is a SegModel; the logits at full size, and what the loss keeps of them, are
        computed again in the backward pass.
    """

    def __init__(
        self, model: nn.Module, criterion: SegLoss, train: TrainConfig, *, recompute: bool = False
    ) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.autocast_dtype = autocast_dtype(train)
        self.recompute = recompute
        self._by_kernels = type(model) is SegModel and passes_of(train).by_kernels

    def forward(self, images: Tensor, labels: Tensor, dropout: DropoutMasks) -> Tensor:
        """The sums for normalized images (N, 3, H, W), (S, heads, ...) (collective).

        labels: (N, H, W) int64, or (N, K, H, W) uint8, as `SegLoss.labels` gives them.
        """
        if self.recompute:
            return self._recomputed(images, labels, dropout)
        with autocast(self.autocast_dtype, images.device):
            logits = self._logits(images, dropout)
        # Outside of autocast: losses choose their precision themselves.
        return self.criterion(logits, labels)

    def _recomputed(self, images: Tensor, labels: Tensor, dropout: DropoutMasks) -> Tensor:
        """As `forward`, with each head's logits at full size and its loss `recomputed`."""
        size = images.shape[-2:]
        with autocast(self.autocast_dtype, images.device):
            small = self.model.small_logits(images, dropout)

        def sums(logits: Tensor, head: nn.Module) -> Tensor:
            return self.criterion.sums(self._full_size(logits, size, head), labels)

        heads = zip(small, (self.model.head, self.model.aux_head), strict=True)
        return torch.stack([recomputed(sums, x, head) for x, head in heads if x is not None])

    def _logits(self, images: Tensor, dropout: DropoutMasks) -> SegLogits:
        """Those of the model, not made at full size where kernels do without."""
        model = self.model
        # Hooks run only where the model itself is called; `small_logits` passes them by.
        if not (self._by_kernels and takes(images)) or _has_hooks(model):
            return model(images, dropout)
        small, size = model.small_logits(images, dropout), images.shape[-2:]
        heads = zip(small, (model.head, model.aux_head), strict=True)
        return SegLogits(*(x if x is None else self._full_size(x, size, head) for x, head in heads))

    def _full_size(self, logits: Tensor, size: Sequence[int], head: nn.Module) -> Tensor | Enlarged:
        """The logits of a head at `size`, which are not made yet if kernels do without."""
        lazy = None
        if self._by_kernels:
            corners = {"align_corners": self.model.align_corners}
            lazy = enlarged(logits, size, head.stride, **corners)
        return self.model.full_size(logits, size, head) if lazy is None else lazy


def _has_hooks(model: nn.Module) -> bool:
    forward, backward = model._forward_hooks, model._backward_hooks
    return any([forward, backward, model._forward_pre_hooks, model._backward_pre_hooks])


def share_weights(model: nn.Module) -> None:
    """Gives all ranks the weights and statistics of rank 0 (collective).

    A machine with another file or version of torch may have drawn or loaded other values.

    Raises:
        ConfigError: the ranks have different models.
    """
    state = model.state_dict()
    layout = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in state.items()]
    # Before the broadcasts, which would not match with tensors of other sizes.
    if len({str(theirs) for theirs in dist.all_gather_object(layout)}) > 1:
        raise ConfigError(
            "the ranks have different models; start all ranks with the same config and version of "
            "segtrain"
        )
    dist.broadcast_from_rank0(state.values())


@dataclass
class TrainState:
    """Everything that an update changes: the contents of a checkpoint."""

    model: nn.Module
    normalize: nn.Module
    criterion: SegLoss
    wrapped: nn.Module  # both as one module, compiled if the config says so
    passes: RankPasses  # how this rank computes its images
    optimizer: torch.optim.Optimizer
    scaler: torch.amp.GradScaler
    average: WeightAverage | None
    initial_weights: InitialWeights  # what updates need of the weights that training started from
    layout: Layout  # which images of a step this rank computes, and which the others
    capturable: bool = False  # no number of an update changes from step to step
    step: int = 0  # updates done

    def fields(self) -> dict[str, Any]:
        """What a checkpoint keeps of it; holds references to the weights, not copies."""
        return {
            "step": self.step,
            "model": self.model.state_dict(),
            "average": None if self.average is None else self.average.model.state_dict(),
            "optimizer": optimizer_fields(self.optimizer),
            "scaler": self.scaler.state_dict(),
            "start": self.initial_weights.fields(),
            "shares": self.passes.fields(),
        }

    def restore(self, saved: Any) -> None:
        """Sets all of `fields`, which are attributes of `saved`, but for the weights.

        Raises:
            CheckpointError, LookupError, TypeError, ValueError, AttributeError, RuntimeError: they
                are of another model, or damaged.
        """
        check_finite(saved.optimizer["state"])
        restore_optimizer(self.optimizer, saved.optimizer)
        self.initial_weights.restore(self.model, saved.start)
        # The run may not have used float16 before; a new scaler finds its scale within some steps.
        if self.scaler.is_enabled() and saved.scaler:
            self.scaler.load_state_dict(saved.scaler)
        self.passes.restore(saved.shares)
        self.step = saved.step

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
    capturable: bool | None = None,
) -> TrainState:
    """The state before the first step, with `model` moved to `device` (collective).

    loaded: the names of the weights that come from a file; None: all. The others are new layers.
    resumed: a checkpoint is going to be restored, with what depends on the weights at the start.
    capturable: whether updates are made of tensors alone; None: where that serves (on CUDA).

    Raises:
        ConfigError: optim.layers or optim.new_weight_decay do not fit the model.
    """
    train, optim = config.train, config.optim
    # The order matters: replicas and optimizer refer to the tensors that the model has after it was
    # moved, and the weights at the start are those that all ranks have.
    freeze_layers(model, optim, None if resumed else loaded)
    model.to(device, dtype_of(train)).to(memory_format=torch.channels_last)
    share_weights(model)
    initial_weights = make_initial_weights(model, optim, loaded, resumed=resumed)
    data = config.data
    normalize = Normalize(data.mean, data.std, data.value_range, clip=data.clip)
    normalize.to(device, dtype_of(train))
    criterion = SegLoss(
        config.loss,
        device,
        microbatches=train.accumulate_steps,
        targets=targets_of(config.task),
    )
    again = config.model.recompute == "blocks"
    wrapped = ModelWithLoss(model, criterion, train, recompute=again)
    if train.compile:
        # Only the microbatches of a step differ in size, and a graph with open sizes is slower.
        wrapped = torch.compile(wrapped, fullgraph=True, dynamic=False)
    scaler = torch.amp.GradScaler(device.type, enabled=train.precision == "float16")
    scaler.scale(torch.zeros((), device=device))  # makes its tensors; shares would do it at once
    if capturable is None:
        capturable = may_be_captured(model, config, device)
    layout = Layout.of(train, split_of(train, dist.world_size()))
    # Now, not in the first forward pass: all ranks must make all groups, in the same order.
    with placed(layout.everywhere):
        make_groups(model)
    return TrainState(
        model=model,
        normalize=normalize,
        criterion=criterion,
        wrapped=wrapped,
        passes=passes_of(train)(model, wrapped, train, layout),
        optimizer=build_optimizer(model, config, start=initial_weights, capturable=capturable),
        capturable=capturable,
        scaler=scaler,
        average=WeightAverage(model, optim.ema_decay) if optim.ema_decay else None,
        initial_weights=initial_weights,
        layout=layout,
    )
