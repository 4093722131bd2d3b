"""The promise: the number of ranks does not show in the result."""

import numpy as np
import pytest
import torch
from experiments import experiment, losses, train, write_config

from segtrain.checkpoint.format import load
from segtrain.distributed import collectives as dist

STEPS = 12


def everything(data, precision, backbone="resnet18"):
    """All that could tell the ranks apart at once, besides what `experiment` has."""
    return experiment(
        data,
        model={"backbone": backbone},
        augment={"crop_size": [33, 41]},
        loss={
            "kind": "ohem",
            "ohem_threshold": 0.3,
            "ohem_min_kept": 4500,  # of 6765 pixels: more than any of 2 ranks has
            "class_weights": [1.0, 2.0, 0.5, 1.5],
        },
        train={"steps": STEPS, "precision": precision},
        optim={"clip_grad_norm": 1.0, "ema_decay": 0.9},
    )


def curve(run_ranks, tmp_path, options, ranks, function=train):
    """The losses of every step, and the gradients' norms."""
    config = write_config(tmp_path / f"{ranks}.yaml", options)
    directory = tmp_path / f"run{ranks}"
    assert set(run_ranks(ranks, function, config, directory)) == {0}
    return np.array(losses(directory)), np.array(losses(directory, "train/grad_norm"))


def record(tmp_path, ranks):
    return load(tmp_path / f"run{ranks}" / "checkpoints" / "last.pt")


@pytest.mark.parametrize("many", [(2, 3), pytest.param((4,), marks=pytest.mark.slow)])
def test_ranks_train_alike_with_everything_at_once(run_ranks, tmp_path, data, many):
    """5 images are 3 + 2, 2 + 2 + 1 and 2 + 1 + 1 + 1. Augmentation, dropout, auxiliary loss,
    mining, class weights, clipping and averaged weights are on, in float64."""
    options = everything(data, "float64")
    one, norms = curve(run_ranks, tmp_path, options, 1)
    assert len(one) == STEPS
    assert one[-5:].mean() < 0.97 * one[:5].mean()
    assert (norms > 1).any()  # so there is something to clip
    for ranks in many:
        curve_of_many, norms_of_many = curve(run_ranks, tmp_path, options, ranks)
        np.testing.assert_allclose(curve_of_many, one, rtol=1e-9, atol=0)
        np.testing.assert_allclose(norms_of_many, norms, rtol=1e-7, atol=0)
        got, wanted = record(tmp_path, ranks), record(tmp_path, 1)
        for weights, expected in ((got.model, wanted.model), (got.average, wanted.average)):
            torch.testing.assert_close(weights, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.parametrize("kind", ["cross_entropy", "dice"])
def test_adamw_accumulation_mixing_and_another_model_do_not_see_the_ranks(
    run_ranks, tmp_path, data, kind
):
    options = experiment(
        data,
        data={"class_uniform": 0.4},
        augment={"crop_size": [25, 33], "mixup_alpha": 3.0, "class_mix_prob": 0.5},
        train={"steps": 3, "accumulate_steps": 2, "batch_size": 7},
        optim={"kind": "adamw", "lr": 1e-3, "clip_grad_norm": 1.0, "ema_decay": 0.9},
        model={"arch": "deeplabv3plus", "backbone": "mobilenet_v2", "aux_head": False},
        loss={"kind": kind},
    )
    options["model"].pop("aux_channels")
    one, _ = curve(run_ranks, tmp_path, options, 1)
    three, _ = curve(run_ranks, tmp_path, options, 3)
    np.testing.assert_allclose(three, one, rtol=1e-9, atol=0)


def train_without(place, config, directory):
    """Trains with one of the collectives gone."""
    if place == "norm":
        from segtrain.norm import functional

        functional.dist = type(
            "Alone", (), {"all_reduce_sum": staticmethod(lambda t, group=None: t)}
        )
    elif place == "loss":
        from segtrain.training import step_sync

        step_sync.dist = type("Alone", (), {"all_reduce_sum": staticmethod(lambda t: t)})
    elif place == "mining":
        from segtrain.training.losses import ohem

        ohem.dist = type("Alone", (), {"all_reduce_sum": staticmethod(lambda t: t)})
    elif place == "gradient":
        dist.start_sum = lambda tensor: lambda: None
    return train(config, directory)


def test_the_losses_show_when_a_collective_is_missing(run_ranks, tmp_path, data):
    """Otherwise the tests above would prove nothing."""
    options = everything(data, "float64", "mobilenet_v2")
    options["train"]["steps"] = 3
    options["loss"]["ohem_threshold"] = 0.0  # at the start the number kept decides
    one, _ = curve(run_ranks, tmp_path, options, 1)
    config = write_config(tmp_path / "broken.yaml", options)
    for place in ("norm", "loss", "mining", "gradient"):
        run_ranks(2, train_without, place, config, tmp_path / place)
        broken = np.array(losses(tmp_path / place))
        assert np.abs(broken / one - 1).max() > 1e-6, place


def train_in_order(order, config, directory):
    from segtrain.commands.train import setup

    setup.indices_of_rank = lambda *_: [order]
    return train(config, directory)


@pytest.mark.parametrize(
    "ranks", [2, pytest.param(3, marks=pytest.mark.slow), pytest.param(4, marks=pytest.mark.slow)]
)
def test_float32_runs_differ_by_rounding_only(run_ranks, tmp_path, data, ranks):
    """Rounding is amplified by training; so the yardstick is one process with the images of each
    batch in another order, which changes nothing but the order of additions."""
    options = everything(data, "float32")
    one, _ = curve(run_ranks, tmp_path, options, 1)
    config = write_config(tmp_path / "order.yaml", options)
    orders = [[4, 3, 2, 1, 0], [2, 0, 4, 1, 3]]
    yardsticks = []
    for i, order in enumerate(orders):
        run_ranks(1, train_in_order, order, config, tmp_path / f"order{i}")
        yardsticks.append(np.abs(np.array(losses(tmp_path / f"order{i}")) / one - 1))
    yardstick = max(y.max() for y in yardsticks)

    many, _ = curve(run_ranks, tmp_path, options, ranks)
    apart = np.abs(many / one - 1)
    assert apart[0] < 1e-6
    # Ranks are one more order of additions. Which of two equals comes out ahead is a coin toss, so
    # the bound leaves room for it; a real difference would show in the first step.
    assert apart.max() <= 2 * yardstick
