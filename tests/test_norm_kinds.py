"""The kinds of statistics that a config can ask for, alone and in training."""

import re

import pytest
import torch
from experiments import experiment, train, write_config
from torch import nn

from segtrain.checkpoint.format import load
from segtrain.config import ModelConfig, NormConfig
from segtrain.errors import ConfigError
from segtrain.models import build_model
from segtrain.models.norms import describe_norm, make_inference_norm, make_norm
from segtrain.norm import FrozenBatchNorm2d, SyncBatchNorm2d

C = 4
X = torch.randn(12, C, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


def test_frozen_statistics_stay_and_are_used_in_training():
    layer = FrozenBatchNorm2d(C).double()
    with torch.no_grad():
        layer.running_mean.fill_(2.0)
        layer.running_var.fill_(9.0)
    y = layer.train()(X)
    close(y, (X - 2) / (9 + 1e-5) ** 0.5)
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.num_batches_tracked == 0
    close(layer.running_mean, torch.full((C,), 2.0).double(), atol=0)


@pytest.mark.parametrize(
    ("options", "layer", "words"),
    [
        ({"momentum": 0.03}, SyncBatchNorm2d, "synchronized batch norm"),
        ({"images": 2, "running": "mean"}, SyncBatchNorm2d, "over groups of 2 images, .* the mean"),
        ({"kind": "frozen"}, FrozenBatchNorm2d, "frozen"),
        ({"kind": "group"}, nn.GroupNorm, "group norm, at most 32 groups"),
        ({"precise_batches": 8}, SyncBatchNorm2d, "precise over 8 batches"),
    ],
)
def test_the_config_chooses_the_layer_and_says_so(options, layer, words):
    config = NormConfig(**options)
    made = make_norm(config)(48)
    assert isinstance(made, layer)
    assert vars(config).items() >= {(k, v) for k, v in vars(made).items() if k in options}
    assert re.search(words, describe_norm(config))
    # What is loaded for evaluation has the same keys and computes the same.
    plain = make_inference_norm(config)(48)
    plain.load_state_dict(made.state_dict())
    x = torch.randn(2, 48, 3, 3)
    close(plain.eval()(x), made.eval()(x), atol=0)


@pytest.mark.parametrize(
    ("arch", "width"), [("pspnet", "ppm_channels"), ("deeplabv3", "head_channels")]
)
def test_group_norm_of_single_values_is_refused_in_training(arch, width):
    """The branch of one pixel would be a constant, with gradients that depend on rounding."""
    options = {"arch": arch, "backbone": "resnet18", "num_stages": 2, "output_stride": 8}
    images, norm = torch.randn(2, 3, 41, 57), make_norm(NormConfig(kind="group"))
    for channels, is_refused in ((32, True), (64, False)):
        config = ModelConfig(**options, **{width: channels})
        model = build_model(config, num_classes=4, norm=norm)
        # Models trained before can still be scored.
        assert model.eval()(images).out.shape == (2, 4, 41, 57)
        if is_refused:
            with pytest.raises(ConfigError, match="group: a layer of 32 channels and one"):
                model.train()(images)
        else:
            model.train()(images)


@pytest.mark.slow("norm", "training")
def test_precise_statistics_do_not_see_the_ranks(run_ranks, tmp_path, data):
    """The moving averages hardly move by themselves."""
    options = experiment(
        data,
        augment={"crop_size": [25, 33]},
        model={"backbone": "mobilenet_v2"},
        norm={"precise_batches": 2, "momentum": 1e-6},
        train={"steps": 1},
    )
    config = write_config(tmp_path / "c.yaml", options)
    found = []
    for ranks in (1, 2):
        run_ranks(ranks, train, config, tmp_path / f"{ranks}")
        found.append(load(tmp_path / f"{ranks}/checkpoints/last.pt").model)
    one, two = found
    for key, wanted in one.items():
        torch.testing.assert_close(two[key], wanted, rtol=1e-9, atol=1e-11)
    assert ((one["backbone.features.0.1.running_var"] - 1).abs() > 1e-3).all()
