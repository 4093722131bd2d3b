"""The endless stream of training samples.

It is one permutation of the data set after another. Step s takes the samples [s B, (s + 1) B),
across the ends of epochs. Which images a sample shows and how they are augmented depend only on
(seed, step, position in the batch).
"""

from collections.abc import Sequence
from dataclasses import KW_ONLY, dataclass
from functools import lru_cache
from typing import NamedTuple

import numpy as np
import torch
from torch.utils.data import Dataset

from segtrain import seed
from segtrain.data.class_uniform import ClassUniform, Pick
from segtrain.data.dataset import SegDataset
from segtrain.data.mixing import NO_MIXING, Mixing, blend, draw_partner, paste_classes
from segtrain.data.transforms import TrainTransform
from segtrain.errors import UserError

Sample = tuple[torch.Tensor, torch.Tensor, str, torch.Tensor | None]
"""Image (3, H, W) uint8, label (H, W) uint8, name, and the label of the image mixed in by MixUp."""

Place = tuple[int, int]
"""(step, position in the batch of that step)"""

# Roles of partners in `seed.partner_rng`; never renumber.
_PASTED, _MIXED, _PASTED_ON_MIXED = 0, 1, 2


@lru_cache(maxsize=2)
def _order(stream_seed: int, epoch: int, num_images: int) -> list[int]:
    return seed.sample_order(stream_seed, epoch, num_images).tolist()


def image_at(stream_seed: int, place: int, num_images: int) -> int:
    """The index of the image at `place`, counted from 0, of the endless stream."""
    epoch, index = divmod(place, num_images)
    return _order(stream_seed, epoch, num_images)[index]


class Source(NamedTuple):
    """An image that a sample is made of.

    rng: of its augmentation.
    pasted: the image of which class mix pastes classes on it; None: it does not.
    """

    pick: Pick
    rng: np.random.Generator
    pasted: "Source | None" = None


@dataclass(eq=False)
class TrainStream(Dataset):
    """The augmented samples of `dataset`: `stream[step, position]`.

    class_uniform: what draws a part of the samples class-uniformly; None: nothing does.
    mixing: how samples are made of two images.
    """

    dataset: SegDataset
    transform: TrainTransform
    _: KW_ONLY
    stream_seed: int
    batch_size: int
    class_uniform: ClassUniform | None = None
    mixing: Mixing = NO_MIXING

    def pick(self, step: int, position: int) -> Pick:
        """What the sample at `position` of the batch of `step`, both counted from 0, shows.

        Without partners.
        """
        place, num_images = step * self.batch_size + position, len(self.dataset.pairs)
        if (uniform := self._class_uniform(step)) is not None:
            pick = uniform.pick_at(self.stream_seed, place, num_images)
            if pick is not None:
                return pick
        return Pick(image_at(self.stream_seed, place, num_images))

    def mixup_weight(self, step: int) -> int:
        """The weight of MixUp's partners in `step`, 0 .. 128 of 256; 0: there are none."""
        alpha = self.mixing.mixup_alpha
        return 0 if alpha is None else seed.mixup_weight(self.stream_seed, step, alpha)

    def sources(self, step: int, position: int) -> list[Source]:
        """The image of a sample, and the one that MixUp adds if it does."""
        rng = seed.augment_rng(self.stream_seed, step, position)
        own = Source(self.pick(step, position), rng)
        found = [self._with_pasted(own, step, position, role=_PASTED)]
        if self.mixup_weight(step):
            mixed = self._partner(own, step, position, role=_MIXED, prob=1.0)
            found.append(self._with_pasted(mixed, step, position, role=_PASTED_ON_MIXED))
        return found

    def names_of_step(self, step: int) -> list[str]:
        """The names of the samples in the whole batch of `step`, counted from 0, in its order."""
        return [self._name(self.sources(step, i)) for i in range(self.batch_size)]

    def __getitem__(self, place: Place) -> Sample:
        sources = self.sources(*place)
        (image, label), *partners = map(self._augmented, sources)
        partner_label = None
        for partner, partner_label in partners:
            image = blend(image, partner, self.mixup_weight(place[0]))
            partner_label = torch.from_numpy(partner_label)
        image = torch.from_numpy(image).permute(2, 0, 1)
        return image, torch.from_numpy(label), self._name(sources), partner_label

    def __getitems__(self, places: Sequence[Place]) -> list[Sample] | UserError:
        """The samples of a batch (torch calls this method), or the error that prevents them."""
        try:
            return [self[place] for place in places]
        except UserError as error:
            # Returned, not raised: torch would put the worker's traceback into the message.
            return error

    def _class_uniform(self, step: int) -> ClassUniform | None:
        uniform = self.class_uniform
        return uniform if uniform is not None and uniform.lasts(step) else None

    def _with_pasted(self, source: Source, step: int, position: int, *, role: int) -> Source:
        prob = self.mixing.class_mix_prob
        if prob == 0:
            return source
        return source._replace(pasted=self._partner(source, step, position, role=role, prob=prob))

    def _partner(
        self, source: Source, step: int, position: int, *, role: int, prob: float
    ) -> Source | None:
        """With probability `prob`, a partner for `source`."""
        rng = seed.partner_rng(self.stream_seed, step, position, role=role)
        if rng.random() >= prob:
            return None
        pick = draw_partner(
            rng,
            len(self.dataset.pairs),
            avoid=source.pick.index,
            class_uniform=self._class_uniform(step),
        )
        return Source(pick, rng)

    def _augmented(self, source: Source) -> tuple[np.ndarray, np.ndarray]:
        """The crop of the image, (h, w, 3) uint8, and of its label, (h, w) uint8."""
        index, point = source.pick
        if source.pasted is None:
            return self.transform(*self.dataset.view(index), source.rng, point=point)
        crop = self.transform.crop(*self.dataset.view(index), source.rng, point=point)
        (other, point), rng, _ = source.pasted
        partner = self.transform.crop(*self.dataset.view(other), rng, point=point)
        crop = paste_classes(crop, partner, rng)
        return self.transform.recolored(crop, source.rng), crop.label

    def _name(self, sources: Sequence[Source]) -> str:
        """The names of all images in a sample; where nothing is mixed in, that of its image."""
        whole = [part for source in sources for part in (source, source.pasted) if part]
        return " + ".join(self.dataset.name(part.pick.index) for part in whole)
