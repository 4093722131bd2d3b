"""Procedurally drawn street scenes in the layout of Cityscapes (`segtrain data synth`).

Painter's algorithm on NumPy and OpenCV: a pinhole camera over a street, drawn from far to near.
"""

from segtrain.data.synthetic.scene import draw_scene
from segtrain.data.synthetic.write import main, write_dataset

__all__ = ["draw_scene", "main", "write_dataset"]
