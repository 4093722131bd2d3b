"""What volumes hold, as CSV: voxels, millilitres and components of each class."""

from collections.abc import Sequence
from typing import Any

import numpy as np
from scipy import ndimage

from segtrain.data.read.volumes import no_spacing, voxel_ml

# A component: voxels of a class that share a face, an edge or a corner (26 neighbours), as pixels
# of an object do.
_TOUCHING = np.ones((3, 3, 3), bool)
ABOUT = "components: voxels of one class that touch, also at edges and corners; ml: millilitres"


def volume_rows(
    name: str, labels: np.ndarray, num_missing: int, classes: Sequence[str], image: Any
) -> list[list[Any]]:
    """A row for each class, as VOLUME_TITLES; without a spacing in the file no millilitres.

    labels: (N, H, W) uint8 train ids or IGNORE_INDEX. num_missing: of voxels that have no value in
    `image`, of nibabel.
    """
    counts = np.bincount(labels.ravel(), minlength=256)
    # IGNORE_INDEX becomes 0, which is no object.
    boxes = ndimage.find_objects(labels + np.uint8(1), max_label=len(classes))
    valid = labels.size - num_missing
    num_unknown = int(counts[len(classes) :].sum()) - num_missing
    ml = "" if no_spacing(image) else voxel_ml(image)
    rows = []
    for k, (title, box) in enumerate(zip(classes, boxes, strict=True)):
        voxels = int(counts[k])
        number = ndimage.label(labels[box] == k, _TOUCHING)[1] if box else 0
        share = voxels / valid if valid else ""
        row = [name, title, voxels, ml and voxels * ml, number, share, num_missing, num_unknown]
        rows.append(row)
    return rows
