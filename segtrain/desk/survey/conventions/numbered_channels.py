"""nnU-Net: each channel of an image is a file, `case_0000` and `case_0001` of the label `case`.

    imagesTr/liver_001_0000.tif  imagesTr/liver_001_0001.tif  labelsTr/liver_001.png
    imagesTr/liver_002_0000.tif  imagesTr/liver_002_0001.tif  labelsTr/liver_002.png
    imagesTr/liver_007_0000.tif  imagesTr/liver_007_0001.tif  labelsTr/liver_007.png

>>> from segtrain.desk.survey.conventions.examples import example, lines_of
>>> print(lines_of(claim(*example(__doc__))))
labelsTr/liver_001.png: imagesTr/liver_001_0000.tif, imagesTr/liver_001_0001.tif
labelsTr/liver_002.png: imagesTr/liver_002_0000.tif, imagesTr/liver_002_0001.tif
labelsTr/liver_007.png: imagesTr/liver_007_0000.tif, imagesTr/liver_007_0001.tif
"""

import re
from collections.abc import Sequence
from dataclasses import replace

from segtrain.desk.survey.conventions import equal_names
from segtrain.desk.survey.conventions.claims import OwnerClaim
from segtrain.desk.survey.file_names import FileName


def claim(images: Sequence[FileName], labels: Sequence[FileName]) -> OwnerClaim:
    """As of equal names, with the channel in the pattern, which tells bands apart."""
    renamed = {
        image.path: image._replace(
            core=image.core[:-5], pattern=f"{image.pattern[:-4]}{image.core[-5:]}"
        )
        for image in images
        if re.search(r"._\d{4}$", image.core)
    }
    if not renamed:
        return OwnerClaim({})
    found = equal_names.claim([renamed.get(x.path, x) for x in images], labels)
    return replace(found, renamed=renamed)
