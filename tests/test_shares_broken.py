"""Without any one of the sums that know no grouping, the number of ranks shows in the bits.

Otherwise test_shares.py would prove nothing. One rank has all shares; of two, the first has three
of five, so that ((a + b) + c) + (d + e) stands against (((a + b) + c) + d) + e.

Most of it runs in float64. Statistics and losses are added up in float64 anyway, and rounding them
to float32 afterwards hides almost every difference in a short run.
"""

import copy
import shutil
import threading
from functools import partial, reduce

import pytest
import torch
from experiments import (
    bits,
    experiment,
    last,
    stopped_after,
    train,
    trained_bits,
    write_config,
)

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.partition import partition, shares_of_ranks
from segtrain.distributed.shares import Shares
from segtrain.training.exact_sum import ExactGradientSum

BASE = {
    "augment": {"crop_size": [25, 33]},
    "model": {
        "backbone": "mobilenet_v2",
        "head_channels": 8,
        "aux_channels": 8,
        "output_stride": 16,
    },
    "train": {"steps": 1, "batch_size": 7, "shares": 5, "precision": "float64"},
}
SETTINGS = {
    # The gradient of a mean over pixels contains their number alone, that of dice all of its sums.
    "dice": {"loss": {"kind": "dice"}, "norm": {"precise_batches": 1}},
    # In float64, sums of float32 weights are exact unless the weights are as far apart as these.
    # The threshold of 0 leaves it to the number of hard pixels which ones are kept.
    # MixUp has weights of the passes for both labels.
    "mining": {
        "augment": {"mixup_alpha": 4.0},
        "loss": {
            "kind": "ohem",
            "ohem_threshold": 0.0,
            "ohem_min_kept": 3000,
            "class_weights": [1.3e7, 1.1e-9, 1.7e-5, 0.7],
        },
        "train": {"batch_size": 10, "accumulate_steps": 2},
    },
    "sorting": {
        "loss": {
            "kind": "lovasz",
            "lovasz_per_image": False,
            "also": [{"kind": "ohem", "ohem_fraction": 0.2}],
        }
    },
    # Batch norm would carry what is not finite from one share to all others.
    "overflow": {
        "norm": {"kind": "group", "num_groups": 4},
        "train": {"precision": "float16", "steps": 2},
        "optim": {"clip_grad_norm": 1.0},
    },
}


def config_for(data, directory, setting):
    options = experiment(data)
    options["train"] = {}
    for sections in (BASE, SETTINGS[setting]):
        for section, values in copy.deepcopy(sections).items():
            options.setdefault(section, {}).update(values)
    return write_config(directory / f"{setting}.yaml", options)


@pytest.fixture(scope="module")
def alone(run_ranks, tmp_path_factory, data):
    """`alone(setting)`: the config, and the bits and curves of one rank."""
    directory, found = tmp_path_factory.mktemp("alone"), {}

    def of(setting):
        if setting not in found:
            config = config_for(data, directory, setting)
            (result,) = run_ranks(1, broken_bits, "nothing", setting, config, directory / setting)
            found[setting] = config, result
        return found[setting]

    return of


# Sabotages. Each runs in every rank before training.


def grouped_sum(tensor, group=None):
    """The sum over the shares of a rank, and then over ranks."""
    virtual = virtual_ranks.current()
    if virtual is None:
        return dist._sum_processes(tensor, group)
    whole = virtual.meet(tensor, lambda parts: dist._sum_processes(reduce(torch.add, parts), None))
    return tensor.copy_(whole)


class Collectives:
    """The module of collectives, some of them replaced."""

    def __init__(self, **replaced):
        vars(self).update(replaced)

    def __getattr__(self, name):
        return getattr(dist, name)


def nothing():
    pass


def norm(function):
    """Inside this function of batch norm: forward or backward."""
    from segtrain.norm import functional

    inside, whole = threading.local(), getattr(functional, function)

    def marked(*args, **kwargs):
        inside.now = True
        try:
            return whole(*args, **kwargs)
        finally:
            inside.now = False

    def all_reduce_sum(tensor, group=None):
        here = getattr(inside, "now", False)
        return (grouped_sum if here else dist.all_reduce_sum)(tensor, group)

    setattr(functional, function, marked)
    functional.dist = Collectives(all_reduce_sum=all_reduce_sum)


def loss():
    from segtrain.training import step_sync

    step_sync.dist = Collectives(all_reduce_sum=grouped_sum)


def gradients():
    """Floats, not integers."""
    totals = {}

    def take(self, index, parameter):
        grad, parameter.grad = parameter.grad, None
        totals[index] = totals[index] + grad if index in totals else grad.clone()

    def finish(self):
        for index, total in sorted(totals.items()):
            self._parameters[index].grad = dist._sum_processes(total, None)
        totals.clear()
        self._last_largest = self._largest  # for the receipt
        return True

    ExactGradientSum._take, ExactGradientSum.finish = take, finish


def exponents():
    """They follow the largest gradient in the shares of rank 0, not in all."""
    from segtrain.training import exact_sum

    def all_gather(tensor):
        rows = dist.all_gather(tensor)
        return rows[:1].expand_as(rows)

    exact_sum.dist = Collectives(all_gather=all_gather)


def shares_sum():
    """Where it is used: the weights of the passes, and the precise statistics."""
    Shares.sum = lambda self, parts: dist._sum_processes(reduce(torch.add, parts), None)


