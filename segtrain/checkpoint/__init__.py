"""Checkpoints: their format, which ones a run keeps, and models and runs restored from them.

Training needs nothing of what loads a model to use it, so that is imported on first use.
"""

from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from segtrain.checkpoint.trained import LoadedModel, load_model

__all__ = ["LoadedModel", "load_model"]


def __getattr__(name: str) -> Any:
    if name in __all__:
        from segtrain.checkpoint import trained

        return getattr(trained, name)
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
