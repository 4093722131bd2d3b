"""torchvision's MobileNetV2 and MobileNetV3-Large without their classifiers, dilated."""

import torch
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models.blocks import (
    FeatureChannels,
    Features,
    feature_strides,
    initialize,
    plan_stages,
    recomputed,
)
from segtrain.models.forms import form_of
from segtrain.norm import NormFactory, norm_activation

# V3's pretrained weights belong to this eps (torchvision, mobilenetv3.py): under 1e-5, channels of
# tiny variance come out several times too large.
_V3_EPS = 1e-3
_LOW = 3  # the last layer of stride 4


class MobileNet(nn.Module):
    """The convolutional part of the MobileNet that `model` describes: images to `Features`.

    The norm layers of V3 get eps 1e-3, whatever `norm` chooses. V2 is, as in VainF and
    mmsegmentation, without features.18: it widens to 1280 channels for the classifier of ImageNet.
    """

    classifier_keys: tuple[str, ...] = ("classifier.", "features.18.")
    stem_keys: tuple[str, ...] = ()

    def __init__(self, model: ModelConfig, *, norm: NormFactory = nn.BatchNorm2d) -> None:
        super().__init__()
        self.name = name = model.backbone
        self._blocks_again = model.recompute == "blocks"
        form = form_of(model)
        # The positions of the last layer, and of that before the stage that brings stride 32.
        is_v3 = name == "mobilenet_v3_large"
        num_layers, self._aux = (17, form.mobilenet_v3_aux) if is_v3 else (18, 13)
        self.features = _torchvision_features(name, norm)[:num_layers]
        places = (_LOW, self._aux, num_layers - 1)
        self.channels = FeatureChannels(*(self.features[i].out_channels for i in places))
        self.strides = feature_strides(model)
        for module in list(self.modules()):
            if isinstance(module, nn.ReLU6 | nn.Hardswish):
                # Their gradient needs the input: in place, torch would copy it first.
                module.inplace = False
            for key, child in module.named_children():
                if isinstance(child, nn.Sequential) and isinstance(child[-1], nn.ReLU | nn.ReLU6):
                    setattr(module, key, _ConvNormActivation(*child))
        convs = [module for module in self.modules() if isinstance(module, nn.Conv2d)]
        for conv in convs:
            conv.reset_parameters()  # with it the random numbers are those of `conv2d`
            initialize(conv)
        depthwise = [conv for conv in convs if conv.groups > 1]  # one in each block
        strides = [conv.stride[0] for conv in depthwise]
        options = {"stem_stride": 2, "contract": form.mobilenet_contract}
        plans = plan_stages(strides, model.output_stride, **options)
        for conv, plan in zip(depthwise, plans, strict=True):
            reach = conv.kernel_size[0] // 2
            conv.stride, conv.dilation = (plan.stride,) * 2, (plan.first_dilation,) * 2
            conv.padding = (plan.first_dilation * reach,) * 2

    def forward(self, images: Tensor) -> Features:
        """Features of normalized images (N, 3, H, W)."""
        x = low = aux = images
        for i, layer in enumerate(self.features):
            x = recomputed(layer, x) if self.training and self._blocks_again else layer(x)
            if i == _LOW:
                low = x
            if i == self._aux:
                aux = x
        return Features(low, aux, x)


class _ConvNormActivation(nn.Sequential):
    """torchvision's Conv2dNormActivation, with the same keys; see `norm_activation`."""

    def forward(self, x: Tensor) -> Tensor:
        conv, norm, activation = self
        return norm_activation(conv(x), norm, activation)


def _torchvision_features(name: str, norm: NormFactory) -> nn.Sequential:
    from torchvision.models import get_model  # slow to import, and only needed here

    def make(channels: int) -> nn.Module:
        layer = norm(channels)
        if name == "mobilenet_v3_large":
            layer.eps = _V3_EPS
        return layer

    # The weights are drawn again: what torchvision draws must not move the generator.
    with torch.random.fork_rng(devices=[]):
        return get_model(name, num_classes=1, norm_layer=make).features
