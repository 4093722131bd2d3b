"""MixUp and class mix: training samples that are made of two images.

The second image, the partner, is drawn by `draw_partner` from (seed, step, position in the batch)
and read by the worker that makes the sample. It is augmented with random numbers of its own, so
neither depends on which rank or worker has which sample, and nothing about the first image changes.

MixUp (arXiv:1710.09412) blends two finished crops; the loss is blended likewise, in
`segtrain.training.passes`. Class mix (ClassMix, arXiv:2007.07936) pastes half of the classes of the
partner's crop, after the geometry and before the colours change, as its authors do.
"""

from typing import NamedTuple

import numpy as np

from segtrain.data.class_uniform import ClassUniform, Pick
from segtrain.data.transforms import Crop
from segtrain.types import IGNORE_INDEX


class Mixing(NamedTuple):
    """Options of `augment`, where they are described."""

    mixup_alpha: float | None = None
    class_mix_prob: float = 0.0


NO_MIXING = Mixing()


def draw_partner(
    rng: np.random.Generator, num_images: int, *, avoid: int, class_uniform: ClassUniform | None
) -> Pick:
    """What a partner shows: any image but `avoid`, if there is another one.

    class_uniform: partners are class-uniform as often as samples are; None: never. Such a partner
        may be another crop of `avoid`.
    """
    if class_uniform is not None and rng.random() < class_uniform.fraction:
        return class_uniform.draw(rng)
    if num_images == 1:
        return Pick(0)
    index = int(rng.integers(num_images - 1))
    return Pick(index + (index >= avoid))


def blend(image: np.ndarray, partner: np.ndarray, weight: int) -> np.ndarray:
    """(256 - weight) / 256 of the image and the rest of its partner, uint8, halves rounded up.

    Whole numbers, so that all machines get the same. Normalization commutes with it but for the
    rounding, which is at most half a grey level.
    """
    mixed = image.astype(np.uint16)
    mixed *= np.uint16(256 - weight)
    mixed += partner * np.uint16(weight)
    mixed += np.uint16(128)
    mixed >>= np.uint16(8)
    return mixed.astype(np.uint8)


def paste_classes(crop: Crop, partner: Crop, rng: np.random.Generator) -> Crop:
    """`crop` with the pixels, and labels, of half of the classes that the partner's label shows.

    Half is rounded down, so a partner of one class adds nothing. Ignored pixels are no class.
    """
    present = np.flatnonzero(np.bincount(partner.label.ravel(), minlength=256)[:IGNORE_INDEX])
    chosen = np.zeros(256, bool)
    chosen[rng.choice(present, len(present) // 2, replace=False)] = True
    pasted = chosen[partner.label]  # (h, w)
    return crop._replace(
        image=np.where(pasted[..., None], partner.image, crop.image),
        label=np.where(pasted, partner.label, crop.label),
        pasted=pasted,
    )
