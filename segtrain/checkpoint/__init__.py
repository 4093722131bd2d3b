"""Checkpoints: their format, which ones a run keeps, and models and runs restored from them."""

from segtrain.checkpoint.trained import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]
