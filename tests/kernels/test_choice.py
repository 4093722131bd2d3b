"""Where kernels compute, and what the log says of it."""

import pytest
import torch
from replays import config_of

from segtrain import kernels
from segtrain.trainer.preflight import device_lines
from segtrain.training.graph import GraphPlan

CUDA = torch.device("cuda", 0)


@pytest.fixture
def device(monkeypatch):
    """Sets the compute capability of a device that does not exist."""

    def make(capability):
        monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: capability)

    monkeypatch.setattr(kernels, "_failure", lambda _: None)
    make((9, 0))
    return make


def lines(device, **train):
    config = config_of([])
    config = config.model_copy(update={"train": config.train.model_copy(update=train)})
    return [line for line in device_lines(config, GraphPlan(""), device) if "kernels" in line]


def test_the_log_says_which_kernels_compute(device, monkeypatch):
    assert lines(CUDA) == [
        "kernels    segtrain's for cross entropy, batch norm with its ReLU, and resizing"
    ]
    assert lines(torch.device("cpu")) == []
    assert lines(CUDA, compile=True) == ["kernels    none: train.compile makes its own"]
    assert lines(CUDA, precision="float64") == ["kernels    none: they compute in float32"]
    device((7, 5))
    assert lines(CUDA) == ["kernels    none: they need compute capability 8.0; this device has 7.5"]
    monkeypatch.setattr(kernels, "_HAS_TRITON", False)
    assert lines(CUDA) == ["kernels    none: Triton is not installed"]


def test_where_triton_cannot_launch_the_log_says_why(monkeypatch):
    """As without a C compiler: a run that torch's kernels can train must not end."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda _: (9, 0))
    kernels._failure.cache_clear()
    assert kernels._failure(torch.device("cpu")) is None
    kernels._failure.cache_clear()

    def build(*_, **__):
        raise RuntimeError("Failed to find C compiler. Please specify via CC\nor set it")

    monkeypatch.setattr("segtrain.kernels.bilinear.resize_gradient", build)
    failure = kernels._failure(torch.device("cpu"))
    kernels._failure.cache_clear()
    monkeypatch.setattr(kernels, "_failure", lambda _: failure)
    assert lines(CUDA) == [
        "kernels    none: Triton fails (RuntimeError: Failed to find C compiler. "
        "Please specify via CC)"
    ]


def look(x):
    """`x`, plus one where kernels compute."""
    return x + int(kernels.takes(x))


@pytest.mark.filterwarnings("ignore:.*torch.jit.trace.*is deprecated")
def test_what_watches_or_changes_operations_gets_those_of_torch(monkeypatch):
    from torch.utils.flop_counter import FlopCounterMode

    x = torch.zeros(1, 3, 2, 2)
    assert look(x).all()
    with FlopCounterMode(display=False):
        assert not look(x).any()
    for changed in (
        torch.jit.trace(look, (x,), check_trace=False),
        torch.func.vmap(look),
        torch.compile(look, backend="eager"),
    ):
        assert not changed(x).any()
    assert not look(x.double()).any()
    monkeypatch.setattr(kernels, "interpreted", False)
    assert not look(x).any()
