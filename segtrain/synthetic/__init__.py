"""Draws synthetic street scenes in the layout of Cityscapes: `segtrain data synth`.

scene.py says what stands where, paint.py what it looks like, write.py makes the files.
"""

from segtrain.synthetic.write import main

__all__ = ["main"]
