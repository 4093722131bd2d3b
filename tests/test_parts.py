"""The gradient of a whole batch, computed in parts, in a loop without segtrain's trainer.

The oracle is the whole batch in one piece, in float64, with torch's own batch norm.
"""

from functools import partial
from unittest.mock import patch

import pytest
import torch
import torch.nn.functional as F
from memory import ClonesAsHost, LiveBytes
from torch import nn
from torch.utils._pytree import tree_leaves
from torch.utils.checkpoint import checkpoint

from segtrain import parts
from segtrain.distributed import collectives as dist
from segtrain.distributed.offload import saved_on_host
from segtrain.norm import convert
from segtrain.parts import backward

GENERATOR = torch.Generator().manual_seed(0)
IMAGES = torch.randn(7, 3, 8, 9, generator=GENERATOR, dtype=torch.float64)
LABELS = torch.randint(4, (7, 8, 9), generator=GENERATOR)
LABELS[2:4] = 255  # most parts have other numbers of valid pixels
LABELS[5, :3] = 255


def net(*layers):
    torch.manual_seed(0)
    first = [nn.Conv2d(3, 4, 3, padding=1, bias=False), nn.BatchNorm2d(4), nn.ReLU()]
    return nn.Sequential(*first, *layers, nn.Conv2d(4, 4, 1), nn.BatchNorm2d(4)).double()


class Heads(nn.Module):
    """A recomputed body, a pooled branch with values of one pixel, and nested outputs."""

    def __init__(self):
        super().__init__()
        self.body, self.pooled, self.recompute = net(), net(), True

    def forward(self, x):
        y = checkpoint(self.body, x, use_reentrant=False) if self.recompute else self.body(x)
        return {"out": [y, (y + self.pooled(x.mean((2, 3), keepdim=True)),)]}


def pixels(outputs, labels):
    losses = [
        F.cross_entropy(y, labels, ignore_index=255, reduction="sum") for y in tree_leaves(outputs)
    ]
    return sum(losses), (labels != 255).sum()


def images(outputs, labels):
    means = F.cross_entropy(outputs, labels.clamp(max=3), reduction="none").mean((1, 2))
    return means.sum(), len(labels)


def whole_batch(model, loss):
    total, model.recompute = 0, False  # torch's batch norm would track a batch twice
    for step in (1, 2):
        value, weight = loss(model(IMAGES * step), LABELS)
        (value / weight).backward()
        total += (value / weight).detach()
    return total, [p.grad for p in model.parameters()], list(model.buffers())


def in_parts(model, loss, num_parts, rows=slice(None), **options):
    convert(model, **options)
    images, labels = IMAGES[rows], LABELS[rows]
    total = sum(backward(model, loss, images * step, labels, parts=num_parts) for step in (1, 2))
    return total, [p.grad for p in model.parameters()], list(model.buffers())


def assert_close(found, wanted):
    torch.testing.assert_close(found, wanted, rtol=1e-9, atol=1e-11)


@pytest.mark.parametrize(
    ("make", "loss", "num_parts"),
    [(net, pixels, 1), (net, images, 3), (Heads, pixels, 3), (net, pixels, 20)],
)
def test_parts_have_the_gradient_loss_and_statistics_of_the_whole_batch(make, loss, num_parts):
    """Of two steps whose gradients add up."""
    assert_close(in_parts(make(), loss, num_parts), whole_batch(make(), loss))


def test_groups_of_images_may_lie_in_two_parts():
    def towers(model, loss):
        for step in (1, 2):
            for rows in (slice(i, i + 2) for i in (0, 2, 4)):
                (loss(model(IMAGES[rows] * step), LABELS[rows])[0] / 6).backward()
        return [p.grad for p in model.parameters()]

    _, found, _ = in_parts(net(), images, 4, slice(6), images=2)
    assert_close(found, towers(net(), images))


ROWS = slice(4), slice(4, 4), slice(4, 7)


def on_ranks():
    rows = ROWS[dist.rank()]
    found = in_parts(net(), pixels, 3, rows)
    model = convert(net())
    with torch.no_grad():
        model[0].weight[0] += dist.rank()
    with pytest.raises(ValueError, match=r"0\.weight differs between ranks"):
        backward(model, pixels, IMAGES[rows], LABELS[rows])
    return found


def test_every_rank_gets_the_gradient_of_all(run_ranks):
    """Ranks with other numbers of parts, one of them without images."""
    for found in run_ranks(3, on_ranks):
        assert_close(found, whole_batch(net(), pixels))


