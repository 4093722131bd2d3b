"""A folder for each image, and its labels somewhere in it; names say nothing.

    s01/photo.jpg   s01/masks/car.png   s01/masks/road.png
    s02/photo.jpg   s02/masks/car.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
s01/masks/car.png: s01/photo.jpg
s01/masks/road.png: s01/photo.jpg
s02/masks/car.png: s02/photo.jpg
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

from segtrain.desk.survey.conventions.claims import OwnerClaim
from segtrain.desk.survey.file_names import FileName


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """The only image of the nearest folder above a label that holds any."""
    in_folder: dict[str, list[str]] = defaultdict(list)
    for image in images:
        in_folder[image.folder].append(image.path)
    owners: dict[str, str] = {}
    for label in labels:
        above = (str(x).removeprefix(".") for x in PurePosixPath(label.path).parents)
        there = next((in_folder[folder] for folder in above if folder in in_folder), [])
        if len(there) == 1:
            owners[label.path] = there[0]
    # A single picture above all, as a logo, is no image of the labels.
    is_enough = len({*owners.values()}) > 1 or len(images) == 1
    return OwnerClaim(owners if is_enough else {})
