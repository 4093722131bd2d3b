"""Draws synthetic street scenes in the layout of Cityscapes: `segtrain data synth`."""
