"""Running statistics that follow together: on a CPU by telling it that this pays there too."""

from contextlib import nullcontext, suppress
from types import SimpleNamespace
from unittest import mock

import pytest
import torch
from test_norm_kinds import C, X
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout
from segtrain.distributed.passes import current
from segtrain.distributed.rank_sums import RANKS
from segtrain.norm import SyncBatchNorm, SyncBatchNorm2d, sync, tracked_together
from segtrain.training import step as step_module
from segtrain.training.local import LocalMicrobatch, StepNumbers
from segtrain.training.step_sync import StepSync
from segtrain.types import DropoutMasks


def pays():
    return mock.patch.object(sync, "has_cuda_kernels", return_value=True)


def followed(together):
    """Two passes; one layer is called twice in each, one sees nothing in the second."""
    layers = nn.ModuleDict(
        {
            "narrow": SyncBatchNorm(3),
            "wide": SyncBatchNorm(5),
            "average": SyncBatchNorm(4, momentum=None),
            "quick": SyncBatchNorm(4, momentum=0.7),
            "narrow type": SyncBatchNorm(4).half(),
            "untracked": SyncBatchNorm(2, track_running_stats=False),
        }
    )
    generator = torch.Generator().manual_seed(dist.rank())
    with pays():
        for images in (2 + dist.rank(), 0):
            with tracked_together() if together else nullcontext():
                for name, layer in [*layers.items(), ("again", layers["narrow"])]:
                    n = 2 if name == "wide" else images
                    x = torch.randn(n, layer.num_features, 3, 2, generator=generator)
                    layer(x.to(torch.float16 if name == "narrow type" else torch.float32) * 3 + 1)
    return dict(layers.named_buffers())


def both_ways():
    return followed(True), followed(False)


def test_layers_that_follow_together_get_what_they_get_alone(run_ranks):
    for together, alone in run_ranks(2, both_ways):
        assert len(together) == 15
        torch.testing.assert_close(together, alone, rtol=1e-6, atol=1e-7)
        for name in ("narrow.running_var", "average.running_mean", "narrow type.running_mean"):
            assert (together[name] != alone[name].new_tensor(name.endswith("var"))).all()
        numbers = [int(t) for name, t in together.items() if name.endswith("tracked")]
        assert numbers == [2, 2, 1, 1, 1]


@pytest.fixture
def two_ranks(monkeypatch):
    monkeypatch.setattr(dist, "_num_processes", lambda group=None: 2)
    monkeypatch.setattr("torch.distributed.all_reduce", lambda tensor, group=None: None)


@pytest.mark.parametrize("precision", [torch.float32, torch.float64])
def test_the_momentum_keeps_its_precision(precision, two_ranks):
    layer = SyncBatchNorm(C, momentum=0.1, dtype=precision)
    with pays(), tracked_together():
        layer(X.to(precision))
    wanted = 0.1 * X.to(precision).mean((0, 2, 3))
    rtol = 1e-14 if precision == torch.float64 else 1e-6
    torch.testing.assert_close(layer.running_mean, wanted, rtol=rtol, atol=0)


def test_a_failed_pass_leaves_no_batches(two_ranks):
    layer = SyncBatchNorm2d(C)
    with pays():
        with suppress(ArithmeticError), tracked_together():
            layer(X.float())
            raise ArithmeticError
        with tracked_together():
            pass
    assert layer.num_batches_tracked == 0


def test_statistics_on_their_way_are_not_used(two_ranks):
    layer = SyncBatchNorm2d(C)
    with pays(), tracked_together():
        layer(X.float())
        layer.eval()
        with pytest.raises(RuntimeError, match="evaluates inside tracked_together"):
            layer(X.float())
    layer(X.float())


def test_the_trainer_updates_layers_together_once_a_pass(monkeypatch):
    waiting = []

    def forward(*_):
        waiting.append(current().waiting)
        return torch.zeros((), requires_grad=True), torch.zeros(2)

    monkeypatch.setattr(step_module, "forward", forward)
    monkeypatch.setattr(step_module, "_loss_weights", lambda *_: [torch.ones(())] * 2)
    numbers = StepNumbers.on(torch.device("cpu"))
    sums = SimpleNamespace(collected=lambda last: nullcontext(), finish=lambda: True)
    state = SimpleNamespace(
        layout=Layout(4, 2, (1,)),
        passes=SimpleNamespace(
            gradients=sums, modules=[nn.Identity()], sums=RANKS, runs_inline=lambda parts: True
        ),
        model=nn.Identity(),
        wrapped=None,
        initial_weights=SimpleNamespace(hold_gradients=lambda model: None),
    )
    images = torch.zeros(2, 3, 4, 4, dtype=torch.uint8)
    part = LocalMicrobatch(images, images[:, 0], DropoutMasks())
    step_module.gradient(state, [part, part], numbers, StepSync(lambda: False))
    assert waiting == [[], []]
    assert waiting[0] is not waiting[1]


def test_it_cannot_be_entered_twice():
    with tracked_together(), pytest.raises(RuntimeError, match="inside"), tracked_together():
        pass
    with tracked_together():
        pass