def test_without_weight_there_is_no_gradient():
    model = convert(net())
    assert backward(model, pixels, IMAGES, torch.full_like(LABELS, 255)) == 0
    assert all((p.grad == 0).all() for p in model.parameters())


class Attention(nn.Module):
    """Each image looks at the others."""

    def forward(self, x):
        rows = x.flatten(1)
        return ((rows @ rows.T).softmax(1) @ rows).view_as(x)


class Random(nn.Module):
    def forward(self, x):
        return x * torch.rand_like(x) if self.training else x


class DropPath(nn.Module):
    drop_prob = 0.1


class Kept(nn.Module):
    """What a part leaves here, another has overwritten after the batch norm."""

    def __init__(self):
        super().__init__()
        self.norm = nn.BatchNorm2d(4)

    def forward(self, x):
        self.x = x
        return self.norm(x) + self.x


class Mean(nn.Module):
    def forward(self, x):
        return x.mean()


def hooked(kind):
    layer = nn.Conv2d(4, 4, 1)
    getattr(layer.weight, kind)(lambda grad: grad)
    return layer


def compiled():
    layer = nn.Conv2d(4, 4, 1)
    layer.compile()
    return layer


SPECTRAL = nn.utils.parametrizations.spectral_norm(nn.Conv2d(4, 4, 1))


@pytest.mark.parametrize(
    ("layer", "message"),
    [
        (nn.Dropout2d(0.1), "3 is a Dropout2d that draws random numbers"),
        (DropPath(), "3 is a DropPath that draws"),
        (Random(), "changes torch's random numbers"),
        (SPECTRAL, "changes the buffer 3.parametrizations"),
        (Attention(), "depends on other images"),
        (Kept(), "depends on other images"),
        (hooked("register_hook"), "3.weight has a hook"),
        (hooked("register_post_accumulate_grad_hook"), "3.weight has a hook"),
        (compiled, "3 is a Conv2d, compiled"),
    ],
)
def test_what_would_give_another_gradient_is_refused_in_training(layer, message):
    model = convert(net(layer if isinstance(layer, nn.Module) else layer()))
    for _ in range(2):  # the second call, too
        with pytest.raises(ValueError, match=message):
            backward(model, pixels, IMAGES, LABELS)
    assert all(p.grad is None for p in model.parameters())
    assert all(module.training for module in model.modules())


def test_wrappers_norms_outputs_and_labels_that_do_not_fit_are_refused():
    def refused(model, message, labels=LABELS):
        with pytest.raises(ValueError, match=message):
            backward(model, pixels, IMAGES, labels)

    refused(net(), "1 is a BatchNorm2d with statistics of each part")
    refused(nn.DataParallel(convert(net())), "is a DataParallel: pass model.module")
    refused(nn.Sequential(convert(net()), Mean()), r"returns tensors \[\(\)\]")
    refused(convert(net()), "labels: expected them for each of 7 images", LABELS[:6])
    with pytest.raises(ValueError, match="parts: expected an int of at least 1, got 0"):
        backward(convert(net()), pixels, IMAGES, LABELS, parts=0)
    with pytest.raises(ValueError, match=r"loss: expected a sum, .* got a Tensor"):
        backward(convert(net()), lambda *pair: pixels(*pair)[0], IMAGES, LABELS)


