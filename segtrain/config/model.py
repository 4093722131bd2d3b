"""Options of the network and its normalization."""

import re
from collections.abc import Callable, Iterator
from typing import Annotated, Any, Literal, get_args

from pydantic import Field, WithJsonSchema, WrapValidator

from segtrain.config.plugin_names import PluginName, PluginOptions
from segtrain.config.section import (
    RESNETS,
    FractionBelow1,
    Positive,
    Positives,
    Section,
    option,
)

TIMM = "timm/"
"""How the names of timm's networks begin."""

_TIMM = TIMM + r"[a-z0-9_]+"


def _or_timm(value: Any, check: Callable[[Any], Any]) -> Any:
    """Takes names of timm's networks too; whether timm has one is known once it is imported."""
    if not isinstance(value, str) or not value.startswith(TIMM):
        return check(value)
    if not re.fullmatch(_TIMM, value):
        raise ValueError(
            f"expected timm/ and a name of timm's in a-z, 0-9 and _, without a tag, got {value!r}; "
            "tags go into model.pretrained"
        )
    return value


_OwnBackbone = Literal[*RESNETS, "mobilenet_v2", "mobilenet_v3_large"]
_SCHEMA = {"anyOf": [{"enum": [*get_args(_OwnBackbone)]}, {"pattern": f"^{_TIMM}$"}]}
Backbone = Annotated[
    _OwnBackbone, WrapValidator(_or_timm), WithJsonSchema(_SCHEMA), PluginName("backbone")
]
Arch = Annotated[Literal["pspnet", "deeplabv3", "deeplabv3plus"], PluginName("head")]