def mining():
    """The limit between hard and easy pixels is that of the rank."""
    from segtrain.training.losses import ohem

    def all_reduce_sum(tensor):
        group = virtual_ranks.current()
        return group.meet(tensor, lambda parts: reduce(torch.add, parts)).clone()

    ohem.dist = Collectives(all_reduce_sum=all_reduce_sum)


def sorting():
    """The errors of the rank are sorted alone."""
    from segtrain.training.losses import lovasz

    lovasz.dist = Collectives(
        all_gather=lambda values: virtual_ranks.current().meet(values, torch.stack),
        group_rank=virtual_ranks.slot,
    )


def cut():
    """Ranks take even parts of the batch, 4 + 3 images and not 5 + 2, and cut them into shares."""
    from segtrain.data.sample import loader

    def parts_of_rank(total, rank, ranks, shares):
        mine = partition(total, ranks, rank)
        number = shares_of_ranks(shares, ranks)[rank]
        parts = [partition(len(mine), number, i) for i in range(number)]
        return [range(mine.start + part.start, mine.start + part.stop) for part in parts]

    from segtrain.distributed import shares

    loader.parts_of_rank = shares.parts_of_rank = parts_of_rank


def infinite_share():
    """No sabotage: in the first step, the gradient of the first share is infinite."""
    from segtrain.training import microbatches

    whole = microbatches._forward_backward

    def forward_backward(state, module, part, weight, *, step_sync):
        first = dist.rank() == 0 and virtual_ranks.slot() == 0
        if first and state.step == 0:
            weight = weight * torch.inf
        return whole(state, module, part, weight, step_sync=step_sync)

    microbatches._forward_backward = forward_backward


def overflow():
    """Each rank sees only in its own shares what is not finite."""
    from segtrain.training import exact_sum

    def all_gather(tensor):
        rows = dist.all_gather(tensor)
        rows = torch.where(rows.isfinite(), rows, 0)
        rows[dist.rank()] = tensor
        return rows

    exact_sum.dist = Collectives(all_gather=all_gather)


def threads():
    """Kernels cut the work of a share in two."""
    from segtrain.distributed import shares

    def in_two_threads(function):
        torch.set_num_threads(2)
        return function()

    shares._in_one_thread = in_two_threads


SABOTAGES = {
    "nothing": nothing,
    "norm forward": partial(norm, "_global_moments"),
    "norm backward": partial(norm, "_norm_gradients"),
    "loss": loss,
    "gradients": gradients,
    "exponents": exponents,
    "pass weights": shares_sum,
    "precise statistics": shares_sum,
    "mining": mining,
    "sorting": sorting,
    "cut": cut,
    "overflow": overflow,
    "threads": threads,
}


def broken_bits(sabotage, setting, config, directory):
    if setting == "overflow":
        infinite_share()
    SABOTAGES[sabotage]()
    return trained_bits(config, directory)


def parted(run_ranks, alone, directory, sabotage, setting):
    """The names of what differs between one rank and rank 0 of two."""
    config, one = alone(setting)
    two, _ = run_ranks(2, broken_bits, sabotage, setting, config, directory / "run")
    assert two.keys() == one.keys()
    return {name for name in one if two[name] != one[name]}


@pytest.mark.parametrize("setting", SETTINGS)
def test_without_sabotage_nothing_parts(run_ranks, tmp_path, alone, setting):
    assert parted(run_ranks, alone, tmp_path, "nothing", setting) == set()


@pytest.mark.parametrize(
    ("sabotage", "setting"),
    [
        ("norm forward", "dice"),
        ("norm backward", "dice"),
        ("loss", "dice"),
        ("gradients", "dice"),
        ("exponents", "dice"),
        ("cut", "dice"),
        ("threads", "dice"),
        ("pass weights", "mining"),
        ("mining", "mining"),
        ("mining", "sorting"),
        ("sorting", "sorting"),
        ("overflow", "overflow"),
    ],
)
def test_without_it_the_ranks_part(run_ranks, tmp_path, alone, sabotage, setting):
    """The optimizer holds the gradients of the last step."""
    apart = parted(run_ranks, alone, tmp_path, sabotage, setting)
    assert {"model", "optimizer"} <= apart


def test_without_it_precise_statistics_part(run_ranks, tmp_path, alone):
    apart = parted(run_ranks, alone, tmp_path, "precise statistics", "dice")
    assert "model" in apart
    assert "optimizer" not in apart


def forgetful(config, directory):
    """Goes on without the exponents of the checkpoint."""
    from segtrain.checkpoint import restore

    restore.restore_exponents = lambda *_: None
    return train(config, directory, resume=True)


def test_without_its_exponents_a_resumed_run_parts(run_ranks, tmp_path, data):
    """They follow the step before. In float32 most of what they cut off is rounded away anyway."""
    options = experiment(data, **copy.deepcopy(BASE))
    options["train"] |= {"steps": 5, "batch_size": 4, "shares": 2}
    config = write_config(tmp_path / "c.yaml", options)
    assert run_ranks(1, stopped_after, 1, config, tmp_path / "run") == [143]
    assert last(tmp_path / "run").step < 5
    shutil.copytree(tmp_path / "run", tmp_path / "forgetful")
    assert run_ranks(1, train, config, tmp_path / "run", True) == [0]
    assert run_ranks(1, forgetful, config, tmp_path / "forgetful") == [0]
    wanted, found = last(tmp_path / "run"), last(tmp_path / "forgetful")
    assert found.step == wanted.step == 5
    assert bits(found)["model"] != bits(wanted)["model"]
