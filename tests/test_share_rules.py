"""What breaks equal bits without a word is refused: shared generators, buffers of every share."""

import pytest
import torch
from torch import nn

from segtrain.errors import ConfigError
from segtrain.norm import FrozenBatchNorm2d, SyncBatchNorm2d
from segtrain.training.share_rules import refuse_layers, watch

IMAGES = torch.randn(2, 3, 4, 4)


@pytest.mark.parametrize("layer", [nn.Dropout(), nn.Dropout2d(0.1), nn.BatchNorm2d(3)])
def test_layers_that_depend_on_when_they_run_are_refused_by_name(layer):
    with pytest.raises(ConfigError, match=f"train.shares: 1.0, a {type(layer).__name__}, "):
        refuse_layers(nn.Sequential(nn.ReLU(), nn.Sequential(layer)))


def test_layers_that_do_not_are_taken():
    layers = [SyncBatchNorm2d(3), FrozenBatchNorm2d(3), nn.GroupNorm(1, 3), nn.Dropout(0.0)]
    model = nn.Sequential(*layers, nn.Dropout())
    with pytest.raises(ConfigError, match=r"train\.shares: 4, a Dropout"):  # none of those before
        refuse_layers(model)
    del model[4]
    refuse_layers(model)


@pytest.mark.parametrize(
    ("layer", "what"),
    [
        (nn.RReLU(), "draws from torch's generator"),
        (nn.InstanceNorm2d(3, track_running_stats=True), "its buffer 0.running_mean while"),
    ],
)
def test_other_layers_are_seen_in_the_first_step(layer, what):
    model = nn.Sequential(layer).train()

    def step():
        with watch(model):
            model(IMAGES)

    with pytest.raises(ConfigError, match=what):
        step()


def test_a_step_without_side_effects_passes():
    model = nn.Sequential(nn.Conv2d(3, 3, 1), SyncBatchNorm2d(3), nn.GroupNorm(1, 3)).train()
    with watch(model):
        model(IMAGES).sum().backward()
    assert model[1].num_batches_tracked == 1
