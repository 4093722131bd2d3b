"""Kernels by Triton's interpreter, on CPU tensors, beside formulas in float64."""

import pytest

from segtrain import kernels


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Lets CPU tensors in; the interpreter is there in all tests (tests/conftest.py)."""
    pytest.importorskip("triton")
    monkeypatch.setattr(kernels, "interpreted", True)
