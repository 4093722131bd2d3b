"""Losses and what surrounds the passes of a step, on a CUDA device that does not exist.

Nothing in them may make the host wait.
"""

from types import SimpleNamespace

import pytest
import torch
from experiments import sections
from fake_device import K, config, fake_batch
from torch import Tensor, nn

from segtrain.distributed.rank_sums import RANKS
from segtrain.training import local
from segtrain.training.losses import SegLoss
from segtrain.training.optim.layers import make_initial_weights
from segtrain.training.optim.optimizer import WeightAverage, build_optimizer, may_be_captured
from segtrain.training.step import _loss_weights, update
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch, SegLogits

UPDATES = [
    {},
    {"optimizer": "adamw", "ema_decay": 0.9, "clip_grad_norm": 1.0},
    {"precision": "float16", "ema_decay": 0.9},
    {"precision": "float16", "optimizer": "adamw"},
    {"layers": ({"zero": ("0.weight[:, 1]", "1.bias[2]")},), "precision": "float16"},
]


@pytest.mark.parametrize("options", UPDATES, ids=lambda o: "-".join(map(str, o.values())))
def test_an_update_makes_no_wait_and_is_one_kernel(fake, options):
    whole = config(**sections(**options))
    train, optim = whole.train, whole.optim
    # Two, since a fake tensor cannot be copied with its module.
    model, averaged = (
        nn.Sequential(nn.Conv2d(3, 4, 3, device="cuda"), nn.BatchNorm2d(4, device="cuda"))
        for _ in range(2)
    )
    cuda = torch.device("cuda")
    capturable = may_be_captured(model, whole, cuda)
    start = make_initial_weights(model, optim, None)
    average = WeightAverage(nn.Identity(), 0.9)
    average.model = averaged.requires_grad_(False)
    state = SimpleNamespace(
        model=model,
        optimizer=build_optimizer(model, whole, start=start, capturable=capturable),
        scaler=torch.amp.GradScaler("cuda", enabled=train.precision == "float16"),
        average=average if optim.ema_decay else None,
    )
    state.scaler.scale(torch.zeros((), device="cuda"))
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    with fake:
        start.hold_gradients(model)
        numbers = local.StepNumbers.on(cuda, [0.1, 0.9], [0.0] * 2, tensors=capturable)
        update(state, numbers, optim.clip_grad_norm)
    fused = [name for name in fake.seen if name.startswith("_fused_")]
    assert fused == [f"_fused_{optim.kind}_"]


def test_moving_the_batch_and_weighing_its_passes_makes_no_wait(fake):
    settings = config(train={"accumulate_steps": 2})
    state = SimpleNamespace(
        step=0,
        model=SimpleNamespace(dropout_channels=(8, None)),
        passes=SimpleNamespace(cut=lambda tensor, _: [tensor], sums=RANKS),
        layout=SimpleNamespace(positions=lambda rank: [range(2), range(8, 10)]),
        criterion=SegLoss(settings.loss, torch.device("cuda")),
    )
    images = torch.zeros(2, 3, 65, 73, dtype=torch.uint8)
    labels = torch.zeros(2, 65, 73, dtype=torch.uint8)
    batch = Batch(images, labels, ["a", "b"])
    with fake:
        parts = local.local_microbatches(state, [batch] * 2, settings, torch.device("cuda"))
        weights = _loss_weights(state, parts)
    tensors = [t for part in (*parts, weights) for t in part if isinstance(t, Tensor)]
    tensors += [mask for part in parts for mask in part.dropout if mask is not None]
    assert len(tensors) == 8
    assert {t.device.type for t in tensors} == {"cuda"}


LOSSES = [
    {"kind": "cross_entropy", "class_weights": (1.0,) * K, "label_smoothing": 0.1},
    {"kind": "ohem", "ohem_min_kept": 40},
    {"kind": "ohem", "ohem_fraction": 0.2},
    {"kind": "dice"},
    {"kind": "focal", "class_weights": (1.0,) * K},
    {"kind": "lovasz"},
    {"kind": "lovasz_batch"},
    {"kind": "boundary_relaxation"},
    {"kind": "cross_entropy", "also": ({"kind": "dice", "weight": 3.0}, {"kind": "lovasz"})},
]


def loss_of(settings, device):
    criterion = SegLoss(settings.loss, torch.device(device))
    _, labels = fake_batch(device)
    logits = [torch.rand(2, K, 65, 73, device=device, requires_grad=True) for _ in range(2)]
    return criterion, logits, labels


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_no_loss_and_no_backward_pass_makes_the_host_wait(fake, loss):
    criterion, logits, labels = loss_of(config(loss=loss), "cuda")
    with fake:
        sums = criterion(SegLogits(*logits), labels)
        criterion.objective(sums, StepSync(lambda: False).reduce(sums))
        assert criterion.means(sums).shape == (2,)
        criterion.label_weight(labels)
    # Where autograd works and reading a value is an error.
    criterion, logits, labels = loss_of(config(loss=loss), "meta")
    sums = criterion(SegLogits(*logits), labels)
    criterion.objective(sums, StepSync(lambda: False).reduce(sums)).backward()
    assert all(one.grad.shape == one.shape for one in logits)
