"""A folder for each scene, and in all of them the same bands; the label there, or called as it.

    s1/B02.tif  s1/B03.tif  labels/s1.png
    s2/B02.tif  s2/B03.tif  labels/s2.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
labels/s1.png: s1/B02.tif, s1/B03.tif
labels/s2.png: s2/B02.tif, s2/B03.tif
"""

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import replace
from pathlib import PurePosixPath

from segtrain.desk.survey.affixes import parse_names
from segtrain.desk.survey.conventions import equal_names
from segtrain.desk.survey.conventions.claims import OwnerClaim
from segtrain.desk.survey.file_names import FileName, band_words


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """As of equal names, if each band had a folder of its own: `B02/s1.tif`."""
    bands: dict[str, list[str]] = defaultdict(list)
    for image in images:
        bands[image.folder].append(PurePosixPath(image.path).name.lower())
    # Only where every file is called as a band is, and every folder holds the same names: other
    # folders are no scenes.
    are_bands = all(band_words(stem) for stem in {image.stem for image in images})
    if not are_bands or len({frozenset(x) for x in bands.values()}) > 1 or "" in bands:
        return OwnerClaim({})
    names = [*images, *labels]
    turned = [PurePosixPath(name.path) for name in names]
    for i, (name, path) in enumerate(zip(names, turned, strict=True)):
        if name.folder in bands:
            # s1/B02.tif becomes B02/s1.tif: now image and label share the core s1.
            scene = path.parent.name
            turned[i] = path.parents[1] / path.stem / f"{scene}{path.suffix}"
    parsed = parse_names([str(path) for path in turned])
    parsed = [new._replace(path=name.path) for new, name in zip(parsed, names, strict=True)]
    found = equal_names.claim(parsed[: len(images)], parsed[len(images) :])
    return replace(found, renamed={name.path: name for name in parsed[: len(images)]})
