"""What a batch norm asks of a CUDA device that does not exist: how much, and never to wait."""

from functools import partial

import pytest
import torch
from fake_device import fake_ranks, stub_context

from segtrain.norm import SyncBatchNorm2d, normalize_together, tracked_together
from segtrain.norm.functional import NormInput, _NormReLUConv, _SyncBatchNorms

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


def both_passes(fake, inputs):
    """The operations of the forward and of the backward pass, and the gradients."""
    context = stub_context([False, False, *[True] * 3 * len(inputs)])
    tensors = [t for layer in inputs for t in layer[:3]]
    grads = [torch.rand_like(layer.x) for layer in inputs]
    run = partial(_SyncBatchNorms.forward, context, [layer.eps for layer in inputs], None)
    back = partial(_SyncBatchNorms.backward, context, *grads, *[None] * 3 * len(inputs))
    with torch.no_grad():
        run(*tensors)
        back()  # the constants are made
        with fake:
            fake.forget()
            ys = run(*tensors)[: len(inputs)]
            forward = fake.launches, fake.collectives
            fake.forget()
            _, _, *results = back()
    assert [y.dtype for y in ys] == [layer.x.dtype for layer in inputs]
    return forward, (fake.launches, fake.collectives), results


@pytest.mark.parametrize("memory_format", [torch.contiguous_format, torch.channels_last])
@pytest.mark.parametrize(
    "dtype", [torch.float64, torch.float32, torch.bfloat16, torch.float16], ids=str
)
def test_a_layer_takes_ten_kernels_forward_and_six_backward(fake, dtype, memory_format):
    x = layer_input(dtype, memory_format)
    wide = torch.promote_types(dtype, torch.float32)
    layer = NormInput(x, *torch.rand(2, 8, device="cuda", dtype=wide), 1e-5)
    forward, backward, (grad_x, grad_weight, grad_bias) = both_passes(fake, [layer])
    assert forward == (FORWARD, ["allreduce_"])
    assert backward == (BACKWARD, ["allreduce_"])
    assert (grad_x.dtype, grad_x.shape, grad_x.stride()) == (dtype, x.shape, x.stride())
    assert grad_weight.dtype == grad_bias.dtype == wide


def test_branches_share_the_collective_and_some_kernels(fake):
    layers = [NormInput(layer_input(), *torch.rand(2, 8, device="cuda"), 1e-5) for _ in range(4)]
    forward, backward, _ = both_passes(fake, layers)
    counts = [(len(launches), collectives) for launches, collectives in (forward, backward)]
    # All but one of a layer's kernels are its own.
    assert counts == [(4 * 9 + 1, ["allreduce_"]), (4 * 5 + 1, ["allreduce_"])]


def test_a_rank_without_values_touches_no_input(fake):
    layer = NormInput(layer_input(n=0), *torch.rand(2, 8, device="cuda"), 1e-5)
    forward, backward, (grad_x, *_) = both_passes(fake, [layer])
    assert forward[1] == backward[1] == ["allreduce_"]
    assert not any(name.startswith("batch_norm") for name in forward[0] + backward[0])
    assert grad_x.shape == layer.x.shape


def test_recomputing_the_activation_makes_no_wait(fake):
    x = layer_input(torch.bfloat16)
    kernel = torch.rand(4, 8, 1, 1, device="cuda")
    context = stub_context([True] * 5 + [False] * 2)
    geometry = ((1, 1), (0, 0), (1, 1), 1)
    parameters = torch.rand(2, 8, device="cuda")
    with fake, torch.no_grad():
        y, *_ = _NormReLUConv.forward(context, x, *parameters, 1e-5, kernel, None, geometry)
        grad_x, *_, grad_kernel, _, _ = _NormReLUConv.backward(context, torch.rand_like(y))
    assert fake.collectives == ["allreduce_"] * 2
    assert (grad_x.dtype, grad_kernel.dtype) == (torch.bfloat16, torch.float32)


@pytest.mark.parametrize("num_layers", [3, 7])
def test_running_statistics_cost_the_same_for_any_number_of_layers(fake, num_layers):
    layers = [SyncBatchNorm2d(8, device="cuda") for _ in range(num_layers)]
    x = layer_input()

    def run():
        with torch.no_grad(), tracked_together():
            for layer in layers:
                layer(x)

    run()
    with fake:
        fake.forget()
        run()
    assert len(fake.launches) == 10 * num_layers + 20, fake.launches
    assert len(fake.collectives) == num_layers


def test_what_is_sent_does_not_grow_with_the_ranks():
    with fake_ranks(1024) as watch, torch.no_grad():
        layers = [SyncBatchNorm2d(8, device="cuda") for _ in range(2)]
        normalize_together([(layer_input(), layer) for layer in layers])
        with watch:
            normalize_together([(layer_input(), layer) for layer in layers])
    assert watch.collectives == ["allreduce_"]
    assert watch.launches.count("batch_norm_elemt") == 2


def test_what_a_compiler_sees_it_has_rules_for(fake, monkeypatch):
    """torch has no rules for the kernels of its synchronized batch norm, and fuses plain ones."""
    monkeypatch.setattr(torch.compiler, "is_compiling", lambda: True)
    layer = NormInput(layer_input(torch.bfloat16), *torch.rand(2, 8, device="cuda"), 1e-5)
    forward, backward, (grad_x, *_) = both_passes(fake, [layer])
    assert "var_mean" in forward[0]
    ours = {name for name in (*forward[0], *backward[0]) if name.startswith("batch_norm_")}
    assert ours == set()
    assert grad_x.dtype == torch.bfloat16
