"""A training step on a CUDA device that does not exist: nothing in it may make the host wait.

A fake tensor has a shape, a dtype and a device but no values, so a step runs on it on any machine.
`NoWaits` sees every operation and refuses those for which the host waits for the device. torch
cannot run `backward` on fake CUDA tensors: backward passes of own functions are called by hand, and
others run on the meta device, where reading a value is an error too.
"""

from contextlib import nullcontext
from types import SimpleNamespace

import pytest
import torch
import torch.distributed as torch_dist
from torch import Tensor, nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed import offload
from segtrain.models import build_model
from segtrain.models.precision import dtype_of
from segtrain.norm import make_norm, settle_statistics
from segtrain.norm.functional import NormInput, _SyncBatchNorms
from segtrain.training import passes
from segtrain.training.engine import _update
from segtrain.training.losses import SegLoss
from segtrain.training.optim import WeightAverage, build_optimizer
from segtrain.training.step_sync import StepSync
from segtrain.training.wrap import wrap
from segtrain.types import Batch, DropoutMasks, SegLogits

RANKS, K = 8, 5
aten = torch.ops.aten

# What an operation needs on fake tensors; torch has none for these.
_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


def _update_stats(x, running_mean, running_var, momentum):
    dtype = x.dtype if running_mean is None else running_mean.dtype
    return tuple(x.new_empty(2, x.shape[1], dtype=dtype).unbind())


_LIBRARY.impl("batch_norm_update_stats", _update_stats)
_LIBRARY.impl("_fused_sgd_", lambda *_, **__: None)

_WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten.equal,
    aten._unique2,
}


class NoWaits(TorchDispatchMode):
    """Refuses operations for which the host waits; `seen` are the names of all operations."""

    def __init__(self):
        super().__init__()
        self.seen = []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        self.seen.append(packet.__name__)
        if packet in _WAITING:
            raise AssertionError(f"the host waits in {func}")
        if packet is aten.is_pinned:
            return False
        if packet is aten._pin_memory:
            return args[0].clone()  # needs a device
        result = func(*args, **kwargs)
        if packet in (aten._to_copy, aten.copy_):
            source = args[1] if packet is aten.copy_ else args[0]
            late = kwargs.get("non_blocking") or (packet is aten.copy_ and args[2:] == (True,))
            if source.device.type != result.device.type and not late:
                raise AssertionError(f"the host waits for a copy to {result.device}: {func}")
        return result


class NoEvent:
    """An event that the device never reaches."""

    def record(self, *_):
        pass

    def query(self):
        return False


@pytest.fixture
def fake(monkeypatch):
    """Rank 0 of 8 on a fake device, with autocast for it; yields what watches the operations."""
    monkeypatch.setattr("torch.cuda.amp.common.amp_definitely_not_available", lambda: False)
    monkeypatch.setattr("torch.cuda.is_bf16_supported", lambda *_: True)
    monkeypatch.setattr("torch.cuda.Event", NoEvent)
    torch_dist.init_process_group("fake", rank=0, world_size=RANKS, store=FakeStore())
    with FakeTensorMode(allow_non_fake_inputs=True):
        yield NoWaits()
    torch_dist.destroy_process_group()


def config(**sections):
    data = {"layout": "voc", "root": "nowhere", "classes": "voc"}
    model = {"backbone": "resnet18", "head_channels": 8, "aux_channels": 8}
    model |= sections.pop("model", {})
    train = {"batch_size": 2 * RANKS, **sections.pop("train", {})}
    augment = {"crop_size": (65, 73), **sections.pop("augment", {})}
    return Config(data=data, model=model, train=train, augment=augment, **sections)


def fake_batch(device="cuda"):
    images = torch.rand(2, 3, 65, 73, device=device)
    return images, torch.randint(K, (2, 65, 73), device=device)


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


NORMS = [
    {"kind": "sync"},
    {"kind": "local"},
    {"kind": "local", "running": "mean"},
    {"kind": "sync", "extent": 2},
    {"kind": "frozen"},
    {"kind": "group"},
]


