"""CUDA devices and ranks that do not exist.

A fake tensor has a shape, a dtype and a device but no values, so a step runs on it on any machine.
`NoWaits` sees every operation and refuses those for which the host waits for the device. torch
cannot run `backward` on fake CUDA tensors: backward passes of own functions are called by hand, and
others run on the meta device, where reading a value is an error too.
"""

from contextlib import ExitStack, contextmanager
from types import SimpleNamespace
from unittest import mock

import torch
import torch.distributed as torch_dist
from cuda_standins import _accumulates_in
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils._python_dispatch import TorchDispatchMode

from segtrain.config import Config
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.models.precision import dtype_of

RANKS, K = 8, 5
aten = torch.ops.aten

# What operations need on fake tensors; torch has none for these.
_LIBRARY = torch.library.Library("aten", "IMPL", "Meta")


def _update_stats(x, running_mean, running_var, momentum):
    return tuple(x.new_empty(2, x.shape[1], dtype=_accumulates_in(x)).unbind())


def _elemt(x, weight, bias, mean, invstd, eps):
    return torch.empty_like(x)


def _backward_reduce(grad, x, mean, invstd, weight, input_g, weight_g, bias_g):
    sums = (torch.empty_like(mean) for _ in range(2))
    grads = (torch.empty_like(mean if weight is None else weight) for _ in range(2))
    return (*sums, *grads)


def _backward_elemt(grad, x, mean, invstd, weight, sum_dy, sum_dy_xmu, count):
    return torch.empty_like(x)


_LIBRARY.impl("batch_norm_update_stats", _update_stats)
_LIBRARY.impl("batch_norm_elemt", _elemt)
_LIBRARY.impl("batch_norm_backward_reduce", _backward_reduce)
_LIBRARY.impl("batch_norm_backward_elemt", _backward_elemt)
for _update in ("_fused_sgd_", "_fused_sgd_.tensor_lr", "_fused_adamw_.tensor_lr"):
    _LIBRARY.impl(_update, lambda *_, **__: None)

_WAITING = {
    aten._local_scalar_dense,
    aten.nonzero,
    aten.masked_select,
    aten.bincount,
    aten.equal,
    aten._unique2,
}
_NO_KERNEL = {
    aten.empty,
    aten.empty_like,
    aten.empty_strided,
    aten.new_empty,
    aten.new_empty_strided,
    aten.is_pinned,
    aten._pin_memory,
    aten.record_stream,
    aten.promote_types,
    aten.detach,
    aten._reshape_alias,
}


class NoWaits(TorchDispatchMode):
    """Refuses operations for which the host waits, and counts the others.

    seen: the names of all operations.
    launches: of those that start a kernel on the device, without collectives. One operation may
        start several: a reduction over many values clears a counter first.
    collectives: of those that exchange something with other ranks.
    """

    def __init__(self):
        super().__init__()
        self.forget()

    def forget(self):
        self.seen, self.launches, self.collectives = [], [], []

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        kwargs = kwargs or {}
        packet = func.overloadpacket
        self._count(func)
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

    def _count(self, func):
        name = func.overloadpacket.__name__
        self.seen.append(name)
        if func.namespace == "c10d":
            self.collectives.append(name)
        elif func.namespace == "aten" and not (func.is_view or func.overloadpacket in _NO_KERNEL):
            self.launches.append(name)


class NoEvent:
    """An event that the device never reaches."""

    def record(self, *_):
        pass

    def query(self):
        return False


@contextmanager
def fake_ranks(ranks=RANKS):
    """Rank 0 of many on a fake device, with autocast for it; yields what watches operations."""
    patches = {
        "torch.cuda.amp.common.amp_definitely_not_available": lambda: False,
        "torch.cuda.is_bf16_supported": lambda *_: True,
        "torch.cuda.Event": NoEvent,
        # No fake constants may stay behind.
        "segtrain.norm.cuda_kernels._constants": {},
    }
    with ExitStack() as stack:
        for name, stand_in in patches.items():
            stack.enter_context(mock.patch(name, stand_in))
        torch_dist.init_process_group("fake", rank=0, world_size=ranks, store=FakeStore())
        stack.callback(torch_dist.destroy_process_group)
        stack.enter_context(FakeTensorMode(allow_non_fake_inputs=True))
        yield NoWaits()


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


def fake_model(settings):
    """The model of a config on the fake device, in training; a fake module cannot be moved."""
    before = torch.get_default_dtype()
    torch.set_default_dtype(dtype_of(settings.train))
    try:
        with torch.device("cuda"):
            model = build_model(settings.model, num_classes=K, norm=make_norm(settings.norm))
    finally:
        torch.set_default_dtype(before)
    return model.train()


def stub_context(needs_input_grad):
    """What autograd hands to the two passes of a function."""
    context = SimpleNamespace(
        save_for_backward=lambda *tensors: setattr(context, "saved_tensors", tensors),
        set_materialize_grads=lambda _: None,
        mark_non_differentiable=lambda *_: None,
        needs_input_grad=needs_input_grad,
    )
    return context
