"""What a trial of two images finds in the backbones of others, whatever the names of the layers."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from segtrain.errors import ConfigError
from segtrain.models.trial import refuse_by_trial
from segtrain.norm import SyncBatchNorm2d


class Network(nn.Module):
    """A convolution, then `function` of the module and its map."""

    def __init__(self, function):
        super().__init__()
        self.conv, self.norm = nn.Conv2d(3, 4, 3, 2, 1), SyncBatchNorm2d(4)
        self.register_buffer("calls", torch.zeros(1))
        self.function, self.tables = function, {}

    def forward(self, images):
        return [self.function(self, self.norm(self.conv(images)))]


def batch_mean(_, x):
    return x + 1e-6 * x.mean(0, keepdim=True)  # as a branch that begins with a small weight


def attention_over_images(_, x):
    rows = x.flatten(2).transpose(0, 1)
    return F.scaled_dot_product_attention(rows, rows, rows).transpose(0, 1).view_as(x)


def dropout(self, x):
    return F.dropout(x, 0.1, self.training)


def counting(self, x):
    self.calls += self.training
    return x


def table(self, x):
    if not self.training:
        x = x * self.tables.setdefault("scale", self.conv.weight.detach().mean())
    return x


def kept(self, x):
    if not self.training:
        self.scales = [self.conv.weight.detach().mean()]
        x = x * self.scales[0]
    return x


def layer_norm(_, x):
    return F.layer_norm(x, x.shape[1:])


def without_gradient(_, x):
    return x.detach()


def impossible(_, x):
    raise ZeroDivisionError("of their own")


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (batch_mean, "the features of an image depend on other images of the batch"),
        (attention_over_images, "the features of an image depend on other images"),
        (lambda _, x: F.batch_norm(x, None, None, training=True), "depend on other images"),
        (lambda _, x: x.flip(0), "depend on other images"),
        (lambda _, x: x - x.mean((0, 2, 3), keepdim=True).detach(), "other images, or on chance"),
        (lambda _, x: x * np.random.rand(), "other images, or on chance"),
        (kept, "scales keeps values"),
        (dropout, "changes torch's random numbers, which depend on the rank"),
        (counting, "changes the buffer .calls, which depend"),
        (table, ".tables keeps values that new weights would not change"),
        (impossible, r"cannot be tried on two images of 65x97 \(of their own\)"),
    ],
)
def test_what_depends_on_more_than_the_image_is_refused(function, message):
    with pytest.raises(ConfigError, match=message):
        refuse_by_trial(Network(function), "mine")


@pytest.mark.parametrize("function", [layer_norm, without_gradient])
def test_a_network_of_images_alone_stays_as_it_is(function):
    network = Network(function).train()
    before, numbers = copy.deepcopy(network.state_dict()), torch.get_rng_state()
    refuse_by_trial(network, "mine")
    assert all(torch.equal(before[key], value) for key, value in network.state_dict().items())
    assert torch.equal(numbers, torch.get_rng_state())
    assert network.training
    assert network.norm.training


def test_networks_without_numbers_are_not_tried():
    with torch.device("meta"):
        refuse_by_trial(Network(impossible), "mine")
