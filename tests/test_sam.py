"""SAM against a loop over the whole batch in float64 with torch's own batch norm and optimizer."""

import copy

import pytest
import test_step
import torch
from test_step import CPU, K, N, assert_same_training, plain_loop, run, trained
from torch import nn

from segtrain import seed
from segtrain.config import OptimConfig
from segtrain.errors import NonFiniteError
from segtrain.models import DropoutChannels
from segtrain.models.norms import make_norm
from segtrain.training.sam import sam_is_due, sam_perturbed
from segtrain.training.state import make_state
from segtrain.types import SegLogits

CHANNELS, P = 4, 0.5
SAM = {"steps": 4, "lr": 0.3, "sam_rho": 0.4, "dropout": P}


class Small(nn.Module):
    """Batch norm and dropout between two convolutions."""

    dropout_channels = DropoutChannels(CHANNELS, None)

    def __init__(self, norm):
        super().__init__()
        torch.manual_seed(0)
        self.backbone = nn.Conv2d(3, CHANNELS, 3, padding=1, bias=False)
        self.bn = norm(CHANNELS)
        self.head = nn.Conv2d(CHANNELS, K, 1)
        self.aux_head = nn.Conv2d(CHANNELS, K, 1)

    def forward(self, images, dropout):
        features = torch.tanh(self.bn(self.backbone(images)))
        return SegLogits(self.head(features * dropout.out.to(features)), self.aux_head(features))


def config(**options):
    return test_step.config(**SAM | options)


def new_state(settings):
    return make_state(Small(make_norm(settings.norm)), settings, CPU)


def masks(step):
    return seed.dropout_mask(0, step, 0, batch_size=N, channels=CHANNELS, p=P).double()


SETTINGS = {
    "every step": config(),
    "every second step, clipped": config(sam_every=2, clip_grad_norm=0.05, weight_decay=0.1),
    "two passes": config(accumulate_steps=2),
    "virtual ranks": config(virtual_ranks=2),
    "shares": config(shares=3),
}


def trainings():
    """On a rank: every training, and the running statistics of one step with SAM and without."""
    statistics = {}
    for kind in ({"images": N}, {"images": N, "running": "mean"}, {}):
        found = []
        for rho in (None, 0.4):
            one = config(norm=kind, sam_rho=rho, steps=1)
            _, weights = trained(one, new_state)
            found.append({k: v for k, v in weights.items() if k.startswith("bn.running")})
            found[-1]["count"] = weights["bn.num_batches_tracked"]
        statistics[str(kind)] = found
    return {name: trained(one, new_state) for name, one in SETTINGS.items()}, statistics


@pytest.mark.parametrize("world_size", [1, 2])
def test_any_number_of_ranks_is_the_plain_loop_over_the_whole_batch(run_ranks, world_size):
    """5 images are 3 + 2. Running statistics move once a step, at w: bit for bit those of a step
    without SAM."""
    for found, statistics in run_ranks(world_size, trainings):
        for name, one in SETTINGS.items():
            wanted = plain_loop(one, lambda: Small(nn.BatchNorm2d), masks)
            assert_same_training(found[name], wanted)
        for plain, with_sam in statistics.values():
            assert plain["count"] == with_sam["count"] == 1
            assert all(torch.equal(value, with_sam[name]) for name, value in plain.items())


@pytest.mark.parametrize("scale", [1e-18, 1.0, 2.0**16, 0.0, torch.inf, torch.nan])
def test_a_gradient_of_any_scale_climbs_as_far_and_one_without_direction_not_at_all(scale):
    """The loss scale of float16 stays in it."""
    weight = nn.Parameter(torch.zeros(2))
    weight.grad = torch.tensor([0.0, -scale])
    climbs = 0 < scale < torch.inf
    with sam_perturbed([weight], 0.5):
        torch.testing.assert_close(weight.detach(), torch.tensor([0.0, -0.5 if climbs else 0.0]))


def test_the_weights_come_back_bit_for_bit_also_after_an_error():
    """Adding and subtracting would lose the digits of a small weight beside a large step."""
    weights = [nn.Parameter(torch.tensor([1e-7, 1.0, -3e5])), nn.Parameter(torch.ones(2))]
    weights[0].grad = torch.tensor([3.0, 0.0, 4.0])
    before = [w.detach().clone() for w in weights]
    aside = before[0] + torch.tensor([6.0, 0.0, 8.0])

    def fail():
        with sam_perturbed(weights, 10.0):
            torch.testing.assert_close(weights[0].detach(), aside)
            assert weights[0].grad is None
            raise ZeroDivisionError

    with pytest.raises(ZeroDivisionError):
        fail()
    assert all(torch.equal(a, b) for a, b in zip(weights, before, strict=True))


def spoiled(settings, numbers):
    """A state in which these gradients are infinite, counted from 0, two in a step."""
    state, seen = new_state(settings), iter(range(100))
    hook = lambda gradient: gradient * (torch.inf if next(seen) in numbers else 1.0)  # noqa: E731
    state.model.head.weight.register_hook(hook)
    return state


@pytest.mark.parametrize("numbers", [(2, 3), (3,)])
def test_a_float16_step_whose_gradients_overflow_is_skipped(numbers):
    """An overflow of the first comes again with the second, which is then computed at w too."""
    settings = config(precision="float16")
    state, before, finite, scales = spoiled(settings, numbers), None, [], []
    for result in run(settings, state):
        finite.append(bool(result.grad_norm.isfinite()))
        scales.append(state.scaler.get_scale())
        weights = copy.deepcopy(dict(state.model.named_parameters()))
        if result.step == 2:
            assert all(torch.equal(value, before[name]) for name, value in weights.items())
        before = weights
    assert finite == [True, False, True, True]
    assert scales == [2.0**16, 2.0**15, 2.0**15, 2.0**15]
    settings = config(precision="float32")  # which ends there, as without SAM
    with pytest.raises(NonFiniteError, match="step 2: the gradient is not finite"):
        list(run(settings, spoiled(settings, numbers)))


@pytest.mark.parametrize(
    ("every", "due"), [(1, [True] * 6), (2, [False, True] * 3), (3, [False, False, True] * 2)]
)
def test_the_last_of_so_many_updates_takes_a_second_gradient(every, due):
    optim = OptimConfig(sam_rho=0.1, sam_every=every)
    assert [sam_is_due(optim, step) for step in range(6)] == due
    assert not any(sam_is_due(OptimConfig(), step) for step in range(6))
