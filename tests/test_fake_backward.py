"""A whole backward pass on the meta device, where autograd works and reading a value is an error.

Batch norms take there what they take on CUDA. There is no autocast on this device.
"""

from contextlib import contextmanager

import pytest
import torch
import torch.distributed as torch_dist
from fake_device import RANKS, K, NoWaits, config, fake_batch
from test_fake_device import COUNTED, NORMS, SLOW
from torch.testing._internal.distributed.fake_pg import FakeStore

from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.norm import cuda_kernels, placed, sync_running_stats
from segtrain.training.losses import SegLoss
from segtrain.training.state import ModelWithLoss
from segtrain.training.step_sync import StepSync
from segtrain.types import DropoutMasks


@contextmanager
def meta_ranks(monkeypatch, ranks=RANKS):
    """Rank 0 of many on the meta device; yields what watches operations."""
    monkeypatch.setattr(cuda_kernels, "takes", lambda x: True)
    monkeypatch.setattr(cuda_kernels, "_constants", {})
    monkeypatch.setattr(torch, "is_autocast_enabled", lambda *_: False)
    monkeypatch.setattr(dist, "all_gather_object", lambda value, group=None: [value])
    torch_dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
    try:
        yield NoWaits()
    finally:
        torch_dist.destroy_process_group()


def backward_pass(settings, watch, ranks=RANKS):
    """Forward and backward pass, the latter under `watch`; returns the model."""
    with torch.device("meta"):
        model = build_model(settings.model, num_classes=K, norm=make_norm(settings.norm))
    model.train().to(memory_format=torch.channels_last)
    dist.make_groups([(0, 1)])
    criterion = SegLoss(settings.loss, torch.device("meta"))
    module = ModelWithLoss(model, criterion, settings.train)
    images, labels = fake_batch("meta")
    channels = model.dropout_channels
    masks = DropoutMasks(*(torch.ones(2, c, 1, 1, device="meta") for c in channels))
    with watch, placed([2] * ranks):
        sums = module(images.contiguous(memory_format=torch.channels_last), labels, masks)
        totals = StepSync(lambda: False).reduce(sums)
        sync_running_stats(model)
        objective = criterion.objective(sums, totals)
        watch.forget()
        objective.backward()
    return model


# Rows of COUNTED, with the kernels of a backward pass. Sides are no multiples of strides: two more
# for each resizing.
BACKWARD = [
    (COUNTED[0], 269, RANKS),
    (COUNTED[0], 269, 1024),
    pytest.param(COUNTED[2], 539, RANKS, marks=SLOW),
    pytest.param(COUNTED[4], 269, RANKS, marks=SLOW),
    pytest.param(COUNTED[5], 543, RANKS, marks=SLOW),
]


@pytest.mark.parametrize(("row", "launches", "ranks"), BACKWARD)
def test_a_backward_pass_launches_and_sends_what_it_did(monkeypatch, row, launches, ranks):
    """Among any number of ranks."""
    arch, backbone, _, layers, meetings, _ = row
    model = {"arch": arch, "backbone": backbone}
    settings = config(model=model, train={"batch_size": 2 * ranks})
    with meta_ranks(monkeypatch, ranks) as meta:
        built = backward_pass(settings, meta, ranks)
    assert len(meta.collectives) == meetings
    assert meta.launches.count("batch_norm_backward_reduce") == layers
    assert meta.launches.count("batch_norm_backward_elemt") == layers
    assert len([name for name in meta.launches if name != "fill_"]) == launches
    # Otherwise sums of gradients, and the optimizer, would have to copy them: also 1x1 kernels.
    assert [p.grad.stride() for p in built.parameters()] == [p.stride() for p in built.parameters()]


@pytest.mark.parametrize("norm", NORMS[1:], ids=lambda norm: "-".join(map(str, norm.values())))
def test_no_norm_makes_the_backward_pass_wait(monkeypatch, norm):
    start = {"init_from": "weights"} if norm == {"kind": "frozen"} else {}
    with meta_ranks(monkeypatch) as meta:
        built = backward_pass(config(norm=norm, train=start), meta)
    assert all(p.grad is not None for p in built.parameters())


@pytest.mark.parametrize("recompute", ["norm", "blocks"])
def test_recomputed_activations_take_no_more_collectives(monkeypatch, recompute):
    with meta_ranks(monkeypatch) as meta:
        backward_pass(config(model={"recompute": recompute}), meta)
    assert len(meta.collectives) == COUNTED[0][4]
