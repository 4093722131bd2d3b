"""What surrounds the passes of a step, on a CUDA device that does not exist."""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
from experiments import sections
from fake_device import config
from torch import Tensor, nn

from segtrain.distributed import offload
from segtrain.training import microbatches
from segtrain.training.engine import _update
from segtrain.training.losses import SegLoss
from segtrain.training.optim.optimizer import WeightAverage, build_optimizer
from segtrain.types import Batch

UPDATES = [
    {},
    {"optimizer": "adamw", "ema_decay": 0.9, "clip_grad_norm": 1.0},
    {"precision": "float16", "ema_decay": 0.9},
    {"precision": "float16", "optimizer": "adamw"},
    {"decoupled_decay": True, "momentum_correction": False},
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
    average = WeightAverage(nn.Identity(), 0.9)
    average.model = averaged.requires_grad_(False)
    state = SimpleNamespace(
        model=model,
        optimizer=build_optimizer(model, whole),
        scaler=torch.amp.GradScaler("cuda", enabled=train.precision == "float16"),
        average=average if optim.ema_decay else None,
        initial_weights=SimpleNamespace(hold_gradients=lambda: None),
        step=0,
    )
    state.scaler.scale(torch.zeros((), device="cuda"))
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    with fake:
        _update(state, 0.1, optim.clip_grad_norm)
    fused = [name for name in fake.seen if name.startswith("_fused_")]
    assert fused == [f"_fused_{optim.kind}_"]


def test_a_copy_to_the_host_is_counted_as_in_flight(fake, monkeypatch):
    """The stream and its event are stubs; the copy is an operation like any other."""
    counted = []
    stream = SimpleNamespace(wait_stream=lambda _: None)
    in_flight = SimpleNamespace(add=lambda event, size: counted.append(size))
    monkeypatch.setattr(torch.cuda, "Stream", lambda _: stream)
    monkeypatch.setattr(offload, "InFlight", lambda: in_flight)
    monkeypatch.setattr(torch.cuda, "stream", lambda _: nullcontext())
    monkeypatch.setattr(torch.cuda, "current_stream", lambda *_: None)
    monkeypatch.setattr(torch.Tensor, "record_stream", lambda *_: None)
    x = torch.ones(3, 5, device="cuda")
    with fake:
        on_host = offload.CudaCopies(x.device).to_host(x)
    assert on_host.host.device.type == "cpu"
    assert counted == [60]


@pytest.mark.parametrize("mixup_alpha", [None, 0.4])
def test_moving_the_batch_and_weighing_its_passes_makes_no_wait(fake, mixup_alpha):
    settings = config(train={"accumulate_steps": 2}, augment={"mixup_alpha": mixup_alpha})
    state = SimpleNamespace(
        step=0,
        model=SimpleNamespace(dropout_channels=(8, None)),
        shares=None,
        criterion=SegLoss(settings.loss, torch.device("cuda")),
    )
    images = torch.zeros(2, 3, 65, 73, dtype=torch.uint8)
    labels = torch.zeros(2, 65, 73, dtype=torch.uint8)
    batch = Batch(images, labels, ["a", "b"], None if mixup_alpha is None else labels)
    with fake:
        indices = [range(2), range(8, 10)]
        parts = microbatches.local_microbatches(
            state, [batch] * 2, indices, settings, torch.device("cuda")
        )
        weights = microbatches._loss_weights(state, parts, [[2], [2]], settings)
    tensors = [t for part in (*parts, weights) for t in part if isinstance(t, Tensor)]
    tensors += [mask for part in parts for mask in part.dropout if mask is not None]
    assert len(tensors) == 8
    assert {t.device.type for t in tensors} == {"cuda"}
