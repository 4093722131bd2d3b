"""Forward pass, loss and reduction of a step on a CUDA device that does not exist.

Nothing in it may make the host wait, whatever the model, the norm, the precision and the ranks; and
how much it launches and sends is a number, so that whoever adds to it notices.
"""

import pytest
import torch
from fake_device import RANKS, config, fake_batch, fake_model, fake_ranks, stub_context

from segtrain.distributed import collectives as dist
from segtrain.models.precision import autocast_dtype, dtype_of
from segtrain.norm import SyncBatchNorm, placed, sync_running_stats, tracked_together
from segtrain.norm.functional import _SyncBatchNorms
from segtrain.norm.groups import Sharing
from segtrain.training.losses import SegLoss
from segtrain.training.state import ModelWithLoss
from segtrain.training.step_sync import StepSync
from segtrain.types import DropoutMasks

SLOW = pytest.mark.slow("norm", "kernels", "models", "training")


def test_the_watch_sees_each_kind_of_wait(fake):
    x = torch.ones(3, device="cuda")
    waits = [
        lambda: x.new_tensor([1.0]),
        lambda: torch.tensor(1.0, device="cuda"),
        lambda: torch.ones(2).to("cuda"),
        lambda: x.cpu(),
        lambda: torch.ones(3).copy_(x),
        lambda: x[0].item(),
        lambda: bool(x.any()),
        lambda: x.nonzero(),
    ]
    for wait in waits:
        with pytest.raises(AssertionError, match="the host waits"), fake:
            wait()
    with fake:
        torch.ones(2).to("cuda", non_blocking=True)
        torch.ones(3).copy_(x, non_blocking=True)


def forward_pass(settings, watch, monkeypatch, ranks=RANKS):
    """The forward pass, the loss and its reduction under `watch`.

    Returns:
        the objective, the model, and the types of what batch norms got.
    """
    # Without an exchange: the one process of this test would find no other to agree with.
    monkeypatch.setattr(dist, "all_gather_object", lambda value, group=None: [value])
    model = fake_model(settings)
    dist.make_groups([(0, 1)])
    norms = [m for m in model.modules() if isinstance(m, torch.nn.modules.batchnorm._BatchNorm)]
    types = set()
    criterion = SegLoss(settings.loss, torch.device("cuda"))
    module = ModelWithLoss(model, criterion, settings.train)
    images, labels = fake_batch()
    images = images.to(dtype_of(settings.train), memory_format=torch.channels_last)
    channels = model.dropout_channels
    masks = DropoutMasks(*(torch.ones(2, c, 1, 1, device="cuda") for c in channels))
    step_sync = StepSync(lambda: True)
    for norm in norms:
        if isinstance(norm, SyncBatchNorm):
            monkeypatch.setattr(norm, "_check_input_dim", lambda x: types.add(x.dtype))
    with watch, placed([2] * ranks):
        with tracked_together():
            sums = module(images, labels, masks)
            totals = step_sync.reduce(sums)
        flags = step_sync.take_flags(torch.ones((), device="cuda"))
        step_sync.record(1, flags, ["a"])
        sync_running_stats(model)
        criterion.means(totals)
        objective = criterion.objective(sums, totals)
    return objective, model, types


NORMS = [
    {"images": 2},
    {"images": 2, "running": "first"},
    {"images": 4, "running": "sequential"},
    {"kind": "frozen"},
    {"kind": "group"},
]


@pytest.mark.parametrize(
    ("norm", "ranks"),
    [
        (NORMS[0], 64),
        *(pytest.param(norm, 1024, marks=SLOW) for norm in NORMS[1:3]),
        *((norm, RANKS) for norm in NORMS[3:]),
    ],
)
def test_no_norm_makes_the_host_wait(monkeypatch, norm, ranks):
    train = {"precision": "bfloat16", "batch_size": 2 * ranks}
    train |= {"init_from": "weights"} if norm == {"kind": "frozen"} else {}
    model = {"arch": "deeplabv3plus", "head_channels": 64}  # group norm needs more than 32
    with fake_ranks(ranks) as watch:
        forward_pass(config(norm=norm, model=model, train=train), watch, monkeypatch, ranks)
    assert watch.collectives.count("allreduce_") >= 1