class ModelConfig(Section):
    """The network."""

    arch: Arch = option("pspnet", "pyramid pooling, ASPP, or ASPP with a decoder; or a plugin's")
    head_options: Annotated[Any, PluginOptions("head", "arch")] = option(
        None, "options of a plugin's arch", validate_default=True
    )
    backbone: Backbone = option(
        "resnet50",
        "feature extractor, as in torchvision; or timm/NAME: any timm network with features at "
        "strides 4 to 32 for images of any size, such as timm/convnext_tiny or timm/pvt_v2_b1 (pip "
        "install '.[timm]'); or a plugin's",
    )
    backbone_options: Annotated[Any, PluginOptions("backbone", "backbone")] = option(
        None, "options of a plugin's backbone", validate_default=True
    )
    pretrained: str | None = option(
        None,
        "torchvision weights by name (IMAGENET1K_V1, DEFAULT), for timm/NAME a tag of timm's "
        "(a1_in1k, DEFAULT); a file in torchvision's or timm's layout; or null: random weights",
    )
    num_stages: Literal[2, 3, 4] = option(
        4, "ResNet stages; 2 ends at stride 8, as segmentation_models.pytorch's PSPNet does"
    )
    output_stride: Literal[8, 16, 32] = option(8, "input pixels per feature pixel")
    variant: Literal["paper", "torchvision", "semseg", "mmseg", "smp", "vainf"] = option(
        "paper",
        "whose form the network has where publishers differ: how dilation begins, which kernels "
        "join the branches of the head, its last convolutions, whether features are stretched over "
        "images of any size (segtrain/models/forms.py); weights of a whole network need the form "
        "of their program",
    )
    stem: Literal["7x7", "64-64-128", "32-32-64", "32-32-64-avgpool"] = option(
        "7x7",
        "ResNet stem: torchvision's, semseg's or mmsegmentation's (ResNetV1c); with avgpool, "
        "shortcuts that halve the size take means of 2x2 pixels before a 1x1 convolution "
        "(ResNetV1d)",
    )
    multi_grid: Positives | None = option(
        None,
        "dilation multipliers of the last stage's blocks, such as [1, 2, 4]; with variant mmseg "
        "the dilations themselves",
    )
    align_corners: bool = option(False, "how logits are resized; semseg uses true")
    head_channels: Positive | None = option(
        None, "width of the head; null: 512 for PSPNet, 256 for DeepLab"
    )
    ppm_bins: Positives = option((1, 2, 3, 6), "pyramid pooling grid sizes")
    ppm_channels: Positive | None = option(
        None, "width of each grid's branch; null: the width of the features / number of grids"
    )
    aspp_rates: Positives | None = option(
        None, "ASPP dilations; null: [12, 24, 36] at stride 8, [6, 12, 18] at 16, [3, 6, 9] at 32"
    )
    separable: bool = option(False, "depthwise separable 3x3 convolutions in DeepLab's head")
    low_level_channels: Positive = option(
        48, "DeepLabV3+: width of the projected low-level features"
    )
    aux_head: bool = option(True, "auxiliary classifier, used in training only")
    aux_channels: Positive = option(256, "width of the auxiliary head")
    recompute: Literal["none", "norm", "blocks"] = option(
        "none",
        "memory for time, the result stays: norm: batch norm, ReLU and the convolution after them "
        "keep one tensor for the backward pass instead of two; blocks: residual blocks, heads and "
        "the loss keep their inputs alone, and the backward pass computes the rest again",
    )
    dropout: FractionBelow1 = option(0.1, "channel dropout before each classifier")

    def _mistakes(self) -> Iterator[str]:
        if self.backbone not in RESNETS:
            served = self.recompute == "blocks" and not self.backbone.startswith("timm/")
            yield from self._no_effect("recompute", served, f"backbone {self.backbone}")
            return
        # The first stage has stride 4, and each further one doubles it.
        reach = 2 ** (self.num_stages + 1)
        if self.output_stride > reach:
            yield f"output_stride: num_stages {self.num_stages} ends at stride {reach}"
        # As in `models.resnet.DEPTHS`, whose module imports torch.
        blocks = 2 if self.backbone == "resnet18" else 3
        if self.multi_grid is not None and len(self.multi_grid) != blocks:
            yield (
                f"multi_grid: expected {blocks} numbers, one for each block of the last stage of "
                f"backbone {self.backbone}, got {list(self.multi_grid)}"
            )

    @property
    def pools_globally(self) -> bool:
        """Whether a layer is normalized that has one value a channel for an image."""
        # Some of timm's networks do so in their attention.
        return self.arch != "pspnet" or 1 in self.ppm_bins or self.backbone.startswith("timm/")


class NormConfig(Section):
    """Normalization: whose pixels make the statistics, and which ones are kept for evaluation."""

    kind: Literal["sync", "frozen", "group"] = option(
        "sync",
        "sync: batch norm, synchronized exactly; frozen: the running statistics of the weights "
        "training starts from, as constants; group: GroupNorm of 32 groups, or as many as divide "
        "the width too, which knows no batch",
    )
    images: Literal["all"] | Positive = option(
        "all",
        "sync: how many images share statistics: all of a microbatch; or this many neighbours in "
        "it, on any number of ranks, as plain batch norm on devices with so many images each",
    )
    running: Literal["pooled", "mean", "first", "sequential"] = option(
        "pooled",
        "running statistics where not all images share theirs: mean and variance of all values "
        "together; the mean of the groups' means and variances; those of the first group; or one "
        "group after the other, as if each were a batch",
    )
    precise_batches: Positive | None = option(
        None,
        "before an evaluation, take the running statistics anew from this many "
        "training batches, with the weights standing still",
    )
    momentum: Annotated[float, Field(gt=0, le=1)] | None = option(
        0.1, "share of the new batch in the running statistics; null: cumulative average"
    )

    def _mistakes(self) -> Iterator[str]:
        yield from self._no_effect("running", self.images != "all", "images all")

    @property
    def is_batch_norm(self) -> bool:
        """Whether batches are normalized by their own statistics."""
        return self.kind == "sync"
