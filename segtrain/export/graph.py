"""The module that is exported: images in, one tensor out, in evaluation mode."""

from typing import Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from segtrain.models.blocks import Color, Normalize

# Example images are a random picture of this size, stretched, and some noise.
_COARSE = (4, 6)


class Case(NamedTuple):
    """The size of one batch of images that a file is traced with or checked on."""

    batch: int
    height: int
    width: int


class ExportModel(nn.Module):
    """A segmentation model with normalization before it and argmax after it, as asked for.

    model: returns SegLogits; it is put into evaluation mode and float32.
    mean, std: as in the config, in units of 0..255.
    normalize: the input is RGB of 0..255 in this dtype, which the file normalizes; None: the input
        is float32 and normalized already.
    argmax: the result is train ids (N, H, W) uint8, not logits (N, K, H, W).
    """

    def __init__(
        self,
        model: nn.Module,
        mean: Color,
        std: Color,
        *,
        normalize: Literal["uint8", "float32"] | None = None,
        argmax: bool = False,
    ) -> None:
        super().__init__()
        self.model = model
        self.normalization = Normalize(mean, std)
        self.normalize = normalize
        self.argmax = argmax
        self.float().eval()

    def forward(self, images: Tensor) -> Tensor:
        """Logits (N, K, H, W) float32 or, with `argmax`, train ids (N, H, W) uint8."""
        logits = self.logits(images)
        return logits.argmax(dim=1).to(torch.uint8) if self.argmax else logits

    def logits(self, images: Tensor) -> Tensor:
        """Logits (N, K, H, W) float32 of images in the form that `forward` takes."""
        if self.normalize is not None:
            images = self.normalization(images)
        return self.model(images).out

    def example(self, case: Case) -> Tensor:
        """Images (N, 3, H, W) in the form that `forward` takes, the same on every call.

        Not noise alone: there all pooling windows have nearly the same mean, so a graph that pools
        over the wrong windows would pass.
        """
        rng = torch.Generator().manual_seed(sum(case))
        coarse = torch.rand(case.batch, 3, *_COARSE, generator=rng)
        smooth = functional.interpolate(coarse, size=case[1:], mode="bilinear", align_corners=True)
        noise = torch.rand(smooth.shape, generator=rng)
        images = (255 * (0.75 * smooth + 0.25 * noise)).to(torch.uint8)
        if self.normalize is None:
            return self.normalization(images)
        return images if self.normalize == "uint8" else images.float()

    def describe(self, *, fixed_size: tuple[int, int] | None, min_side_px: int) -> dict[str, str]:
        """Input and output in words, for the file's metadata."""
        normalized = "float32, (pixel - mean) / std by channel"
        value = f"{self.normalize}, 0..255" if self.normalize else normalized
        height, width = fixed_size or ("H", "W")
        least = f"; H and W at least {min_side_px} px" if min_side_px > 1 else ""
        result = f"logits (N, K, {height}, {width}) float32, K in the order of class_names"
        if self.argmax:
            result = f"labels (N, {height}, {width}) uint8, index into class_names"
        return {
            "min_side_px": str(min_side_px),
            "input": f"images (N, 3, {height}, {width}) RGB {value}{least}",
            "output": result,
        }
