"""Labels of objects or of classes lie in a folder that is called as their image.

    images/0a1b.jpg     masks/0a1b/1.png    masks/0a1b/2.png
    images/2c3d.jpg     masks/2c3d/1.png
    images/5.jpg        masks/5/1.png       masks/5/2.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
masks/0a1b/1.png: images/0a1b.jpg
masks/0a1b/2.png: images/0a1b.jpg
masks/2c3d/1.png: images/2c3d.jpg
masks/5/1.png: images/5.jpg
masks/5/2.png: images/5.jpg
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

from segtrain.desk.survey.conventions.claims import OwnerClaim, has_letter, nearest, number_of
from segtrain.desk.survey.file_names import FileName


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """From the nearest folder up, the first that names one image counts."""
    by_name: dict[str, list[FileName]] = defaultdict(list)
    by_number: dict[int | None, list[FileName]] = defaultdict(list)
    folders_of_images: set[str] = set()
    for image in images:
        by_number[number_of(image)].append(image)
        folders_of_images.update(PurePosixPath(image.path).parts[:-1])
        for name in {image.core, image.stem} - {""}:
            by_name[name].append(image)
    owners: dict[str, str] = {}
    whole: set[str] = set()
    for label in labels:
        for folder in reversed(PurePosixPath(label.path).parts[:-1]):
            numbered = by_number.get(int(folder), ()) if folder.isdecimal() else ()
            fitting = nearest(label, by_name.get(folder.lower()) or numbered)
            # A folder that images lie in is a scene, but 7/ of 7/7.jpg and 7/masks/1.png is not.
            is_scene = folder in folders_of_images and all(
                folder not in PurePosixPath(image.path).parts for image in fitting
            )
            if len(fitting) == 1 and not is_scene:
                owners[label.path] = fitting[0].path
                if folder.lower() == fitting[0].stem and has_letter(folder):
                    whole.add(label.path)
                break
    return OwnerClaim(owners, whole)
