"""The models: a backbone, a head and an auxiliary head; images in, `SegLogits` out.

    from segtrain.models import build_model

A model never loads weights by itself: pretrained.py fills a backbone, checkpoint.py everything.
"""

from typing import NamedTuple

from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models.backbone import build_backbone
from segtrain.models.blocks import AuxHead, Branches, at_least_float32, resize
from segtrain.models.deeplab import DeepLabV3Head, DeepLabV3PlusHead
from segtrain.models.pspnet import PSPHead
from segtrain.norm import NormFactory
from segtrain.types import DropoutMasks, SegLogits

__all__ = ["MODELS", "DropoutChannels", "SegModel", "build_model"]

MODELS = {"pspnet": PSPHead, "deeplabv3": DeepLabV3Head, "deeplabv3plus": DeepLabV3PlusHead}
"""The head of each architecture."""


class DropoutChannels(NamedTuple):
    """The C of each of the `DropoutMasks`; None where the model has no such dropout."""

    out: int | None
    aux: int | None


class SegModel(nn.Module):
    """A segmentation network.

    Attributes:
        backbone: the pretrained part; everything else counts as head.
        head, aux_head: `aux_head` runs in training only, and is None without one.
        dropout_p, dropout_channels: what a caller needs to draw the masks of `forward`.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: nn.Module,
        aux_head: nn.Module | None,
        *,
        dropout: float,
        align_corners: bool,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.aux_head = aux_head
        self.dropout_p = dropout
        self.align_corners = align_corners

    @property
    def dropout_channels(self) -> DropoutChannels:
        """The channels of the masks that `forward` takes."""
        if self.dropout_p == 0:
            return DropoutChannels(None, None)
        aux = None if self.aux_head is None else self.aux_head.classifier.in_channels
        return DropoutChannels(self.head.classifier.in_channels, aux)

    def forward(self, images: Tensor, dropout: DropoutMasks | None = None) -> SegLogits:
        """Logits of normalized images (N, 3, H, W), at their size, in float32 or wider.

        Args:
            dropout: multiplied before the classifiers in training, for a draw that does not depend
                on the rank; a mask that is None is drawn from torch's generator.
        """
        masks = DropoutMasks() if dropout is None else dropout
        size = images.shape[-2:]
        features = self.backbone(images, self._branches())
        out = self._full_size(self.head(features, masks.out), size)
        if not self.training or self.aux_head is None:
            return SegLogits(out)
        return SegLogits(out, self._full_size(self.aux_head(features, masks.aux), size))

    def _branches(self) -> Branches:
        aux = self.aux_head.conv if self.training and self.aux_head is not None else None
        return Branches(low=getattr(self.head, "low", None), aux=aux)

    def _full_size(self, logits: Tensor, size: tuple[int, int]) -> Tensor:
        # Interpolating in half precision would make ties of neighbouring classes.
        return resize(at_least_float32(logits), size, align_corners=self.align_corners)


def build_model(
    model: ModelConfig, *, num_classes: int, norm: NormFactory = nn.BatchNorm2d
) -> SegModel:
    """The network that `model` describes, with random weights from torch's generator.

    Args:
        norm: makes the norm layer for a number of channels, with momentum and eps of its choice
            (MobileNetV3 alone has an eps of its own). The state-dict keys are those of the layers
            it makes; batch norm of either kind has the same.
    """
    backbone = build_backbone(model, norm=norm)
    head = MODELS[model.arch](model, backbone.channels, num_classes=num_classes, norm=norm)
    aux_head = None
    if model.aux_head:
        aux_head = AuxHead(
            backbone.channels.aux,
            model.aux_channels,
            num_classes=num_classes,
            dropout=model.dropout,
            norm=norm,
        )
    return SegModel(
        backbone, head, aux_head, dropout=model.dropout, align_corners=model.align_corners
    )
