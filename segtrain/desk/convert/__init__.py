"""Checkpoints of other programs made segtrain's: read safely, recognized by their keys, converted.

One file a program has the table of its keys; none of these programs is needed. To add one, write
such a file and enter it in the table of converter.py.
"""
