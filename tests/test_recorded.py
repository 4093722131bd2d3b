"""A step is a function of tensors: no number of its operations changes from one to the next.

A CUDA graph would go on with the numbers of the step that it has recorded, without a word. So two
steps in a row are recorded here, each operation with its Python numbers, with every pair of options
that meet in a step.
"""

from collections import defaultdict
from contextlib import nullcontext
from functools import cache

import pytest
import torch
from covering import covering
from replays import CPU, OPTIONS, batches, config_of, small_model
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.models.precision import float32_products
from segtrain.training.optim.optimizer import may_be_captured
from segtrain.training.state import make_state
from segtrain.training.step import TrainStep
from segtrain.training.step_sync import StepSync

CUDA = torch.device("cuda")


class Record(TorchDispatchMode):
    """Every operation with its Python numbers and the shapes of its tensors."""

    def __init__(self):
        super().__init__()
        self.rows = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        leaves = tree_leaves((args, kwargs or {}))
        numbers = tuple(repr(x) for x in leaves if isinstance(x, int | float))
        shapes = tuple(tuple(x.shape) for x in leaves if isinstance(x, torch.Tensor))
        self.rows.append((str(function), numbers, shapes))
        return function(*args, **(kwargs or {}))


def changing(config, *, capturable):
    """The operations that are not the same in the fourth step as in the third."""
    torch.manual_seed(0)
    state = make_state(small_model(config), config, CPU, capturable=capturable)
    sync = StepSync(lambda: False, save_requested=lambda: state.step == 3)
    step, records = TrainStep(state, config, CPU, sync), []
    for number in range(4):
        local, record = step.local(list(batches(config, number))), Record()
        with float32_products(config.train), record if number > 1 else nullcontext():
            left = step(local)
        records.append(record.rows)
        step.done(local, left)
    third, fourth = records[-2:]
    assert len(third) == len(fourth) > 100
    return [(a, b) for a, b in zip(third, fourth, strict=True) if a != b]


@pytest.fixture(autouse=True)
def two_ranks(monkeypatch):
    """The way of several ranks, though every sum is over this one."""
    monkeypatch.setattr(dist, "_num_processes", lambda group=None: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group=None: None)
    monkeypatch.setattr(dist, "all_gather_object", lambda value, group=None: [value])
    monkeypatch.setattr(dist, "broadcast_from_rank0", lambda tensors: None)


@cache
def can_meet(chosen):
    """Not all go together, and float16 stays eager in some updates."""
    try:
        config = config_of(chosen)
        return may_be_captured(small_model(config), config, CUDA)
    except (ConfigError, ValueError):
        return False


def test_no_number_changes_from_step_to_step():
    groups = defaultdict(list)
    for name, sections in OPTIONS.items():
        ((section, values), *_) = sections.items()
        groups[section, next(iter(values))].append(name)  # the later would replace the earlier
    configs = [(), *covering([*map(tuple, groups.values())], can_meet, seed=0)]
    assert {name for chosen in configs for name in chosen} == {*OPTIONS}
    changed = {chosen: changing(config_of(chosen), capturable=True)[:2] for chosen in configs}
    assert {chosen: rows for chosen, rows in changed.items() if rows} == {}


@pytest.mark.parametrize("name", ["adamw", "muon", "average", "warmup"])
def test_as_a_processor_computes_them_they_do(name):
    """So the test above sees what it looks for."""
    assert changing(config_of([name]), capturable=False)
