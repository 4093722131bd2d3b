"""The losses on a CUDA device that does not exist: nothing in them may make the host wait."""

import pytest
import torch
from fake_device import RANKS, K, config, fake_batch

from segtrain.training.losses import SegLoss
from segtrain.training.step_sync import StepSync
from segtrain.types import SegLogits

LOSSES = [
    {"kind": "cross_entropy", "class_weights": (1.0,) * K, "label_smoothing": 0.1},
    {"kind": "ohem", "ohem_min_kept": 40},
    {"kind": "ohem", "ohem_fraction": 0.2},
    {"kind": "dice"},
    {"kind": "focal", "class_weights": (1.0,) * K},
    {"kind": "lovasz"},
    {"kind": "lovasz", "lovasz_per_image": False},
    {"kind": "boundary_relaxation"},
    {"kind": "cross_entropy", "also": ({"kind": "dice", "weight": 3.0}, {"kind": "lovasz"})},
]


def loss_of(settings, device):
    criterion = SegLoss(settings.loss, torch.device(device), batch_size=2 * RANKS)
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
