"""The label's name has one inner word more than the image's; the word may be a class.

    images/um_000.jpg   gt/um_road_000.png   gt/um_lane_000.png
    images/uu_000.jpg   gt/uu_road_000.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
gt/um_road_000.png: images/um_000.jpg
gt/um_lane_000.png: images/um_000.jpg
gt/uu_road_000.png: images/uu_000.jpg
"""

import re
from collections import defaultdict
from collections.abc import Sequence

from segtrain.desk.survey.conventions.claims import OwnerClaim, has_letter, nearest
from segtrain.desk.survey.file_names import FileName


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """Drops one inner word of letters; inner numbers count scenes or frames.

    What is left must have a letter: 1_road_2 is no label of 1_2, which may be a mere count.
    """
    by_parts: dict[tuple[str, ...], list[FileName]] = defaultdict(list)
    for image in images:
        by_parts[_parts(image.stem)].append(image)
    owners: dict[str, str] = {}
    unclear: list[str] = []
    for label in labels:
        parts = _parts(label.stem)
        without = {
            parts[:i] + parts[i + 1 :] for i in range(1, len(parts) - 1) if parts[i].isalpha()
        }
        fitting = [
            image
            for rest in without
            if any(map(has_letter, rest))
            for image in nearest(label, by_parts.get(rest, ()))
        ]
        if len(fitting) == 1:
            owners[label.path] = fitting[0].path
        elif fitting:
            unclear.append(label.path)
    return OwnerClaim(owners, whole=set(owners), unclear=unclear)


def _parts(stem: str) -> tuple[str, ...]:
    """The parts of a name between separators."""
    return tuple(re.split(r"[_\-. ]+", stem))
