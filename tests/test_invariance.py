"""The promise: the number of ranks does not show in the result."""

import numpy as np
import pytest
import torch
from experiments import experiment, last, losses, stopped_after, train, write_config

STEPS = 4


def curve(run_ranks, tmp_path, options, ranks):
    """The losses of every step, and the gradients' norms."""
    config = write_config(tmp_path / f"{ranks}.yaml", options)
    directory = tmp_path / f"run{ranks}"
    assert set(run_ranks(ranks, train, config, directory)) == {0}
    return np.array(losses(directory)), np.array(losses(directory, "train/grad_norm"))


def test_ranks_train_alike_with_everything_at_once(run_ranks, tmp_path, data):
    """5 images are 3 + 2 and 2 + 2 + 1. Augmentation, dropout, auxiliary loss, mining, class
    weights, clipping and averaged weights are on, in float64."""
    options = experiment(
        data,
        augment={"crop_size": [33, 41]},
        loss={
            "kind": "ohem",
            "ohem_threshold": 0.3,
            "ohem_min_kept": 4500,  # of 6765 pixels: more than any of 2 ranks has
            "class_weights": [1.0, 2.0, 0.5, 1.5],
        },
        train={"steps": STEPS},
        optim={"clip_grad_norm": 0.93, "ema_decay": 0.9},
    )
    one, norms = curve(run_ranks, tmp_path, options, 1)
    assert len(one) == STEPS
    assert (norms > 0.93).any()  # so there is something to clip
    wanted = last(tmp_path / "run1")
    for ranks in (2, 3):
        curve_of_many, norms_of_many = curve(run_ranks, tmp_path, options, ranks)
        np.testing.assert_allclose(curve_of_many, one, rtol=1e-9, atol=0)
        np.testing.assert_allclose(norms_of_many, norms, rtol=1e-7, atol=0)
        got = last(tmp_path / f"run{ranks}")
        for weights, expected in ((got.model, wanted.model), (got.average, wanted.average)):
            torch.testing.assert_close(weights, expected, rtol=1e-7, atol=1e-9)


@pytest.mark.fault(44)
def test_a_run_that_goes_on_on_fewer_ranks_does_not_show_them_either(run_ranks, tmp_path, data):
    """AdamW, accumulation, mixing and another model; three ranks are stopped, two go on."""
    options = experiment(
        data,
        data={"class_uniform": 0.4},
        augment={"crop_size": [25, 33], "class_mix_prob": 0.5},
        train={"steps": 4, "accumulate_steps": 2, "batch_size": 7},
        optim={"kind": "adamw", "lr": 1e-3, "clip_grad_norm": 1.0, "ema_decay": 0.9},
        model={"arch": "deeplabv3plus"},
        loss={"also": [{"kind": "dice"}]},
    )
    config = write_config(tmp_path / "c.yaml", options)
    alone, run = tmp_path / "alone", tmp_path / "run"
    assert run_ranks(1, train, config, alone) == [0]
    assert run_ranks(3, stopped_after, 1, config, run) == [143] * 3
    assert 1 <= last(run).step < 4
    assert run_ranks(2, train, config, run, True) == [0] * 2
    np.testing.assert_allclose(losses(run), losses(alone), rtol=1e-9, atol=0)
    assert len(losses(run)) == 4
    torch.testing.assert_close(last(run).average, last(alone).average, rtol=1e-6, atol=1e-8)


@pytest.mark.fault(69)
@pytest.mark.parametrize(
    "sections",
    [
        {
            "loss": {
                "kind": "ohem",
                "ohem_min_kept": 700,
                "also": [
                    {"kind": "dice"},
                    {"kind": "lovasz_batch"},
                    {"kind": "lovasz"},
                ],
            },
            "train": {"batch_size": 2},
        },
        {
            "model": {"arch": "deeplabv3plus", "recompute": "norm"},
            "norm": {"images": 2, "precise_batches": 1},
            "train": {"batch_size": 4, "accumulate_steps": 2},
        },
        {
            "model": {"backbone": "mobilenet_v3_large"},
            "train": {"batch_size": 5, "accumulate_steps": 2, "virtual_ranks": 2},
        },
    ],
)
def test_ranks_without_an_image_train_alike(run_ranks, tmp_path, data, sections):
    augment = {"crop_size": [25, 33]} | sections.get("augment", {})
    train = {"steps": 2} | sections["train"]
    options = experiment(data, **sections | {"augment": augment, "train": train})
    one, norms = curve(run_ranks, tmp_path, options, 1)
    found, norms_found = curve(run_ranks, tmp_path, options, 3)
    idle = 3 - options["train"]["batch_size"] // options["train"].get("accumulate_steps", 1)
    said = f"warning: train.batch_size: {idle} of 3 ranks have no image"
    assert said in (tmp_path / "run3/train.log").read_text()
    np.testing.assert_allclose(found, one, rtol=1e-9, atol=0)
    np.testing.assert_allclose(norms_found, norms, rtol=1e-7, atol=0)
    torch.testing.assert_close(last(tmp_path / "run3").model, last(tmp_path / "run1").model)
