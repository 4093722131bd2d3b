"""The endless stream of training samples: one permutation of the data set after another.

Step s takes the samples [s B, (s + 1) B), across the ends of epochs. Which images a sample shows
and how they are augmented depend only on (seed, step, position in the batch). data/README.md
describes class-uniform samples and class mix (arXiv:2007.07936).
"""

import hashlib
import time
import zlib
from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from segtrain import seed
from segtrain.data.read.dataset import SegDataset
from segtrain.data.sample.centroids import Centroids
from segtrain.data.sample.transforms import Crop, TrainTransform
from segtrain.errors import UserError
from segtrain.types import IGNORE_INDEX


class Pick(NamedTuple):
    """What a sample shows.

    index: of the image.
    point: (row, column) of a pixel that its crop contains; None: the crop lies anywhere.
    """

    index: int
    point: tuple[int, int] | None = None


@dataclass(frozen=True, eq=False)
class ClassUniform:
    """Draws the class-uniform samples of a run.

    fraction: of the samples, in [0, 1].
    """

    centroids: Centroids
    _: KW_ONLY
    fraction: float

    def fields(self) -> dict[str, str]:
        """What a checkpoint keeps of it."""
        return {"centroids": self.centroids.sha256()}

    def pick_at(self, stream_seed: int, number: int, num_images: int) -> Pick | None:
        """What sample `number` of the stream shows instead of its image; None: that image stays."""
        epoch, index = divmod(number, num_images)
        before, after = (self._picks_before(e * num_images) for e in (epoch, epoch + 1))
        # Slots are a permutation of the epoch's samples, of which the first ones are class-uniform.
        slot = int(_slots(stream_seed, epoch, num_images)[index])
        return self._pick(stream_seed, before + slot) if slot < after - before else None

    def draw(self, rng: np.random.Generator) -> Pick:
        """A pick that depends on `rng` only: a uniform class, then a uniform centroid of it."""
        by_class = self.centroids.by_class
        rows = by_class[list(by_class)[rng.integers(len(by_class))]]
        return _pick_of(rows[rng.integers(len(rows))])

    def _picks_before(self, num_samples: int) -> int:
        """How many of the first `num_samples`, whole epochs, are class-uniform."""
        # Exact: 0.3 means 3/10, and no rounding loses a sample after years of them.
        return int(Fraction(str(self.fraction)) * num_samples)

    def _pick(self, stream_seed: int, number: int) -> Pick:
        """Class-uniform sample `number` of the run, counted from 0 in the order of its slots."""
        classes = list(self.centroids.by_class)
        # The classes take turns; then each goes through its centroids, in a new order every time.
        turn, index = divmod(number, len(classes))
        class_id = classes[index]
        rows = self.centroids.by_class[class_id]
        turn, index = divmod(turn, len(rows))
        return _pick_of(rows[_centroid_order(stream_seed, class_id, turn, len(rows))[index]])


def _pick_of(row: np.ndarray) -> Pick:
    image, y, x = row.tolist()
    return Pick(image, (y, x))


# A batch needs one or two epochs.
_slots = lru_cache(maxsize=2)(seed.class_uniform_slots)
_order = lru_cache(maxsize=2)(seed.sample_order)
_centroid_order = lru_cache(maxsize=512)(seed.centroid_order)


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
    # One of the others, each equally likely: numbers from `avoid` on move up by one.
    return Pick(index + (index >= avoid))


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


Sample = tuple[torch.Tensor, torch.Tensor, str]
"""Image (C, H, W), label (H, W) uint8 and name."""

SampleKey = tuple[int, int]
"""(step, position in the batch of that step)"""

Made = tuple[float, list[Sample], int | None]
"""When work on a batch began, its samples, and the sum of `hash_pixels`."""


def hash_pixels(sample: Sample, position: int) -> int:
    """64 bits of every pixel and label of a sample and its position in the batch.

    The sum over a batch does not depend on which rank has which sample.
    """
    image, label, _ = sample
    # 0.5 ms for a crop of 512x1024, where SHA-256 takes 1.2 and BLAKE2b 2.2.
    sums = [zlib.crc32(np.ascontiguousarray(x.numpy())) for x in (image.permute(1, 2, 0), label)]
    digest = hashlib.sha256(f"{position} {sums}".encode()).digest()
    return int.from_bytes(digest[:8], "little")


