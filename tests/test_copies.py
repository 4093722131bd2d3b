"""Copies beside the computation, on streams that only write down what they were asked for."""

from contextlib import contextmanager
from types import SimpleNamespace

import pytest
import torch

from segtrain.distributed.copies import CopyStream


class Stream:
    def __init__(self, name, asked):
        self.name, self.asked = name, asked

    def wait_stream(self, other):
        self.asked.append(f"{self.name} waits for {other.name}")


@pytest.fixture
def asked(monkeypatch):
    """`lines`: what was asked for, in order; `now`: streams, of which the last is current."""
    lines = []
    computing, copying = Stream("computing", lines), Stream("copying", lines)
    now = [computing]

    @contextmanager
    def stream(inner):
        now.append(inner)
        yield
        now.pop()

    monkeypatch.setattr(torch.cuda, "Stream", lambda device: copying)
    monkeypatch.setattr(torch.cuda, "stream", stream)
    monkeypatch.setattr(torch.cuda, "current_stream", lambda device: now[-1])
    return SimpleNamespace(lines=lines, now=now)


class Arrived:
    def __init__(self, name, asked):
        self.name, self.asked = name, asked
        asked.lines.append(f"{name} is copied by {asked.now[-1].name}")

    def record_stream(self, stream):
        self.asked.lines.append(f"{self.name} is kept for {stream.name}")


def test_work_waits_for_copies_and_their_memory_for_the_work(asked):
    with CopyStream(torch.device("cuda")).copying() as arrived:
        arrived += [Arrived(name, asked) for name in ("images", "labels")]
    assert asked.now[-1].name == "computing"
    assert asked.lines == [
        "images is copied by copying",
        "labels is copied by copying",
        "computing waits for copying",
        "images is kept for computing",
        "labels is kept for computing",
    ]


def test_on_a_cpu_nothing_is_asked_for(asked):
    with CopyStream(torch.device("cpu")).copying() as arrived:
        arrived.append(Arrived("images", asked))
    assert asked.lines == ["images is copied by computing"]
