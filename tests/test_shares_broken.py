"""Without any one of the sums that know no grouping, the number of ranks shows in the bits.

Otherwise test_shares.py would prove nothing. One rank has all shares; of two, the first has three
of five, so that ((a + b) + c) + (d + e) stands against (((a + b) + c) + d) + e.

Most of it runs in float64. Statistics and losses are added up in float64 anyway, and rounding them
to float32 afterwards hides almost every difference in a short run.
"""

import copy
import threading
from functools import partial, reduce

import pytest
import torch
from experiments import experiment, trained_bits, write_config

from segtrain.distributed import collectives as dist
from segtrain.distributed import virtual_ranks
from segtrain.distributed.shares import Shares
from segtrain.training.exact_sum import ExactGradientSum

BASE = {
    "augment": {"crop_size": [25, 33]},
    "model": {"num_stages": 2, "head_channels": 8, "aux_channels": 8, "output_stride": 8},
    "train": {"steps": 1, "batch_size": 7, "shares": 5, "precision": "float64"},
}
SETTINGS = {
    # The gradient of a mean over pixels contains their number alone, that of dice all of its sums.
    "dice": {
        "loss": {"kind": "dice", "also": [{"kind": "lovasz", "lovasz_per_image": False}]},
        "norm": {"precise_batches": 1},
    },
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
            (result,) = run_ranks(1, broken_bits, "nothing", config, directory / setting)
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
    "pass weights": shares_sum,
    "precise statistics": shares_sum,
    "mining": mining,
    "sorting": sorting,
    "threads": threads,
}


def broken_bits(sabotage, config, directory):
    SABOTAGES[sabotage]()
    return trained_bits(config, directory)


@pytest.mark.parametrize(
    ("sabotage", "setting"),
    [
        ("nothing", "dice"),
        ("nothing", "mining"),
        ("norm forward", "dice"),
        ("norm backward", "dice"),
        ("loss", "dice"),
        ("gradients", "dice"),
        ("threads", "dice"),
        ("pass weights", "mining"),
        ("mining", "mining"),
        ("sorting", "dice"),
        ("precise statistics", "dice"),
    ],
)
def test_without_any_of_them_the_ranks_part(run_ranks, tmp_path, alone, sabotage, setting):
    """The optimizer holds the gradients of the last step, which precise statistics follow."""
    config, one = alone(setting)
    two, _ = run_ranks(2, broken_bits, sabotage, config, tmp_path / "run")
    assert two.keys() == one.keys()
    apart = {name for name in one if two[name] != one[name]}
    if sabotage == "nothing":
        assert apart == set()
    else:
        assert "model" in apart
        assert ("optimizer" in apart) == (sabotage != "precise statistics")
