"""What a batch norm asks of a CUDA device that does not exist: how much, and never to wait."""

import pytest
import torch
from fake_device import stub_context

from segtrain.norm.functional import NormInput, _SyncBatchNorms
from segtrain.norm.groups import Sharing

FORWARD = [
    "batch_norm_update_stats",
    "cat",
    "mul",
    "addcmul_",
    # the collective
    "div",
    "addcmul_",
    "maximum",
    "add",
    "rsqrt_",
    "batch_norm_elemt",
]
BACKWARD = [
    "add",
    "rsqrt_",
    "batch_norm_backward_reduce",
    "_foreach_copy_",
    # the collective
    "div",
    "batch_norm_backward_elemt",
]


def layer_input(dtype=torch.float32, memory_format=torch.channels_last, n=2):
    x = torch.rand(n, 8, 5, 7, device="cuda", dtype=dtype)
    return x.to(memory_format=memory_format)


def both_passes(fake, layer):
    """The operations of the forward and of the backward pass, and the gradients."""
    context = stub_context([False] * 2 + [True] * 3)
    grad = torch.rand_like(layer.x)
    *tensors, eps = layer
    given = [eps], Sharing(None), *tensors
    with torch.no_grad():
        _SyncBatchNorms.forward(context, *given)
        _SyncBatchNorms.backward(context, grad)  # the constants are made
        with fake:
            fake.forget()
            y, *_ = _SyncBatchNorms.forward(context, *given)
            forward = fake.launches, fake.collectives
            fake.forget()
            grads = _SyncBatchNorms.backward(context, grad)[2:]
    assert y.dtype == layer.x.dtype
    return forward, (fake.launches, fake.collectives), grads


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_layer_takes_ten_kernels_forward_and_six_backward(fake, dtype, memory_format):
    x = layer_input(dtype, memory_format)
    wide = torch.promote_types(dtype, torch.float32)
    layer = NormInput(x, *torch.rand(2, 8, device="cuda", dtype=wide), 1e-5)
    forward, backward, (grad_x, grad_weight, grad_bias) = both_passes(fake, layer)
    assert forward == (FORWARD, ["allreduce_"])
    assert backward == (BACKWARD, ["allreduce_"])
    assert (grad_x.dtype, grad_x.shape, grad_x.stride()) == (dtype, x.shape, x.stride())
    assert grad_weight.dtype == grad_bias.dtype == wide


def test_a_rank_without_values_touches_no_input(fake):
    layer = NormInput(layer_input(n=0), *torch.rand(2, 8, device="cuda"), 1e-5)
    forward, backward, (grad_x, *_) = both_passes(fake, layer)
    assert forward[1] == backward[1] == ["allreduce_"]
    assert not any(name.startswith("batch_norm") for name in forward[0] + backward[0])
    assert grad_x.shape == layer.x.shape


def test_what_a_compiler_sees_it_has_rules_for(fake, monkeypatch):
    """torch has no rules for the kernels of its synchronized batch norm, and fuses plain ones."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer = NormInput(layer_input(torch.bfloat16), *torch.rand(2, 8, device="cuda"), 1e-5)
    forward, backward, (grad_x, *_) = both_passes(fake, layer)
    assert "var_mean" in forward[0]
    ours = {name for name in (*forward[0], *backward[0]) if name.startswith("batch_norm_")}
    assert ours == set()
    assert grad_x.dtype == torch.bfloat16
