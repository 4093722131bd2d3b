"""Checkpoints of other programs made segtrain's: read safely, recognized by their keys, converted.

One file a program says where its tensors go; none of these programs is needed. To add one, write
such a file and enter it in the table of detect.py.
"""
