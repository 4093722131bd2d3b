"""The plain training loop of torchvision's segmentation reference, on a model of segtrain.

As references/segmentation/train.py there: cross entropy of both heads, the auxiliary one with
weight 0.5; SGD; blocking copies of float32 images; cudnn.benchmark; the loss read in every step;
with `--amp` autocast to float16 and a loss scale. Its data loading is left out, as segtrain's is.
"""

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.config import Config
from segtrain.models import build_model
from segtrain.types import IGNORE_INDEX, DropoutMasks

_AUX_WEIGHT = 0.5


class ReferenceLoop:
    """A training, a step at each call, which returns the loss.

    images: (N, 3, H, W) uint8, on the host. labels: (N, H, W) uint8.
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        images: Tensor,
        labels: Tensor,
        *,
        num_classes: int,
        amp: bool,
    ) -> None:
        torch.manual_seed(0)
        model = build_model(config.model, num_classes=num_classes, norm=nn.BatchNorm2d)
        self.model, self.device = model.to(device).train(), device
        train = config.train
        self.optimizer = torch.optim.SGD(
            model.parameters(), train.lr, momentum=train.momentum, weight_decay=train.weight_decay
        )
        self.schedule = torch.optim.lr_scheduler.PolynomialLR(
            self.optimizer, total_iters=train.steps, power=0.9
        )
        self.scaler = torch.amp.GradScaler(device.type) if amp else None
        self._dropout = config.model.dropout
        mean, std = (
            torch.tensor(values).view(3, 1, 1) for values in (config.data.mean, config.data.std)
        )
        # Its transforms normalize in the loader, one image after the other: contiguous.
        self.images = ((images.float() - mean) / std).contiguous()
        self.labels = labels.long()

    def __call__(self) -> float:
        """One step."""
        cudnn, before = torch.backends.cudnn, torch.backends.cudnn.benchmark
        cudnn.benchmark = True
        try:
            return self._step()
        finally:
            cudnn.benchmark = before

    def _step(self) -> float:
        image, target = self.images.to(self.device), self.labels.to(self.device)
        with torch.autocast(self.device.type, torch.float16, enabled=self.scaler is not None):
            logits = self.model(image, self._masks(len(image)))
            loss = self._cross_entropy(logits.out, target)
            if logits.aux is not None:
                loss = loss + _AUX_WEIGHT * self._cross_entropy(logits.aux, target)
        self.optimizer.zero_grad()
        if self.scaler is None:
            loss.backward()
            self.optimizer.step()
        else:
            self.scaler.scale(loss).backward()
            self.scaler.step(self.optimizer)
            self.scaler.update()
        self.schedule.step()
        return loss.item()

    @staticmethod
    def _cross_entropy(logits: Tensor, target: Tensor) -> Tensor:
        return F.cross_entropy(logits, target, ignore_index=IGNORE_INDEX)

    def _masks(self, num_images: int) -> DropoutMasks:
        """What nn.Dropout2d would draw: segtrain's models take their masks as inputs."""
        masks: list[Tensor | None] = []
        for channels in self.model.dropout_channels:
            mask = None
            if channels is not None:
                ones = torch.ones(num_images, channels, 1, 1, device=self.device)
                mask = F.dropout(ones, self._dropout)
            masks.append(mask)
        return DropoutMasks(*masks)
