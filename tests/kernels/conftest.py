"""Kernels by Triton's interpreter, on CPU tensors, beside formulas in float64."""

from importlib.util import find_spec

import pytest

from segtrain import kernels

# torch has it on Linux only.
collect_ignore_glob = [] if find_spec("triton") else ["test_*.py"]


@pytest.fixture(autouse=True)
def interpreted(monkeypatch):
    """Lets CPU tensors in; the interpreter is there in all tests (tests/conftest.py)."""
    monkeypatch.setattr(kernels, "interpreted", True)
