"""Which samples are drawn class-uniformly, and around which pixel they are cropped.

After NVIDIA's semantic-segmentation (datasets/uniform.py): a fraction of the samples of each epoch
shows a class that is drawn uniformly, in a crop that contains one of its centroids. The other
samples are those of the endless stream (`segtrain.data.stream`), unchanged: a class-uniform sample
takes the place of one of them. So an epoch is still as many samples as there are images, and
each image is shown at most once in it by the stream.

Everything is a function of the seed and the place in the stream. Classes take turns, and each class
goes through all its centroids, in a random order, before one is taken again.
"""

from dataclasses import KW_ONLY, dataclass
from fractions import Fraction
from functools import lru_cache
from typing import NamedTuple

import numpy as np

from segtrain import seed
from segtrain.data.centroids import Centroids


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
    steps: only the first so many steps have any; None: all have.
    """

    centroids: Centroids
    _: KW_ONLY
    fraction: float
    steps: int | None = None

    def lasts(self, step: int) -> bool:
        """Whether `step`, counted from 0, has class-uniform samples."""
        return self.steps is None or step < self.steps

    def pick_at(self, stream_seed: int, place: int, num_images: int) -> Pick | None:
        """What is shown instead of the image at `place` of the stream; None: that image stays."""
        epoch, index = divmod(place, num_images)
        before, after = (self._picks_before(e * num_images) for e in (epoch, epoch + 1))
        slot = int(_slots(stream_seed, epoch, num_images)[index])
        return self._pick(stream_seed, before + slot) if slot < after - before else None

    def draw(self, rng: np.random.Generator) -> Pick:
        """A pick that depends on `rng` only: a uniform class, then a uniform centroid of it."""
        by_class = self.centroids.by_class
        rows = by_class[list(by_class)[rng.integers(len(by_class))]]
        return _pick_of(rows[rng.integers(len(rows))])

    def _picks_before(self, place: int) -> int:
        """How many of the first `place` samples, whole epochs, are class-uniform."""
        # Exact: 0.3 means 3/10, and no rounding loses a sample after years of them.
        return int(Fraction(str(self.fraction)) * place)

    def _pick(self, stream_seed: int, number: int) -> Pick:
        """Class-uniform sample `number` of the run, counted from 0 in the order of its slots."""
        classes = list(self.centroids.by_class)
        turn, index = divmod(number, len(classes))
        class_id = classes[index]
        rows = self.centroids.by_class[class_id]
        turn, index = divmod(turn, len(rows))
        return _pick_of(rows[_centroid_order(stream_seed, class_id, turn, len(rows))[index]])


def _pick_of(row: np.ndarray) -> Pick:
    image, y, x = row.tolist()
    return Pick(image, (y, x))


@lru_cache(maxsize=2)
def _slots(stream_seed: int, epoch: int, num_images: int) -> np.ndarray:
    return seed.class_uniform_slots(stream_seed, epoch, num_images)


@lru_cache(maxsize=512)
def _centroid_order(stream_seed: int, class_id: int, turn: int, number: int) -> np.ndarray:
    return seed.centroid_order(stream_seed, class_id, turn, number)
