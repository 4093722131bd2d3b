"""Pixels of 0..255 to the numbers that a network sees; done on the device."""

import torch
from torch import Tensor, nn

Color = tuple[float, float, float]


def normalize(
    images: Tensor, mean: Color, std: Color, *, dtype: torch.dtype = torch.float32
) -> Tensor:
    """`(images - mean) / std` by channel, (N, 3, H, W) in `dtype`.

    images: uint8, or float in units of 0..255 like `mean` and `std`.
    """
    # From a list on the CPU and then moved: the host does not wait for the device.
    mean_t = torch.tensor(mean, dtype=dtype).to(images.device, non_blocking=True).view(3, 1, 1)
    std_t = torch.tensor(std, dtype=dtype).to(images.device, non_blocking=True).view(3, 1, 1)
    # In place: an image of 12 million pixels takes 144 MB.
    return (images.to(dtype) - mean_t).div_(std_t)


class Normalize(nn.Module):
    """`normalize` as a module, for the training step and for export; in the dtype of its buffers.

    The buffers come from the config and are not part of the state dict.
    """

    mean: Tensor
    std: Tensor

    def __init__(self, mean: Color, std: Color) -> None:
        super().__init__()
        self.register_buffer("mean", torch.tensor(mean).view(3, 1, 1), persistent=False)
        self.register_buffer("std", torch.tensor(std).view(3, 1, 1), persistent=False)

    def forward(self, images: Tensor) -> Tensor:
        """(N, 3, H, W) uint8 or float in 0..255 -> the same shape, normalized."""
        return (images.to(self.mean.dtype) - self.mean) / self.std