def image_at(stream_seed: int, number: int, num_images: int) -> int:
    """The index of the image that sample `number`, from 0, of the endless stream shows.

    Each epoch shows all 3 images once, in an order of its own. Batches of 2 go across its end: that
    of step 1 is image 1 of the first epoch and image 0 of the second.

    >>> [image_at(0, number, 3) for number in range(6)]
    [2, 0, 1, 0, 1, 2]
    """
    epoch, index = divmod(number, num_images)
    return int(_order(stream_seed, epoch, num_images)[index])


class SampleSource(NamedTuple):
    """An image that a sample is made of.

    rng: of its augmentation.
    pasted: the image of which class mix pastes classes on it; None: it does not.
    """

    pick: Pick
    rng: np.random.Generator
    pasted: "SampleSource | None" = None


@dataclass(eq=False)
class TrainStream(Dataset):
    """The augmented samples of `dataset`: `stream[step, position]`.

    class_uniform: what draws a part of the samples class-uniformly; None: nothing does.
    class_mix_prob: see `config.augment`.
    hashes: whether batches come with the sum of `hash_pixels`.
    """

    dataset: SegDataset
    transform: TrainTransform
    _: KW_ONLY
    stream_seed: int
    batch_size: int
    class_uniform: ClassUniform | None = None
    class_mix_prob: float = 0.0
    hashes: bool = False

    def pick(self, step: int, position: int) -> Pick:
        """What the sample at `position` of the batch of `step`, from 0, shows without partners."""
        number, num_images = step * self.batch_size + position, len(self.dataset.pairs)
        uniform = self.class_uniform
        pick = uniform and uniform.pick_at(self.stream_seed, number, num_images)
        return pick or Pick(image_at(self.stream_seed, number, num_images))

    def source(self, step: int, position: int) -> SampleSource:
        """What a sample is made of."""
        rng = seed.augment_rng(self.stream_seed, step, position)
        own = SampleSource(self.pick(step, position), rng)
        return own._replace(pasted=self._partner(own, step, position))

    def names_of_step(self, step: int) -> list[str]:
        """The names of the samples in the whole batch of `step`, counted from 0, in its order."""
        return [self._name(self.source(step, i)) for i in range(self.batch_size)]

    def __getitem__(self, key: SampleKey) -> Sample:
        source = self.source(*key)
        image, label = map(torch.from_numpy, self._augmented(source))
        return image.permute(2, 0, 1), label, self._name(source)

    def __getitems__(self, keys: Sequence[SampleKey]) -> Made | UserError:
        """What a batch is made of (torch calls this method), or an error."""
        began = time.perf_counter()
        try:
            samples = [self[key] for key in keys]
            positions = [position for _, position in keys]
            pixels = sum(map(hash_pixels, samples, positions)) if self.hashes else None
            return began, samples, pixels
        except UserError as error:
            # Returned, not raised: torch would put the worker's traceback into the message.
            return error

    def _partner(self, source: SampleSource, step: int, position: int) -> SampleSource | None:
        """With probability `class_mix_prob`, a partner for `source`."""
        if self.class_mix_prob == 0:
            return None
        rng = seed.partner_rng(self.stream_seed, step, position)
        if rng.random() >= self.class_mix_prob:
            return None
        pick = draw_partner(
            rng, len(self.dataset.pairs), avoid=source.pick.index, class_uniform=self.class_uniform
        )
        return SampleSource(pick, rng)

    def _augmented(self, source: SampleSource) -> tuple[np.ndarray, np.ndarray]:
        """The crop of the image, (h, w, C), and of its label, (h, w) uint8."""
        index, point = source.pick
        if source.pasted is None:
            return self.transform(*self.dataset.view(index), source.rng, point=point)
        crop = self.transform.crop(*self.dataset.view(index), source.rng, point=point)
        # The partner draws from a generator of its own, so the crop is the same with and without
        # it.
        (other, point), rng, _ = source.pasted
        partner = self.transform.crop(*self.dataset.view(other), rng, point=point)
        crop = paste_classes(crop, partner, rng)
        return self.transform.recolored(crop, source.rng), crop.label

    def _name(self, source: SampleSource) -> str:
        """The names of all images in a sample."""
        parts = (part for part in (source, source.pasted) if part)
        return " + ".join(self.dataset.name(part.pick.index) for part in parts)