def forward_pass(settings, watch):
    """The forward pass, the loss and its reduction under `watch`; returns the objective."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(settings.train))
    try:
        with torch.device("cuda"):  # a module of fake tensors cannot be moved
            model = build_model(settings.model, num_classes=K, norm=make_norm(settings.norm))
    finally:
        torch.set_default_dtype(before)
    model.train()
    dist.make_groups([(0, 1)])
    criterion = SegLoss(settings.loss, torch.device("cuda"), batch_size=2 * RANKS)
    module = wrap(model, criterion, settings.train)
    images, labels = fake_batch()
    images = images.to(dtype_of(settings.train), memory_format=torch.channels_last)
    channels = model.dropout_channels
    masks = DropoutMasks(*(torch.ones(2, c, 1, 1, device="cuda") for c in channels))
    step_sync = StepSync(lambda: True)
    with watch:
        sums = module(images, labels, masks)
        totals = step_sync.reduce(sums)
        step_sync.record(1, torch.ones((), device="cuda"), ["a"])
        settle_statistics(model)
        criterion.means(totals)
        return criterion.objective(sums, totals)


@pytest.mark.parametrize("norm", NORMS, ids=lambda norm: "-".join(map(str, norm.values())))
def test_no_norm_makes_the_host_wait(fake, monkeypatch, norm):
    # Without an exchange: the one process of this test would find no other to agree with.
    monkeypatch.setattr(dist, "all_gather_object", lambda value, group=None: [value])
    start = {"init_from": "weights"} if norm["kind"] == "frozen" else {}
    forward_pass(config(norm=norm, train={"precision": "bfloat16", **start}), fake)


@pytest.mark.parametrize("precision", ["float32", "float64", "float16", "bfloat16"])
def test_no_precision_makes_the_host_wait(fake, monkeypatch, precision):
    monkeypatch.setattr(dist, "all_gather_object", lambda value, group=None: [value])
    model = {"arch": "deeplabv3plus"}
    forward_pass(config(model=model, train={"precision": precision}), fake)


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
def test_no_loss_makes_the_host_wait(fake, loss):
    criterion, logits, labels = loss_of(config(loss=loss), "cuda")
    with fake:
        sums = criterion(SegLogits(*logits), labels)
        criterion.objective(sums, StepSync(lambda: False).reduce(sums))
        criterion.label_weight(labels)


@pytest.mark.parametrize("loss", LOSSES, ids=lambda loss: "-".join(map(str, loss.values())))
def test_no_backward_pass_of_a_loss_reads_a_value(loss):
    criterion, logits, labels = loss_of(config(loss=loss), "meta")
    sums = criterion(SegLogits(*logits), labels)
    criterion.objective(sums, StepSync(lambda: False).reduce(sums)).backward()
    assert all(one.grad.shape == one.shape for one in logits)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_backward_pass_of_synchronized_batch_norm_makes_no_wait(fake, dtype):
    x = torch.rand(2, 8, 5, 7, device="cuda", dtype=dtype)
    x = x.to(memory_format=torch.channels_last)
    layer = NormInput(x, *torch.rand(2, 8, device="cuda"), 1e-5)
    context = SimpleNamespace(
        save_for_backward=lambda *tensors: setattr(context, "saved_tensors", tensors),
        set_materialize_grads=lambda _: None,
        mark_non_differentiable=lambda *_: None,
        needs_input_grad=[False, False, True, True, True],
    )
    with fake, torch.no_grad():
        y, *_ = _SyncBatchNorms.forward(context, [layer.eps], None, *layer[:3])
        _, _, grad_x, *_ = _SyncBatchNorms.backward(context, torch.rand_like(y), None, None, None)
    assert (grad_x.dtype, grad_x.shape) == (dtype, x.shape)


UPDATES = [
    {},
    {"optimizer": "adamw", "ema_decay": 0.9, "clip_grad_norm": 1.0},
    {"precision": "float16", "ema_decay": 0.9},
    {"precision": "float16", "optimizer": "adamw"},
    {"decoupled_decay": True, "momentum_correction": False},
]


@pytest.mark.parametrize("options", UPDATES, ids=lambda o: "-".join(map(str, o.values())))
def test_an_update_makes_no_wait_and_is_one_kernel(fake, options):
    train = config(train=options).train
    # Two, since a fake tensor cannot be copied with its module.
    model, averaged = (
        nn.Sequential(nn.Conv2d(3, 4, 3, device="cuda"), nn.BatchNorm2d(4, device="cuda"))
        for _ in range(2)
    )
    average = WeightAverage(nn.Identity(), 0.9)
    average.model = averaged.requires_grad_(False)
    state = SimpleNamespace(
        model=model,
        optimizer=build_optimizer(model, train),
        scaler=torch.amp.GradScaler("cuda", enabled=train.precision == "float16"),
        average=average if train.ema_decay else None,
        start=SimpleNamespace(hold_gradients=lambda: None),
        step=0,
    )
    state.scaler.scale(torch.zeros((), device="cuda"))
    for parameter in model.parameters():
        parameter.grad = torch.rand_like(parameter)
    with fake:
        _update(state, 0.1, train.clip_grad_norm)
    fused = [name for name in fake.seen if name.startswith("_fused_")]
    assert fused == [f"_fused_{train.optimizer}_"]


def test_a_copy_to_the_host_is_counted_as_in_flight(fake, monkeypatch):
    """The stream and its event are stubs; the copy is an operation like any other."""
    counted = []
    stream = SimpleNamespace(wait_stream=lambda _: None)
    in_flight = SimpleNamespace(add=lambda event, size: counted.append(size))
    monkeypatch.setitem(offload._streams, torch.device("cuda", 0), (stream, in_flight))
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
        parts = passes.rank_batches(state, [batch] * 2, indices, settings, torch.device("cuda"))
        weights = passes._loss_weights(state, parts, [[2], [2]], settings)
    tensors = [t for part in (*parts, weights) for t in part if isinstance(t, Tensor)]
    tensors += [mask for part in parts for mask in part.dropout if mask is not None]
    assert len(tensors) == (8 if mixup_alpha is None else 10)
    assert {t.device.type for t in tensors} == {"cuda"}