# Each with its batch norms, the collectives in which they meet, and the kernels of a step up to the
# objective, without those that make constants, which stay.
COUNTED = [
    ("pspnet", "resnet18", "bfloat16", 26, 19, 572),
    ("pspnet", "resnet18", "float32", 26, 19, 530),
    ("pspnet", "resnet50", "bfloat16", 59, 51, 1007),
    ("pspnet", "mobilenet_v3_large", "bfloat16", 52, 48, 982),
    ("deeplabv3", "resnet18", "bfloat16", 28, 20, 461),
    ("deeplabv3plus", "mobilenet_v2", "bfloat16", 61, 55, 883),
]
OTHERS = [pytest.param(row, RANKS, marks=SLOW) for row in COUNTED[2:]]


@pytest.mark.parametrize(
    ("row", "ranks"), [(COUNTED[0], 1024), (COUNTED[0], 64), (COUNTED[1], RANKS), *OTHERS]
)
def test_a_step_of_every_model_launches_and_sends_what_it_did(monkeypatch, row, ranks):
    """Among any number of ranks."""
    arch, backbone, precision, layers, meetings, kernels = row
    train = {"precision": precision, "batch_size": 2 * ranks}
    settings = config(model={"arch": arch, "backbone": backbone}, train=train)
    with fake_ranks(ranks) as watch:
        objective, built, types = forward_pass(settings, watch, monkeypatch, ranks)
    norms = [module for module in built.modules() if isinstance(module, SyncBatchNorm)]
    # One more collective for the sums of the loss.
    assert (len(norms), len(watch.collectives)) == (layers, meetings + 1)
    assert watch.launches.count("batch_norm_update_stats") == layers
    assert watch.launches.count("batch_norm_elemt") == layers
    assert len([name for name in watch.launches if name != "fill_"]) == kernels
    # Mixed precision is not undone between the layers, and the loss is exact.
    assert types == {torch.float32 if precision == "float32" else torch.bfloat16}
    assert objective.dtype == torch.float64


@pytest.mark.parametrize("precision", ["tf32", pytest.param("float64", marks=SLOW), "float16"])
def test_no_precision_makes_the_host_wait(fake, monkeypatch, precision):
    settings = config(train={"precision": precision})
    _, _, types = forward_pass(settings, fake, monkeypatch)
    assert types == {autocast_dtype(settings.train) or dtype_of(settings.train)}


def both_passes(fake, dtype, n=2):
    """The operations of the forward and of the backward pass of a layer."""
    context = stub_context([False] * 2 + [True] * 3)
    x = torch.rand(n, 8, 5, 7, device="cuda", dtype=dtype).to(memory_format=torch.channels_last)
    given, grad = ([1e-5], Sharing(None), x, *torch.rand(2, 8, device="cuda")), torch.rand_like(x)
    with torch.no_grad():
        _SyncBatchNorms.forward(context, *given)
        _SyncBatchNorms.backward(context, grad)  # the constants are made
        with fake:
            fake.forget()
            y, *_ = _SyncBatchNorms.forward(context, *given)
            forward = fake.launches, fake.collectives
            fake.forget()
            _, _, grad_x, *_ = _SyncBatchNorms.backward(context, grad)
    assert (y.dtype, grad_x.dtype, grad_x.shape) == (dtype, dtype, x.shape)
    return forward, (fake.launches, fake.collectives)


def test_a_layer_takes_ten_kernels_forward_and_six_backward(fake):
    (forward, sent), (backward, returned) = both_passes(fake, torch.bfloat16)
    assert (len(forward), len(backward)) == (10, 6)
    assert sent == returned == ["allreduce_"]


def test_a_rank_without_values_touches_no_input(fake):
    for launches, collectives in both_passes(fake, torch.float32, n=0):
        assert collectives == ["allreduce_"]
        assert not any(name.startswith("batch_norm") for name in launches)


def test_what_a_compiler_sees_it_has_rules_for(fake, monkeypatch):
    """torch has no rules for the kernels of its synchronized batch norm, and fuses plain ones."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    (forward, _), (backward, _) = both_passes(fake, torch.bfloat16)
    assert "var_mean" in forward
    assert not any(name.startswith("batch_norm_") for name in forward + backward)
