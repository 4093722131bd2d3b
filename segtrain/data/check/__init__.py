"""Checks of a data set before it costs time on a GPU."""
