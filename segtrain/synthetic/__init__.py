"""Draws synthetic street scenes in the layout of Cityscapes: `segtrain data synth`."""

from segtrain.synthetic.write import main

__all__ = ["main"]
