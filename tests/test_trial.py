"""What a trial of two images finds in the backbones of others, whatever the names of the layers."""

import copy

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import nn

from segtrain.errors import ConfigError
from segtrain.models import trial
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


def of_a_kernel(message, is_wrong=False):
    """A function that runs on no CPU; the stand-in of the device is what `.to` names `cpu:0`."""
    devices = []

    def function(_, x):
        if not devices:
            raise RuntimeError(message)
        return x.flip(0) if is_wrong else x

    return function, devices


WORDS = "scan(): expected u.is_cuda() to be true", "Pointer argument (at 0) ... (cpu tensor?)"
WORDS += ("Could not run 'my::scan' with arguments from the 'CPU' backend. [CUDA, Meta]",)


@pytest.mark.parametrize("message", WORDS)
def test_a_network_that_needs_a_device_is_tried_there(monkeypatch, message):
    """No device is here: the second trial is on the CPU, too, under its other name."""
    with pytest.raises(ConfigError, match=r"65x97 on the CPU, and no CUDA device is visible"):
        refuse_by_trial(Network(of_a_kernel(message)[0]), "mine")
    for is_wrong in (False, True):
        function, devices = of_a_kernel(message, is_wrong)
        to = nn.Module.to

        def moved(self, device, dtype, to=to, devices=devices):
            devices += [device] if device != "cpu" else []
            return to(self, device, dtype)

        with monkeypatch.context() as patch:
            patch.setattr(nn.Module, "to", moved)
            patch.setattr(trial, "_CUDA", "cpu:0")
            patch.setattr(torch.cuda, "is_available", lambda: True)
            if is_wrong:
                with pytest.raises(ConfigError, match="depend on other images of the batch"):
                    refuse_by_trial(Network(function), "mine")
            else:
                refuse_by_trial(Network(function), "mine")
        assert devices == ["cpu:0"]


def test_other_errors_are_not_tried_on_a_device(monkeypatch):
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    with pytest.raises(ConfigError, match=r"of 65x97 \(of their own\); use another network"):
        refuse_by_trial(Network(impossible), "mine")


def test_networks_without_numbers_are_not_tried():
    with torch.device("meta"):
        refuse_by_trial(Network(impossible), "mine")
