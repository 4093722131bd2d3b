"""A label is called as a folder, and is that of each image in it: a fixed camera has one mask.

    cam_7/0800.jpg  cam_7/1200.jpg  masks/cam_7.png
    cam_8/0900.jpg                  masks/cam_8.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
masks/cam_7.png: cam_7/0800.jpg
masks/cam_8.png: cam_8/0900.jpg
>>> claim(*example(__doc__)).shared
{'masks/cam_7.png': ['cam_7/1200.jpg']}
"""

from collections import defaultdict
from collections.abc import Sequence
from pathlib import PurePosixPath

from segtrain.desk.survey.conventions.claims import OwnerClaim
from segtrain.desk.survey.file_names import FileName, band_words


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """All or none: where a label is called as no folder, or as two, names say something else.

    Nor are bands of a scene images: s1/B02.tif and s1/B03.tif of labels/s1.png.
    """
    in_folder: dict[str, list[str]] = defaultdict(list)
    folders: dict[str, set[str]] = defaultdict(set)
    for image in images:
        in_folder[image.folder].append(image.path)
        folders[PurePosixPath(image.folder).name.lower()].add(image.folder)
    places = [folders.get(label.stem, set()) for label in labels]
    are_bands = any(band_words(image.stem) for image in images)
    if len(labels) < 2 or are_bands or any(len(place) != 1 for place in places):
        return OwnerClaim({})
    owners, shared = {}, {}
    for label, (folder,) in zip(labels, places, strict=True):
        owners[label.path], *further = in_folder[folder]
        shared |= {label.path: further} if further else {}
    return OwnerClaim(owners if shared else {}, shared=shared)
