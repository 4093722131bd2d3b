"""Groups of ranks are made by all ranks alike: with NCCL, one that stays away stops all others."""

import os
from datetime import timedelta

import pytest
import torch
import torch.distributed as torch_dist
from torch import nn
from torch.testing._internal.distributed.fake_pg import FakeStore

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.norm import SyncBatchNorm2d, make_groups, placed
from segtrain.training.state import make_state

C = 2
WORLD = 4
# The machines as numbers of ranks; and groups that a layer of a user might have.
MACHINES = (3, 1)
OWN = [(0, 3), (1, 2)]


def recorded_calls():
    """Lets `new_group` note its ranks and timeout."""
    calls, new_group = [], torch_dist.new_group

    def record(ranks, *, timeout):
        calls.append((tuple(ranks), timeout))
        return new_group(ranks, timeout=timeout)

    torch_dist.new_group = record
    return calls


def calls_of_rank():
    """For each layer, the calls of `new_group` at set-up; and those of two forward passes."""
    calls = recorded_calls()
    machine = [i for i, size in enumerate(MACHINES) for _ in range(size)]
    here = machine[dist.rank()]
    os.environ["LOCAL_WORLD_SIZE"] = str(MACHINES[here])
    os.environ["LOCAL_RANK"] = str(dist.rank() - machine.index(here))
    # Each rank has 3 images.
    layers = {images: SyncBatchNorm2d(C, images=images) for images in (1, 3, 4, 6, 12)}
    layers["node"] = SyncBatchNorm2d(C, process_group="node")
    mine = next(ranks for ranks in OWN if dist.rank() in ranks)
    layers["own"] = SyncBatchNorm2d(C, process_group=mine)
    layers["all"] = SyncBatchNorm2d(C)
    made = {}
    for name, layer in layers.items():
        dist._groups.clear()
        with placed([3] * WORLD):
            make_groups(nn.Sequential(layer, nn.ReLU()))
            made[name] = list(calls)
            calls.clear()
            for _ in range(2):
                layer(torch.randn(3, C, 2, 2))
        assert not calls
    return made


# Of each layer, the groups of more than one rank that are not all.
GROUPS = {6: [(0, 1), (2, 3)], "node": [(0, 1, 2)], "own": OWN}


def test_every_rank_makes_every_group_in_the_same_order(run_ranks):
    ranks = run_ranks(WORLD, calls_of_rank)
    assert all(made == ranks[0] for made in ranks)
    limit = timedelta(seconds=60)  # that of the ranks of the tests
    for name, calls in ranks[0].items():
        assert calls == [(group, limit) for group in GROUPS.get(name, [])], name


@pytest.fixture
def nccl_like():
    """Rank 0 of four, in a group with a device bound to it; the calls of `new_group`."""
    new_group = torch_dist.new_group
    torch_dist.init_process_group("fake", rank=0, world_size=4, store=FakeStore())
    torch_dist.distributed_c10d._get_default_group().bound_device_id = torch.device("cuda", 0)
    yield recorded_calls()
    torch_dist.new_group = new_group
    torch_dist.destroy_process_group()


def test_a_group_that_not_all_have_made_is_an_error(nccl_like):
    layer = SyncBatchNorm2d(C, process_group=(0, 1))
    with pytest.raises(RuntimeError, match=r"ranks \[0, 1\] does not exist: call .*make_groups"):
        layer(torch.randn(1, C, 2, 2))


def test_a_group_of_one_rank_needs_no_group(nccl_like):
    assert dist.group_size(dist.group_of((0,))) == 1
    assert dist.all_reduce_sum(torch.ones(2), dist.group_of((0,))).tolist() == [1, 1]
    assert nccl_like == []


def test_training_makes_its_groups_at_set_up(nccl_like, monkeypatch):
    monkeypatch.setattr(dist, "all_gather_object", lambda value, group=None: [value] * 4)
    monkeypatch.setattr(dist, "broadcast_from_rank0", lambda tensors: None)
    config = Config(
        model={"arch": "pspnet", "backbone": "resnet18", "head_channels": 8, "aux_channels": 8},
        data={"layout": "voc", "root": "nowhere", "classes": "voc"},
        norm={"images": 2},
        train={"batch_size": 4},
    )
    model = build_model(config.model, num_classes=3, norm=make_norm(config.norm))
    make_state(model, config, torch.device("cpu"))
    assert [ranks for ranks, *_ in nccl_like] == [(0, 1)]
