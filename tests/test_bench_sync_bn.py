"""The benchmark of synchronized batch norm: what it compares must compute the same."""

import json
import sys
from contextlib import ExitStack
from unittest import mock

import bench_sync_bn
import pytest
import torch
import torch.nn.functional as F
from bench_sync_bn import LOCAL
from sync_bn_schemes import SCHEMES, SchemeBatchNorm2d

from segtrain.distributed import collectives as dist

C = 5
# Those that weigh ranks by their number of values.
EXACT = ("1+1 all_reduce", "1+1 all_gather")


def batch(num_images):
    generator = torch.Generator().manual_seed(0)
    shape = (2, num_images, C, 3, 4)
    return (torch.randn(shape, generator=generator, dtype=torch.float64) * 3 + 2).unbind()


def run_layer(layer, x, grad):
    """Output, the three gradients, and the running statistics."""
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, C))
        layer.bias.copy_(torch.linspace(-1, 1, C))
    x.requires_grad_()
    y = layer(x)
    grads = torch.autograd.grad(y, (x, layer.weight, layer.bias), grad)
    return [y.detach(), *grads, layer.running_mean, layer.running_var]


def whole_batch(num_images):
    x, grad = batch(num_images)

    class Reference(torch.nn.BatchNorm2d):
        def forward(self, input):
            mean, var = self.running_mean, self.running_var
            return F.batch_norm(input, mean, var, self.weight, self.bias, True)

    return run_layer(Reference(C).double(), x, grad)


COLLECTIVES = ("all_reduce", "all_gather_into_tensor", "all_gather", "all_gather_single")


def run_part(name, splits):
    """This rank's results of a scheme, and its collectives forward and backward."""
    calls = []

    def counted(function):
        def call(*args, **kwargs):
            calls.append(torch._C._current_graph_task_id() != -1)
            return function(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for function in COLLECTIVES:
            stand_in = counted(getattr(torch.distributed, function))
            stack.enter_context(mock.patch.object(torch.distributed, function, stand_in))
        x, grad = (t.split(splits)[dist.rank()].contiguous() for t in batch(sum(splits)))
        results = run_layer(SchemeBatchNorm2d(C, SCHEMES[name]).double(), x, grad)
    return results, f"{calls.count(False)}+{calls.count(True)}"


RUNS = [*((name, (2, 2)) for name in SCHEMES), *((name, (1, 3)) for name in EXACT)]


def everything():
    """What the tests below ask of a rank, in one process group."""
    return [run_part(*run) for run in RUNS]


@pytest.fixture(scope="module")
def ranks(run_ranks):
    return run_ranks(2, everything)


@pytest.mark.parametrize("number", range(len(RUNS)))
def test_every_scheme_equals_the_whole_batch(ranks, number):
    name, splits = RUNS[number]
    parts, counts = zip(*(rank[number] for rank in ranks), strict=True)
    y, grad_x, grad_weight, grad_bias, *running = whole_batch(sum(splits))
    exact = {"rtol": 0, "atol": 1e-12}
    torch.testing.assert_close(torch.cat([part[0] for part in parts]), y, **exact)
    torch.testing.assert_close(torch.cat([part[1] for part in parts]), grad_x, **exact)
    # Parameters' gradients stay local sums; `segtrain.training.gradients` adds them up.
    torch.testing.assert_close(sum(part[2] for part in parts), grad_weight, **exact)
    torch.testing.assert_close(sum(part[3] for part in parts), grad_bias, **exact)
    for part in parts:
        torch.testing.assert_close(part[4:], running, **exact)
    assert counts == (name.split()[0],) * 2


def test_command_without_a_name_measures_layers(run_ranks, tmp_path, monkeypatch, capsys):
    def on_ranks(number, device, function, *args, group=True):
        return run_ranks(number, function, torch.device(device), *args)[0]

    monkeypatch.setattr(bench_sync_bn, "on_ranks", on_ranks)
    options = ["--shapes", "2x3x4x5", "--rounds", "2", "--block-ms", "0"]
    options += ["--json", str(tmp_path / "layers.json")]
    monkeypatch.setattr(sys, "argv", ["bench_sync_bn.py", *options])
    bench_sync_bn.main()
    output = capsys.readouterr().out
    assert "## Compute alone" in output
    assert all(f" {name} |" in output for name in SCHEMES)
    times = json.loads((tmp_path / "layers.json").read_text())
    assert [case["layout"] for case in times["together"]] == ["contiguous", "channels_last"]
    assert all(len(case["times"][LOCAL]) == 2 for case in times["together"])
