"""Label maps from annotation files: outlines and masks of classes, in the formats of other tools.

`detect` finds the files, `read_annotations` makes one form of them, `draw` makes a label map.
"""

from segtrain.desk.annotations.draw import draw
from segtrain.desk.annotations.reading import AnnotationSet, detect, read_annotations, roi_files

__all__ = ["AnnotationSet", "detect", "draw", "read_annotations", "roi_files"]
