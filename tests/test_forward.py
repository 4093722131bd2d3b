"""Forward passes that are replayed, by a CPU that records and replays as a CUDA graph does."""

from contextlib import contextmanager

import pytest
import torch
from replays import Recorded
from torch import nn

from segtrain.inference import forward
from segtrain.inference.forward import EAGER_PASSES, Forward
from segtrain.types import SegLogits

PASSES = EAGER_PASSES + 3


class Counted(nn.Module):
    """Counts what Python does, which a replay leaves out."""

    def __init__(self):
        super().__init__()
        self.conv, self.calls = nn.Conv2d(3, 4, 3, padding=1), 0

    def forward(self, images):
        self.calls += 1
        return SegLogits(self.conv(images))

    small_logits = forward


@pytest.fixture
def graphs(monkeypatch):
    """How often a graph was recorded; the tensors of a CPU count as those of a device."""
    made = []

    @contextmanager
    def record(graph, **_):
        made.append(graph)
        with graph:
            yield

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", record)
    monkeypatch.setattr(forward, "_is_on_cuda", lambda images: True)
    return made


def images(*shape):
    return torch.randn(shape or (2, 3, 5, 6))


@torch.no_grad()
@pytest.mark.parametrize("what", ["logits", "small_logits"])
def test_replays_give_what_calls_give(graphs, what):
    model = Counted().eval()
    passes = [getattr(Forward(model), what)] * PASSES
    inputs = [images() for _ in passes]
    found = [one(x, None) for one, x in zip(passes, inputs, strict=True)]
    # Each result is its own: the next replay has not written over it.
    assert all(torch.equal(y, model.conv(x)) for x, y in zip(inputs, found, strict=True))
    assert (model.calls, len(graphs)) == (EAGER_PASSES + 1, 1)


@torch.no_grad()
def test_new_weights_are_those_of_the_replay(graphs):
    """As in a training, which changes them in place between two evaluations."""
    model = Counted().eval()
    call, x = Forward(model), images()
    for _ in range(PASSES):
        call.logits(x, None)
    model.conv.weight.mul_(2)
    assert torch.equal(call.logits(x, None), model.conv(x))
    assert model.calls == EAGER_PASSES + 1


@torch.no_grad()
def test_each_shape_layout_and_precision_has_its_graph_up_to_some(graphs, monkeypatch):
    monkeypatch.setattr(forward, "_MOST_GRAPHS", 4)
    model = Counted().eval()
    call, last = Forward(model), images(2, 3, 5, 6).contiguous(memory_format=torch.channels_last)
    cases = [(images(), None), (last, None), (images(), torch.bfloat16), (images(1, 3, 4, 4), None)]
    for x, dtype in [*cases, (images(1, 3, 9, 9), None)] * PASSES:
        with torch.autocast("cpu", dtype, enabled=dtype is not None):
            wanted = model.conv(x).float()
        assert torch.equal(call.logits(x, dtype), wanted)
    assert len(graphs) == 4


@torch.no_grad()
@pytest.mark.parametrize("reason", ["a hook", "many pixels", "not recordable"])
def test_what_a_replay_would_lose_is_called_each_time(graphs, monkeypatch, reason):
    model, seen = Counted().eval(), []
    if reason == "a hook":
        model.conv.register_forward_hook(lambda *_: seen.append(1))
    elif reason == "many pixels":
        monkeypatch.setattr(forward, "_MOST_PIXELS", 59)
    else:

        def refuse(graph, **_):
            raise RuntimeError("operation not permitted when stream is capturing")

        monkeypatch.setattr(torch.cuda, "graph", refuse)
    call = Forward(model)
    for _ in range(PASSES):
        x = images()
        assert torch.equal(call.logits(x, None), model.conv(x))
    assert (model.calls, graphs) == (PASSES, [])
    assert len(seen) == (2 * PASSES if reason == "a hook" else 0)
