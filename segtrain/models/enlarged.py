"""Logits at the size of images that are made only for what needs them.

Those of 8 crops of 512x1024 with 19 classes are 319 MB in float32, and their gradient is as much
again. Cross entropy needs neither: a kernel computes it from the logits of the head.
"""

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any

from torch import Tensor

from segtrain.kernels import takes
from segtrain.models.blocks import at_least_float32
from segtrain.models.resizing import enlarge


@dataclass(frozen=True, eq=False)
class Enlarged:
    """`small`, (N, K, h, w), at `size`, (H, W); made by `enlarged`.

    stride, align_corners: as for `enlarge`. axes: what kernels know of them.
    """

    small: Tensor
    size: tuple[int, ...]
    stride: int | None
    align_corners: bool
    axes: Any

    @property
    def shape(self) -> tuple[int, ...]:
        """(N, K, H, W)."""
        return (*self.small.shape[:2], *self.size)

    @cached_property
    def full(self) -> Tensor:
        """The logits as `enlarge` makes them, (N, K, H, W) in float32 or wider."""
        wide = at_least_float32(self.small)
        return enlarge(wide, self.size, self.stride, align_corners=self.align_corners)

    def plus(self, offsets: Tensor) -> "Enlarged":
        """The same with `offsets`, (K, 1, 1), added at each pixel."""
        # The weights of an interpolation add up to 1.
        wide = at_least_float32(self.small)
        return replace(self, small=wide + offsets.to(wide.dtype))

    def cross_entropy(self, labels: Tensor) -> Tensor:
        """That of each pixel, (N, H, W) float32, 0 where it is ignored.

        labels: (N, H, W) uint8 or int64. Where one is no class and not ignored, the result is NaN.
        """
        from segtrain.kernels import small_logits

        return small_logits.losses(self.small, self._checked(labels), self.axes)

    def cross_entropy_sums(
        self, labels: Tensor, class_weights: Tensor | None, label_smoothing: float
    ) -> Tensor:
        """The weighted losses and the weights, (2, 1) float64, as in `losses.CrossEntropy`."""
        from segtrain.kernels import small_logits

        options = {"class_weights": class_weights, "label_smoothing": label_smoothing}
        return small_logits.sums(self.small, self._checked(labels), self.axes, **options)

    def labels(self) -> tuple[Tensor, Tensor]:
        """The most probable class of each pixel, (N, H, W) uint8, and its probability, float32.

        The probability is NaN where a logit beside the pixel is no finite number.
        """
        from segtrain.kernels import small_logits

        return small_logits.labels_of(self.small, self.size, self.axes)

    def _checked(self, labels: Tensor) -> Tensor:
        expected = (len(self.small), *self.size)
        if labels.shape != expected:
            raise ValueError(f"labels of {tuple(labels.shape)}: expected {expected}")
        return labels


def enlarged(
    small: Tensor, size: Sequence[int], stride: int | None, *, align_corners: bool
) -> Enlarged | None:
    """`small` to be enlarged when it has to be; None: kernels cannot compute with it.

    The arguments are those of `enlarge`.
    """
    stretched = stride is None and not align_corners
    if stretched or not takes(small):
        return None
    # Not before: Triton takes a second to import, and may be missing.
    from segtrain.kernels import small_logits

    axes = small_logits.axes_of(small, size, stride)
    return None if axes is None else Enlarged(small, tuple(size), stride, align_corners, axes)
