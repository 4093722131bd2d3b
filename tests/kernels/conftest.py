"""Kernels by Triton's interpreter, on CPU tensors, beside formulas in float64."""

import importlib
import sys

import pytest

pytest.importorskip("triton")


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Triton decides once, when the module of a kernel is imported, by this variable."""
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    for name, module in list(sys.modules.items()):
        if name.startswith("segtrain.kernels.") and not hasattr(module, "_interpreted_here"):
            importlib.reload(module)
            module._interpreted_here = True
    yield
    for name, module in list(sys.modules.items()):
        if name.startswith("segtrain.kernels."):
            module._interpreted_here = True
