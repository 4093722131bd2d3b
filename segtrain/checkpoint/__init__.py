"""Checkpoints: what is in one, which ones a run keeps, and loading them."""

from segtrain.checkpoint.contents import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
