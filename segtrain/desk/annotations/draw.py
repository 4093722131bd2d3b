"""A label map from the regions of an image.

All formats are drawn by the rule of COCO's own tools, whatever tool they come from: a pixel is
inside an outline as pycocotools says, the polygons of a region are joined, its holes are cut out,
and what lies outside of the image is cut off.
"""

from collections.abc import Sequence
from typing import Literal, get_args

import numpy as np

from segtrain.data.read.decode import to_stored
from segtrain.desk.annotations.regions import IGNORED, Annotated, Region, mask_library
from segtrain.types import IGNORE_INDEX

Overlap = Literal["order", "area", "class", "keep"]
"""Which of two regions a pixel shows: the later in the file, the smaller (where both have the same
area the later), that of the later class, or both: then labels have a band for each class."""
OVERLAPS: tuple[Overlap, ...] = get_args(Overlap)


def draw(annotated: Annotated, classes: Sequence[str], overlap: Overlap) -> np.ndarray:
    """The label map (H, W) uint8 of an image that `read_annotations` has returned.

    A pixel is the position of its class in `classes`, 0 where no region is, and 255 where the
    annotation says to ignore. H and W are those of the image as it is stored. With `overlap` keep
    (H, W, K), a band for each class but the first: 1 where it is, 0 where not, or 255.
    """
    assert annotated.size is not None  # read_annotations has filled it in
    masks = mask_library()
    ids = {name: i for i, name in enumerate(classes)} | {IGNORED: IGNORE_INDEX}
    regions = [ids[region.name] for region in annotated.regions]
    drawn = [_packed(region, annotated.size) for region in annotated.regions]
    if overlap == "keep":
        bands = np.zeros((*annotated.size, len(classes) - 1), np.uint8)
        # What is to be ignored comes last, over all classes.
        for i in sorted(range(len(drawn)), key=lambda i: regions[i] == IGNORE_INDEX):
            here = masks.decode(drawn[i]) != 0
            if regions[i] == IGNORE_INDEX:
                bands[here] = IGNORE_INDEX
            elif regions[i]:
                bands[here, regions[i] - 1] = 1
        return np.ascontiguousarray(to_stored(bands, annotated.orientation))
    rank = {
        "order": lambda i: i,
        "area": lambda i: (-int(masks.area(drawn[i])), i),
        "class": lambda i: (regions[i], i),
    }[overlap]
    # Column by column, as pycocotools decodes masks.
    label = np.zeros(annotated.size, np.uint8, order="F")
    for i in sorted(range(len(drawn)), key=rank):
        label[masks.decode(drawn[i]) != 0] = regions[i]
    return np.ascontiguousarray(to_stored(label, annotated.orientation))


def _packed(region: Region, size: tuple[int, int]) -> dict[str, object]:
    """The region as pycocotools takes it."""
    if region.mask:
        return {"size": list(size), "counts": region.mask}
    masks = mask_library()
    packed, *holes = (
        masks.merge(masks.frPyObjects([polygon.ravel().tolist() for polygon in polygons], *size))
        for polygons in (region.polygons, region.holes)
        if polygons
    )
    if not holes:
        return packed
    return masks.encode(masks.decode(packed) & (1 - masks.decode(holes[0])))
