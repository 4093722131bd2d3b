"""The model with its loss as one module, compiled if asked, and equal on all ranks at the start."""

from itertools import zip_longest

import torch
from torch import Tensor, nn

from segtrain.config import TrainConfig
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.models.precision import autocast, autocast_dtype
from segtrain.training.losses import SegLoss
from segtrain.types import DropoutMasks


class ModelWithLoss(nn.Module):
    """A model and its loss: a rank's part of a batch in, its sums of the loss out.

    Compiling both together lets torch fuse them and skip the logits at full size.
    """

    def __init__(self, model: nn.Module, criterion: SegLoss, train: TrainConfig) -> None:
        super().__init__()
        self.model = model
        self.criterion = criterion
        self.autocast_dtype = autocast_dtype(train)

    def forward(
        self,
        images: Tensor,
        labels: Tensor,
        dropout: DropoutMasks,
        partner_labels: Tensor | None = None,
    ) -> Tensor:
        """The sums for normalized images (N, 3, H, W) and int64 labels (N, H, W) (collective).

        partner_labels: with MixUp, labels of the same kind; then the sums of both, (2, heads, ...).
        """
        with autocast(self.autocast_dtype, images.device):
            logits = self.model(images, dropout)
        sums = self.criterion(logits, labels)
        if partner_labels is None:
            return sums
        return torch.stack([sums, self.criterion(logits, partner_labels)])


def wrap(model: nn.Module, criterion: SegLoss, train: TrainConfig) -> nn.Module:
    """`model` with `criterion` as one module, compiled if `train` says so.

    The parameters stay those of `model`: checkpoints, averages and evaluation use it alone.
    """
    module = ModelWithLoss(model, criterion, train)
    if not train.compile:
        return module
    # Only the passes of a step differ in size, and a graph with open sizes is slower.
    return torch.compile(module, fullgraph=True, dynamic=False)


def share_weights(model: nn.Module) -> None:
    """Gives all ranks the weights and statistics of rank 0 (collective).

    A machine with another file or version of torch may have drawn or loaded other values.

    Raises:
        ConfigError: the ranks have different models.
    """
    state = model.state_dict()
    layout = [f"{name} {tuple(t.shape)} {t.dtype}" for name, t in state.items()]
    first, *others = dist.all_gather_object(layout)
    for rank, other in enumerate(others, start=1):
        for expected, found in zip_longest(first, other, fillvalue="nothing"):
            if found != expected:
                raise ConfigError(
                    f"the ranks have different models: {expected} on rank 0, {found} on rank "
                    f"{rank}; start all ranks with the same config and version of segtrain"
                )
    dist.broadcast_from_rank0(state.values())
