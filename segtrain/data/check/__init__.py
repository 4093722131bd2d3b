"""Checks of a data set before device time is spent on it."""
