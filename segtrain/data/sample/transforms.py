"""The augmentation of a training sample: draw everything, then make one crop.

Scale, rotation, crop, flips and turns are drawn first and done as one resampling
(`sample.geometry`); blur and colours change only the crop (`sample.photometric`).
"""

from typing import NamedTuple

import numpy as np

from segtrain.config import AugmentConfig
from segtrain.data.read.image import ImageForm, ignore_missing
from segtrain.data.sample import geometry
from segtrain.data.sample.geometry import Placement, Span
from segtrain.data.sample.photometric import change_pixels, extra_transforms

_MAX_REDRAWS = 10  # mmsegmentation, RandomCrop
_ROTATE_PROB = 0.5  # semseg, RandRotate


class Crop(NamedTuple):
    """A crop before its colours change.

    image: (h, w, C). label: (h, w) uint8.
    pasted: (h, w) bool, the pixels that come from another image; None: none do.
    """

    image: np.ndarray
    label: np.ndarray
    placement: Placement
    pasted: np.ndarray | None = None


class TrainTransform:
    """Makes a random crop of `augment.crop_size` from an image and its label.

    form: of the images. Its mean is painted where the crop exceeds the image, and where a pixel has
        no value; the label is IGNORE_INDEX there.
    short_side_px: the short side of an image at scale 1; None: as stored.

    Raises:
        ConfigError: `augment` changes colours, and the images have none; or an extra transform of
            it cannot be used.
    """

    def __init__(
        self, augment: AugmentConfig, *, form: ImageForm, short_side_px: int | None = None
    ) -> None:
        self._augment, self._short_side_px = augment, short_side_px
        self._form, self._fill = form, form.fill
        self._extra = extra_transforms(augment, form)

    def __call__(
        self,
        image: np.ndarray,
        label: np.ndarray,
        rng: np.random.Generator,
        *,
        point: tuple[int, int] | None = None,
    ) -> tuple[np.ndarray, np.ndarray]:
        """The crop of the image, (h, w, C), and of the label, (h, w) uint8, both contiguous.

        image: (H, W, C) of the form. label: (H, W) or (H, W, K) uint8. Neither is changed. The
        result depends on them, on `point` (see `draw_placement`) and on the state of `rng` alone.
        """
        crop = self.crop(image, label, rng, point=point)
        return self.recolored(crop, rng), crop.label

    def crop(
        self,
        image: np.ndarray,
        label: np.ndarray,
        rng: np.random.Generator,
        *,
        point: tuple[int, int] | None = None,
    ) -> Crop:
        """The first half of a call: the geometry."""
        placement = draw_placement(
            self._augment, label, rng, short_side_px=self._short_side_px, point=point
        )
        pixels = geometry.resample_image(image, placement, fill=self._fill)
        classes = geometry.resample_label(label, placement)
        return Crop(*ignore_missing(pixels, classes, self._form), placement)

    def recolored(self, crop: Crop, rng: np.random.Generator) -> np.ndarray:
        """The second half: the image of `crop` with its blur and colours changed."""
        image = changed = change_pixels(crop.image, self._augment, self._extra, rng)
        if changed is not crop.image:
            # Padding stays the mean, which is zero after normalization, as in published pipelines.
            image = geometry.paint_padding(changed, crop.placement, self._fill)
            if crop.pasted is not None:
                image = np.where(crop.pasted[..., None], changed, image)
        return np.ascontiguousarray(image)


def draw_placement(
    augment: AugmentConfig,
    label: np.ndarray,
    rng: np.random.Generator,
    *,
    short_side_px: int | None = None,
    point: tuple[int, int] | None = None,
) -> Placement:
    """A random crop of the image with this label, which is read for `max_class_share` only.

    An image smaller than the crop lies anywhere in it. At a fixed place (mmsegmentation: top left,
    semseg: centre) it would always meet the network's zero padding in the same way.

    point: (row, column) of a pixel that the crop must show, at any place in it; None: any crop. A
        rotation that would turn this pixel out of the image is left out.
    """
    height, width = label.shape[:2]
    unit = short_side_px / min(height, width) if short_side_px else 1.0
    # The order of the draws is part of what a seed means: another order gives other crops.
    scale = unit * rng.uniform(*augment.scale_range)
    rotated = augment.rotate_deg > 0 and rng.random() < _ROTATE_PROB
    angle_deg = rng.uniform(-augment.rotate_deg, augment.rotate_deg) if rotated else 0.0
    flip = bool(rng.random() < augment.flip_prob)
    turned = augment.quarter_turn_prob > 0 and rng.random() < augment.quarter_turn_prob
    turns = int(rng.integers(1, 4)) if turned else 0
    # An odd number of turns exchanges the sides again, so the crop has its size.
    crop_h, crop_w = augment.crop_size if turns % 2 == 0 else augment.crop_size[::-1]
    placement = Placement(
        rows=Span(height, max(1, round(height * scale)), crop_h),
        columns=Span(width, max(1, round(width * scale)), crop_w),
        angle_deg=angle_deg,
        flip=flip,
        turns=turns,
    )
    target = None
    if point is not None:
        if placement.turned(point) is None:
            placement = placement._replace(angle_deg=0.0)
        target = placement.turned(point)
    placement = placement.moved(rng, target)
    # A crop that holds the whole image shows the same classes wherever it lies.
    movable = placement.rows.largest_start > 0 or placement.columns.largest_start > 0
    if augment.max_class_share < 1 and movable:
        for _ in range(_MAX_REDRAWS):
            if geometry.largest_class_share(label, placement) <= augment.max_class_share:
                break
            placement = placement.moved(rng, target)
    return placement
