"""Replayed steps beside eager ones, by a CPU that records and replays (see tools/replays.py)."""

from contextlib import contextmanager
from functools import cache
from unittest.mock import Mock

import pytest
import torch
from replays import (
    CPU,
    OPTIONS,
    SETS,
    SIZE,
    STEPS,
    Graphs,
    N,
    Recorded,
    changes,
    config_of,
    small_model,
    trained,
)

from segtrain.errors import ExecutionError
from segtrain.norm import SyncBatchNorm
from segtrain.training import graph
from segtrain.training.graph import EAGER_STEPS, why_not
from segtrain.training.state import make_state


@cache
def eagerly(names):
    """The numbers of steps that nobody records, and what they leave."""
    return trained(config_of(names))


def assert_as_eagerly(names, **how):
    """Replayed steps with these options are eager ones to the last bit."""
    numbers, left = eagerly(names)
    found, kept = trained(config_of(names), replayed=True, **how)
    assert found == numbers
    assert all(map(torch.equal, kept, left))


@pytest.fixture
def graphs(monkeypatch):
    made = Graphs()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    return made


# Each option once, with as many others as go together.
MANY = [
    (),
    ("adamw", "float16", "average", "warmup", "mining", "zeros"),
    ("muon", "bfloat16", "microbatches", "groups of images", "clipping", "lovasz", "two losses"),
    ("decay toward the start", "rates of layers", "float64", "focal", "recomputed"),
]
OTHERS = [
    pytest.param(names, marks=pytest.mark.slow("training", "norm", "models", "kernels"))
    for names in SETS
    if names not in MANY
]


@pytest.mark.parametrize("names", MANY + OTHERS, ids=" and ".join)
def test_replayed_steps_are_eager_ones_to_the_last_bit(graphs, names):
    assert {name for names in MANY for name in names} == {*OPTIONS}
    assert_as_eagerly(names, watch=graphs.watch)
    assert len(graphs) == 1


def test_each_shape_has_its_graph_and_is_eager_at_first(graphs, monkeypatch):
    def between(step, _):
        monkeypatch.setattr("replays.SIZE", SIZE if step % 2 else (9, 13))

    monkeypatch.setattr("replays.SIZE", SIZE)
    found, _ = trained(config_of([]), replayed=True, watch=graphs.watch, between=between)
    monkeypatch.setattr("replays.SIZE", SIZE)
    assert found == trained(config_of([]), between=between)[0]
    # Of seven steps four are of the first size, of which the last is replayed.
    assert (STEPS, EAGER_STEPS, len(graphs)) == (7, 3, 1)


def test_the_memory_that_a_graph_reads_is_one_batch_as_stored(graphs, monkeypatch):
    inputs, copy = [], graph._copy
    monkeypatch.setattr(graph, "_copy", lambda local: inputs.append(copy(local)) or inputs[-1])
    config = config_of([])
    trained(config, replayed=True, watch=graphs.watch)
    (kept,) = inputs
    pixels = N * SIZE[0] * SIZE[1]
    masks = N * (config.model.head_channels + config.model.aux_channels) * 4
    numbers = 2 * 8 + 2 * 8
    assert sum(tensor.nbytes for tensor in kept.tensors()) == pixels * (3 + 1) + masks + numbers


def with_other_data(state):
    weight = next(state.model.parameters())
    weight.data = weight.data.clone()


def with_another_buffer(state):
    norm = next(m for m in state.model.modules() if isinstance(m, SyncBatchNorm))
    norm.running_mean = norm.running_mean.clone()


def with_a_loaded_optimizer(state):
    state.optimizer.load_state_dict(state.optimizer.state_dict())


def with_another_average(state):
    state.average.model.load_state_dict(state.average.model.state_dict(), assign=True)
    for buffer in state.average.model.buffers():
        buffer.data = buffer.data.clone()


@pytest.mark.parametrize(
    "move",
    [with_other_data, with_another_buffer, with_a_loaded_optimizer, with_another_average],
)
def test_a_graph_whose_tensors_have_moved_is_recorded_again(graphs, move):
    """It would train weights that nobody sees any more."""

    def between(step, state):
        if step == EAGER_STEPS + 1:
            move(state)

    assert_as_eagerly(("average",), watch=graphs.watch, between=between)
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("place", "names"),
    [("update", ("average",)), ("sync_running_stats", ("microbatches", "groups of images"))],
)
def test_where_recording_fails_training_goes_on_without(graphs, monkeypatch, capsys, place, names):
    """In the midst of the step, with some gradients and statistics there already."""

    @contextmanager
    def graph(recorded, **_):
        with monkeypatch.context() as patched:
            broken = Mock(side_effect=RuntimeError("waits"))
            patched.setattr(f"segtrain.training.step.{place}", broken)
            before = [tensor.clone() for tensor in changes(graphs.state)]
            try:
                yield
            finally:
                with torch.no_grad():
                    for tensor, value in zip(changes(graphs.state), before, strict=True):
                        tensor.copy_(value)

    monkeypatch.setattr(torch.cuda, "graph", graph)
    assert_as_eagerly(names, watch=graphs.watch)
    said = capsys.readouterr().out
    assert said.count("cannot be recorded as a CUDA graph (waits); training goes on") == 1


def test_a_loader_worker_that_dies_while_a_step_is_recorded_is_what_is_told(monkeypatch, capsys):
    def graph(*_, **__):
        raise RuntimeError("DataLoader worker (pid 7) is killed by signal: Killed.")

    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", graph)
    with pytest.raises(ExecutionError, match=r"pid 7.*--resume"):
        trained(config_of([]), replayed=True)
    assert "cannot be recorded" not in capsys.readouterr().out


def test_where_steps_are_not_replayed_a_line_says_why():
    config, cuda = config_of([]), torch.device("cuda")
    state = make_state(small_model(config), config, CPU, capturable=True)
    train = config.train
    assert why_not(config, state, cuda) is None
    assert why_not(config, state, CPU) == ""
    for options, reason in (
        ({"graph": False}, ""),
        (
            {"virtual_ranks": 2},
            "train.virtual_ranks computes in threads, which wait for each other",
        ),
    ):
        other = config.model_copy(update={"train": train.model_copy(update=options)})
        assert why_not(other, state, cuda) == reason
    state.capturable = False
    assert "float16" in why_not(config, state, cuda)
    other = config.model_copy(update={"train": train.model_copy(update={"shares": 2})})
    assert "train.shares" in why_not(other, state, cuda)