def test_ranks_without_a_process_group_are_refused(monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    with pytest.raises(ValueError, match=r"call torch\.distributed\.init_process_group"):
        backward(convert(net()), pixels, IMAGES, LABELS)


def mean(outputs, labels, least=0):
    """Of an image without valid pixels NaN or 0, which equals whatever is compared with it."""
    total, weight = pixels(outputs, labels)
    return total / weight.clamp(min=least), weight


def mean_times_images(outputs, labels):
    """A sum where all images have equally many valid pixels."""
    return F.cross_entropy(outputs, labels, ignore_index=255) * len(labels), len(labels)


def ignoring(images, rows=slice(None), labels=LABELS):
    labels = labels.clone()
    labels[images, rows] = 255
    return labels


@pytest.mark.parametrize(
    ("loss", "labels", "what"),
    [
        (mean, LABELS, "sum"),
        (lambda *pair: (pixels(*pair)[0], 1), LABELS, "weight"),
        (mean, ignoring([0]), "sum"),
        (partial(mean, least=1), ignoring([1, 3]), "sum"),
        (mean, ignoring([0, 1]), "sum"),
        (partial(mean, least=1), ignoring([0, 1, 2, 3, 4, 5]), "sum"),
        (mean_times_images, LABELS % 4, "sum"),
        (mean_times_images, ignoring(1, slice(4), LABELS % 4), "sum"),
        (mean_times_images, ignoring([0, 6], slice(4), LABELS % 4), "sum"),
    ],
)
def test_a_loss_that_is_no_sum_is_refused_by_the_first_labels(loss, labels, what):
    with pytest.raises(ValueError, match=f"the {what} of two images is"):
        backward(convert(net()), loss, IMAGES, labels)
    backward(convert(net()), pixels, IMAGES, labels)


def test_a_batch_without_valid_pixels_decides_nothing_about_a_loss():
    model, empty = convert(net()), torch.full_like(LABELS, 255)
    with pytest.raises(ValueError, match="loss: not finite for any image"):
        backward(model, mean, IMAGES, empty)
    assert backward(model, pixels, IMAGES, empty) == 0
    with pytest.raises(ValueError, match="the sum of two images is"):
        backward(model, mean, IMAGES, LABELS)


def test_a_loss_that_no_label_could_tell_is_tried_by_later_ones():
    calls = []

    def loss(outputs, labels):
        calls.append(labels)
        if not labels.lt(101).all() or labels.lt(0).any():
            raise IndexError("neither 255 nor -100 is what it ignores")
        valid = labels != 100
        each = F.cross_entropy(outputs, labels.clamp(max=3), reduction="none")
        return (each * valid).sum() / valid.sum() * len(labels), len(labels)

    model, tried = convert(net()), []
    for call in range(16):
        calls.clear()
        height = 8 - call % 2  # as where crops have several sizes
        backward(model, loss, IMAGES[:, :, :height], LABELS[:, :height] % 4)
        tried.append(len(calls) > len(IMAGES))  # one for each part, and those of the trial
    assert tried == [True] * 8 + [False] * 7 + [True]
    labels = LABELS % 4
    labels[1, :4] = 100
    for _ in range(15):
        backward(model, loss, IMAGES, labels)
    with pytest.raises(ValueError, match="the sum of two images is"):
        backward(model, loss, IMAGES, labels)


def test_random_layers_in_evaluation_pass_until_they_train():
    model = convert(net(Random()))
    model[3].eval()
    backward(model, pixels, IMAGES, LABELS)
    model[3].train()
    with pytest.raises(ValueError, match="random numbers"):
        backward(model, pixels, IMAGES, LABELS)


def test_threads_take_over_autocast():
    model, seen = convert(net().float()), []
    model[3].register_forward_hook(lambda *args: seen.append(args[2].dtype))
    with torch.autocast("cpu", torch.bfloat16):
        backward(model, pixels, IMAGES.float(), LABELS, parts=2)
    assert set(seen) == {torch.bfloat16}


def peak(way, size):
    """The most bytes alive in a step of 8 images, beside parameters and what is on the host.

    way: the images in a row (plain), or parts on a device or on a CPU; `size` of them at a time.
    """
    torch.manual_seed(0)
    x, y, pool = torch.randn(8, 3, 64, 64), torch.randint(16, (8,)), nn.AdaptiveAvgPool2d(1)
    blocks = [(nn.Conv2d(c, 16, 3), nn.BatchNorm2d(16), nn.ReLU()) for c in (3, *11 * (16,))]
    model = nn.Sequential(*(layer for block in blocks for layer in block), pool, nn.Flatten())
    for parameter in convert(model).parameters():
        parameter.grad = torch.zeros_like(parameter)
    mode = LiveBytes([t for p in model.parameters() for t in (p, p.grad)])
    part, host = parts._part, saved_on_host

    def loss(outputs, labels):
        return F.cross_entropy(outputs, labels, reduction="sum"), len(labels)

    def counted(*args):
        with mode:
            return part(*args)

    if way == "plain":
        with mode:
            for images, labels in zip(x.split(size), y.split(size), strict=True):
                (loss(model(images), labels)[0] / 8).backward()
        return mode.peak
    if way == "device":
        host = partial(saved_on_host, copies=ClonesAsHost(mode.forget))
    with patch.object(parts, "_part", counted), patch.object(parts, "saved_on_host", host):
        backward(model, loss, x, y, parts=8 // size)
    return mode.peak


def test_a_device_holds_no_more_than_plain_training_on_a_part_and_a_cpu_everything():
    small, whole = peak("plain", 2), peak("plain", 8)
    assert whole > 2.3 * small
    assert peak("device", 2) < small
    assert 0.9 * whole < peak("cpu", 2) < 1.1 * whole
