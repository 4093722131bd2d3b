"""The models: a backbone, a head and an auxiliary head; images in, `SegLogits` out.

A backbone is a module that maps images (N, 3, H, W) to `Features` (`stem` adapts its first
convolution to other images) and has

    channels: FeatureChannels, the widths of the features
    strides: FeatureStrides of features that have ceil(size / stride) pixels a side; None, or no
        such attribute: they are stretched over the image
    name, classifier_keys, stem_keys: what pretrained.py needs to fill it

A head derives from `blocks.Head`. To add either: one file, one line in the table below, and the
name in config/model.py. No model loads weights by itself.
"""

from collections.abc import Callable, Sequence
from typing import NamedTuple

from torch import Tensor, nn

from segtrain import plugins
from segtrain.config import ModelConfig
from segtrain.config.model import TIMM
from segtrain.errors import ConfigError
from segtrain.models.blocks import (
    AuxHead,
    Features,
    Head,
    at_least_float32,
    recomputed,
    run_together,
)
from segtrain.models.forms import form_of
from segtrain.models.resizing import enlarge
from segtrain.models.stem import RGB_CHANNELS, set_channels
from segtrain.norm import NormFactory
from segtrain.types import Choices, DropoutMasks, Imported, SegLogits

__all__ = ["BACKBONES", "MODELS", "DropoutChannels", "SegModel", "build_backbone", "build_model"]

_RESNETS = "resnet18", "resnet34", "resnet50", "resnet101"
_MOBILENETS = "mobilenet_v2", "mobilenet_v3_large"
# What is not chosen is not imported.
BACKBONES: Choices[Callable[..., nn.Module]] = Choices(
    {
        **dict.fromkeys(_RESNETS, Imported("models.resnet:ResNet")),
        **dict.fromkeys(_MOBILENETS, Imported("models.mobilenet:MobileNet")),
    }
)
"""`model.backbone`: what is called with (model config, norm=factory). timm/NAME: `TimmBackbone`."""

MODELS: Choices[Callable[..., Head]] = Choices(
    {
        "pspnet": Imported("models.pspnet:PSPHead"),
        "deeplabv3": Imported("models.deeplab:DeepLabV3Head"),
        "deeplabv3plus": Imported("models.deeplab:DeepLabV3PlusHead"),
    }
)
"""`model.arch`: what is called with (model config, channels, num_classes=K, norm=factory)."""


class DropoutChannels(NamedTuple):
    """The C of each of the `DropoutMasks`; None where the model has no such dropout."""

    out: int | None = None
    aux: int | None = None


class SegModel(nn.Module):
    """A segmentation network; `aux_head` runs in training only.

    `dropout_p` and `dropout_channels` are what a caller needs to draw the masks of `forward`.

    recompute: in training, what the heads compute is `recomputed`, classifiers apart: without masks
        they draw random numbers.
    """

    def __init__(
        self,
        backbone: nn.Module,
        head: Head,
        aux_head: Head | None,
        *,
        dropout: float,
        align_corners: bool,
        recompute: bool = False,
    ) -> None:
        super().__init__()
        self.backbone = backbone
        self.head = head
        self.aux_head = aux_head
        self.dropout_p = dropout
        self.align_corners = align_corners
        self.recompute = recompute

    @property
    def dropout_channels(self) -> DropoutChannels:
        """The channels of the masks that `forward` takes."""
        if self.dropout_p == 0:
            return DropoutChannels()
        aux = None if self.aux_head is None else self.aux_head.classifier.in_channels
        return DropoutChannels(self.head.classifier.in_channels, aux)

    def forward(self, images: Tensor, dropout: DropoutMasks | None = None) -> SegLogits:
        """Logits of normalized images (N, C, H, W), at their size, in float32 or wider.

        dropout: masks for the classifiers in training, drawn by the caller so that they do not
            depend on the rank; a mask that is None is drawn from torch's generator.
        """
        size = images.shape[-2:]
        out, aux = self.small_logits(images, dropout)
        full_aux = None if aux is None else self.full_size(aux, size, self.aux_head)
        return SegLogits(self.full_size(out, size, self.head), full_aux)

    def small_logits(self, images: Tensor, dropout: DropoutMasks | None = None) -> SegLogits:
        """As `forward`, at the sizes and in the dtype of the heads."""
        masks = dropout or DropoutMasks()
        features = self.backbone(images)
        if not self.training:
            return SegLogits(self.head(features, masks.out))
        # The steps of `Head.forward`, so that both heads share a collective for their statistics.
        heads = [head for head in (self.head, self.aux_head) if head is not None]

        def convolved(*features: Tensor) -> list[Tensor]:
            joined = [head.join(Features(*features)) for head in heads]
            return run_together([head.conv for head in heads], joined)

        xs = recomputed(convolved, *features) if self.recompute else convolved(*features)
        # Masks come in the order of the heads.
        steps = zip(heads, xs, masks[: len(heads)], strict=True)
        return SegLogits(*(head.classifier(x, mask) for head, x, mask in steps))

    def full_size(self, logits: Tensor, size: Sequence[int], head: Head) -> Tensor:
        """The `small_logits` of `head`, (N, K, h, w), at `size` (H, W), in float32 or wider."""
        # Interpolating in half precision would make ties of neighbouring classes.
        wide = at_least_float32(logits)
        return enlarge(wide, size, head.stride, align_corners=self.align_corners)


def build_backbone(model: ModelConfig, *, norm: NormFactory = nn.BatchNorm2d) -> nn.Module:
    """The backbone that `model` names, with random weights from torch's generator."""
    if model.backbone.startswith(TIMM):
        from segtrain.models.timm_backbone import TimmBackbone

        return TimmBackbone(model, norm=norm)
    backbone = plugins.choose("backbone", model.backbone, BACKBONES)(model, norm=norm)
    if hasattr(backbone, "channels"):
        return backbone
    from segtrain.models.plain_backbone import PlainBackbone

    # A module that says nothing of its features returns them in a list.
    return PlainBackbone(backbone, model, norm=norm)


def build_model(
    model: ModelConfig,
    *,
    num_classes: int,
    in_channels: int = RGB_CHANNELS,
    norm: NormFactory = nn.BatchNorm2d,
) -> SegModel:
    """The network that `model` describes, with random weights from torch's generator.

    in_channels: of the images, `data.channels`.
    norm: makes the norm layer for a number of channels. Its layers are used as they are, except
        that MobileNets start with weight 1 and bias 0, and that MobileNetV3 sets their eps.
    """
    backbone = build_backbone(model, norm=norm)
    if in_channels != RGB_CHANNELS:
        # Before weights are loaded: `pretrained` fits kernels for RGB to the channels that it
        # meets.
        set_channels(backbone, in_channels)
    options = {"num_classes": num_classes, "norm": norm}
    head = plugins.choose("head", model.arch, MODELS)(model, backbone.channels, **options)
    if not isinstance(head, Head):
        what = f"expected a segtrain.models.blocks.Head, found {type(head).__name__}"
        raise ConfigError(f"model.arch: {model.arch}: {what}")
    aux_head = AuxHead(model, backbone.channels, **options) if model.aux_head else None
    # Unless features are stretched, each logit lies over whole pixels: `Head.stride` of them.
    if not (model.align_corners or form_of(model).stretch):
        for each_head in (head, aux_head) if model.aux_head else (head,):
            each_head.strides = getattr(backbone, "strides", None)
    return SegModel(
        backbone,
        head,
        aux_head,
        dropout=model.dropout,
        align_corners=model.align_corners,
        recompute=model.recompute == "blocks",
    )
