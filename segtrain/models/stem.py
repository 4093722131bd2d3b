"""The first convolution of a backbone, for images that are not RGB.

Backbones are built for three channels. For others their first convolution gets other kernels, and
weights that were trained on RGB are widened by one rule, that of timm.
"""

import torch
from torch import Tensor, nn

from segtrain.errors import ConfigError

RGB_CHANNELS = 3


def first_convolution(backbone: nn.Module) -> tuple[str, nn.Conv2d]:
    """The convolution that takes the images, and its name in `backbone`."""
    return next((n, m) for n, m in backbone.named_modules() if isinstance(m, nn.Conv2d))


def set_channels(backbone: nn.Module, channels: int) -> None:
    """Makes `backbone` take images of so many channels; the new kernels are random.

    They come from torch's generator, and their variance is such that the variance of what they
    compute stays that of the kernels for RGB.

    Raises:
        ConfigError: its first convolution does not take RGB.
    """
    name, old = first_convolution(backbone)
    if old.in_channels != RGB_CHANNELS or old.groups != 1:
        raise ConfigError(
            f"data.channels: {channels} do not fit model.backbone, whose first convolution, "
            f"{name}, is not one of {RGB_CHANNELS} channels"
        )
    width, _, *kernel = old.weight.shape
    std = old.weight.detach().std() * (RGB_CHANNELS / channels) ** 0.5
    weight = torch.randn(width, channels, *kernel, device=old.weight.device)
    old.weight, old.in_channels = nn.Parameter(weight * std), channels


def widened(kernels: Tensor, channels: int) -> Tensor:
    """Kernels for so many channels, (K, channels, h, w), of those for RGB, (K, 3, h, w).

    As timm's `adapt_input_conv`: for one channel their sum, so grey images give what they gave as
    RGB; otherwise red, green and blue in turn, times 3 / channels.
    """
    if channels == 1:
        return kernels.sum(dim=1, keepdim=True)
    turns = -(-channels // RGB_CHANNELS)
    return kernels.repeat(1, turns, 1, 1)[:, :channels] * (RGB_CHANNELS / channels)
