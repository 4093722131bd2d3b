"""Label maps from annotation files: outlines and masks of classes, in the formats of other tools.

`detect` finds the files, `read_annotations` makes one form of them, `draw` makes a label map.
"""

from segtrain.annotations.draw import draw
from segtrain.annotations.reading import AnnotationSet, Source, detect, read_annotations
from segtrain.annotations.regions import Annotated, Region

__all__ = [
    "Annotated",
    "AnnotationSet",
    "Region",
    "Source",
    "detect",
    "draw",
    "read_annotations",
]
