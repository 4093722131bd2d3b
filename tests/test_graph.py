"""Replayed steps beside eager ones, by a CPU that records and replays as a CUDA graph does.

The stand-in knows what a graph knows: operations, the memory of their tensors, and Python numbers
as they were. So whatever a step does besides, or with other numbers, is missing in the replay.
"""

from contextlib import contextmanager, nullcontext
from unittest.mock import Mock

import pytest
import torch
from test_compile import small_model
from test_recorded import CPU, SIZE, N, batches, config_of
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from segtrain.errors import ExecutionError
from segtrain.models.precision import float32_products
from segtrain.norm import SyncBatchNorm
from segtrain.training import graph
from segtrain.training.graph import EAGER_STEPS, GraphStep, kept_tensors, why_not
from segtrain.training.sample_losses import SampleLosses
from segtrain.training.state import make_state
from segtrain.training.step import TrainStep
from segtrain.training.step_sync import StepSync

STEPS = EAGER_STEPS + 4
OPTIONS = [
    *((), ("adamw",), ("muon",), ("average", "clipping"), ("microbatches", "MixUp"), ("mining",)),
    *(("float16", "adamw"), ("bfloat16",), ("groups of images",), ("recomputed",)),
    *(("sample losses", "microbatches"), ("decoupled decay", "rates of layers"), ("zeros",)),
    *(("lovasz", "two losses"), ("sharpness aware", "average", "muon"), ("float64", "warmup")),
]


def tensors(values):
    return [x for x in tree_leaves(values) if isinstance(x, torch.Tensor)]


class Recorded(TorchDispatchMode):
    """What was called, with which tensors; `replay` does it again in the same memory."""

    def __init__(self):
        super().__init__()
        self.calls = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = self.called(function, args, kwargs or {})
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def called(self, function, args, kwargs):
        return function(*args, **kwargs)

    def pool(self):
        return None

    def reset(self):
        self.calls.clear()

    @torch.no_grad()
    def replay(self):
        for function, args, kwargs, out in self.calls:
            again = self.called(function, args, kwargs)
            for kept, found in zip(tensors(out), tensors(again), strict=True):
                if kept.data_ptr() != found.data_ptr():  # neither a view nor in place
                    kept.copy_(found)


class Graphs(list):
    """The graphs that were recorded; recording changes nothing, as on a device."""

    state = None

    def watch(self, state):
        """Of the training that may be recorded next."""
        self.state = state

    @contextmanager
    def graph(self, recorded, **_):
        # What torch's AdamW asks on a device, and nowhere else.
        assert all(group.get("capturable", True) for group in self.state.optimizer.param_groups)
        before = [tensor.clone() for tensor in changes(self.state)]
        with recorded:
            yield
        with torch.no_grad():
            for tensor, value in zip(changes(self.state), before, strict=True):
                tensor.copy_(value)
        self.append(recorded)


@pytest.fixture
def graphs(monkeypatch):
    made = Graphs()
    monkeypatch.setattr(torch.cuda, "CUDAGraph", Recorded)
    monkeypatch.setattr(torch.cuda, "graph", made.graph)
    return made


def changes(state):
    """All that a step changes."""
    measured = [] if state.sample_losses is None else [state.sample_losses.recent]
    scale = [state.scaler._scale, state.scaler._growth_tracker] if state.scaler.is_enabled() else []
    return [*kept_tensors(state), *measured, *scale]


def trained(
    config,
    device=CPU,
    *,
    replayed=False,
    watch=lambda state: None,
    between=None,
    around=nullcontext,
):
    """Losses and norms of all steps, and what they leave.

    watch: is called with the state once. between: with each step's number and the state after it.
    around: each step.
    """
    torch.manual_seed(0)
    state = make_state(small_model(config), config, device, capturable=True)
    watch(state)
    if config.log.sample_losses:
        state.sample_losses = SampleLosses("abcd", 4, steps=STEPS, device=device)
    sync = StepSync(lambda: False, overflow_allowed=config.train.precision == "float16")
    step = TrainStep(state, config, device, sync)
    step, results = GraphStep(step, state) if replayed else step, []
    for number in range(STEPS):
        local = step.local(list(batches(config, number)))
        with float32_products(config.train), around():
            left = step(local)
        results.append(step.done(local, left))
        if between is not None:
            between(number, state)
    sync.check_finite()
    numbers = [(r.step, r.loss.item(), r.aux_loss.item(), r.grad_norm.item()) for r in results]
    return numbers, changes(state)


@pytest.mark.parametrize("names", OPTIONS, ids=" and ".join)
def test_replayed_steps_are_eager_ones_to_the_last_bit(graphs, names):
    config = config_of(names)
    numbers, left = trained(config)
    found, kept = trained(config, replayed=True, watch=graphs.watch)
    assert found == numbers
    assert all(map(torch.equal, kept, left))
    assert len(graphs) == 1


def test_each_shape_has_its_graph_and_is_eager_at_first(graphs):
    """SAM takes a second gradient in every other step here, which is another shape."""
    config = config_of(["sharpness aware"])
    optim = config.optim.model_copy(update={"sam_every": 2})
    config = config.model_copy(update={"optim": optim})
    found, _ = trained(config, replayed=True, watch=graphs.watch)
    assert found == trained(config)[0]
    # Seven steps: four plain ones, of which the last is replayed, three with a second gradient.
    assert (STEPS, EAGER_STEPS, len(graphs)) == (7, 3, 1)


def test_the_memory_that_a_graph_reads_is_one_batch_as_stored(graphs, monkeypatch):
    inputs, copy = [], graph._copy
    monkeypatch.setattr(graph, "_copy", lambda local: inputs.append(copy(local)) or inputs[-1])
    config = config_of([])
    trained(config, replayed=True, watch=graphs.watch)
    (kept,) = inputs
    pixels = N * SIZE[0] * SIZE[1]
    masks = N * (config.model.head_channels + config.model.aux_channels) * 4
    numbers = 4 * 8 + 3 * 8
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

    config = config_of(["average"])
    numbers, left = trained(config, between=between)
    found, kept = trained(config, replayed=True, watch=graphs.watch, between=between)
    assert found == numbers
    assert all(map(torch.equal, kept, left))
    assert len(graphs) == 2


@pytest.mark.parametrize(
    ("place", "names"),
    [
        ("update", ()),
        ("update", ("sharpness aware", "average")),
        ("sync_running_stats", ("microbatches", "groups of images")),
    ],
)
def test_where_recording_fails_training_goes_on_without(graphs, monkeypatch, capsys, place, names):
    """In the midst of the step, with some gradients and statistics there already."""
    numbers, left = trained(config_of(names))

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
    found, kept = trained(config_of(names), replayed=True, watch=graphs.watch)
    assert found == numbers
    assert all(map(torch.equal, kept, left))
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
    state.shares = object()
    assert "train.shares" in why_not(config, state, cuda)
