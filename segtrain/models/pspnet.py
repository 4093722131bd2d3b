"""PSPNet's head (arXiv:1612.01105): pyramid pooling and a 3x3 convolution."""

from collections.abc import Sequence

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.config import ModelConfig
from segtrain.models.blocks import (
    Classifier,
    ConvNormReLU,
    FeatureChannels,
    Features,
    Head,
    at_least_float32,
    concatenated,
    conv2d,
    is_channels_last,
    norm_relu_together,
)
from segtrain.models.forms import form_of
from segtrain.models.precision import without_autocast
from segtrain.models.resizing import resize
from segtrain.norm import NormFactory


class PyramidPooling(nn.Module):
    """The input beside its averages over grids of several sizes, each through a 1x1 convolution.

    Concatenated as [x, p1, p2, ...] (semseg, mmsegmentation). In segmentation_models.pytorch's form
    the branch of bin 1 has a bias instead of a norm, whose statistics would be of one value an
    image.
    """

    def __init__(self, model: ModelConfig, in_channels: int, *, norm: NormFactory) -> None:
        super().__init__()
        self.bins = model.ppm_bins
        self.align_corners = model.align_corners
        width = model.ppm_channels or in_channels // len(self.bins)
        self.out_channels = in_channels + width * len(self.bins)
        has_norm = [form_of(model).pyramid_global_norm or b > 1 for b in self.bins]
        self.convs = nn.ModuleList(
            conv2d(in_channels, width, 1, bias=not normed) for normed in has_norm
        )
        self.norms = nn.ModuleList(norm(width) if normed else nn.Identity() for normed in has_norm)

    def forward(self, x: Tensor) -> Tensor:
        """(N, in_channels, h, w) to (N, out_channels, h, w)."""
        pooled = adaptive_avg_pools(x, self.bins)
        convolved = [conv(y) for conv, y in zip(self.convs, pooled, strict=True)]
        pairs = list(zip(convolved, self.norms, strict=True))
        # Without the branch that has no norm the others still share one collective.
        normed = (pair for pair in pairs if not isinstance(pair[1], nn.Identity))
        together = iter(norm_relu_together(normed))
        activated = [F.relu(y) if isinstance(n, nn.Identity) else next(together) for y, n in pairs]
        size = x.shape[-2:]
        resized = [resize(y, size, align_corners=self.align_corners) for y in activated]
        return concatenated([x, *resized])


class PSPHead(Head):
    """Pyramid pooling, 3x3 convolution, norm, ReLU, dropout and 1x1 convolution.

    segmentation_models.pytorch has the kernels the other way round.
    """

    over = "out"

    def __init__(
        self, model: ModelConfig, channels: FeatureChannels, *, num_classes: int, norm: NormFactory
    ) -> None:
        super().__init__()
        form, width = form_of(model), model.head_channels or 512
        self.ppm = PyramidPooling(model, channels.out, norm=norm)
        self.conv = ConvNormReLU(self.ppm.out_channels, width, form.pyramid_join, norm=norm)
        kernel = form.pyramid_classifier
        self.classifier = Classifier(width, num_classes, dropout=model.dropout, kernel=kernel)

    def join(self, features: Features) -> Tensor:
        """At the size of `features.out`."""
        return self.ppm(features.out)


def adaptive_avg_pools(x: Tensor, bins: Sequence[int]) -> list[Tensor]:
    """F.adaptive_avg_pool2d(x, b) for every b in `bins`: a list of (N, C, b, b) in x's dtype.

    Two matrix products with 0/1 matrices, in float32 or wider: torch's own operator fixes the size
    of the first input in an exported graph. Cell i of b covers the pixels floor(i n / b) to
    ceil((i + 1) n / b) - 1, as in torch. The columns of all grids are summed in one product, so
    the input is read once; if it is channels-last the rows are, and so are the results.
    """
    rows = [_cells(x.shape[-2], b, x.device) for b in bins]  # (b, H) each
    columns = [_cells(x.shape[-1], b, x.device) for b in bins]  # (b, W) each
    # Half precision would round the sum of many pixels.
    with without_autocast(x.device):
        wide = at_least_float32(x)
        if is_channels_last(x):
            pixels = wide.permute(0, 2, 3, 1)  # (N, H, W, C)
            sums = torch.cat(rows).to(wide.dtype) @ pixels.flatten(2)  # (N, sum(bins), W * C)
            sums = sums.unflatten(2, pixels.shape[2:])  # (N, sum(bins), W, C)
            pooled = []
            for row, column, part in zip(rows, columns, sums.split(list(bins), dim=1), strict=True):
                area = row.sum(1, keepdim=True) * column.sum(1)  # (b, b)
                cells = (column.to(wide.dtype) @ part) / area.unsqueeze(2)  # (N, b, b, C)
                # A view that is channels-last, as the input is.
                pooled.append(cells.to(x.dtype).permute(0, 3, 1, 2))
            return pooled
        sums = wide @ torch.cat(columns).to(wide.dtype).mT  # (N, C, H, sum(bins))
        pooled = []
        for row, column, part in zip(rows, columns, sums.split(list(bins), dim=-1), strict=True):
            area = row.sum(1, keepdim=True) * column.sum(1)  # (b, b)
            pooled.append(((row.to(wide.dtype) @ part) / area).to(x.dtype))
    return pooled


def _cells(size: int, bins: int, device: torch.device) -> Tensor:
    """(bins, size) bool: the pixels of each cell along one axis."""
    pixel = torch.arange(size, device=device)
    cell = torch.arange(bins, device=device).unsqueeze(1)
    start = cell * size // bins
    # Rounded up: neighbouring cells may share a pixel.
    stop = ((cell + 1) * size + (bins - 1)) // bins
    return (pixel >= start) & (pixel < stop)
