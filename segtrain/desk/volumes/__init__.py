"""Volumes cut into slices, with lists of whole patients, for `segtrain data import`."""
