"""The studies of batch statistics: what they compute is what they say."""

import norm_training
import pytest
import torch
from experiments import experiment, train, write_config, write_data
from norm_training import RUNNING, TREATMENTS, GhostBatchNorm2d, take_running
from torch import nn

from segtrain import dist
from segtrain.checkpoint import load
from segtrain.config import load_config
from segtrain.norm import PartialBatchNorm2d, settle_statistics

C = 4
X = torch.randn(5, C, 6, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# Ranks that see different data.
X = X * torch.linspace(0.5, 3, 5, dtype=torch.float64).view(5, 1, 1, 1) + torch.arange(5).view(
    5, 1, 1, 1
)


def weighted(layer):
    """`layer` in float64, with a weight and bias that could not be forgotten."""
    layer.double()
    with torch.no_grad():
        layer.weight.copy_(torch.linspace(0.5, 2, C))
        layer.bias.copy_(torch.linspace(-1, 1, C))
    return layer


def two_steps(layer, x, settle):
    x = x.clone().requires_grad_()
    outputs = []
    for scale in (1.0, 2.0):
        y = layer(x * scale)
        y.pow(3).sum().backward()
        settle(layer)
        outputs.append(y.detach())
    return outputs, x.grad, layer.weight.grad, layer.bias.grad


def on_a_rank(running, momentum):
    layer = weighted(PartialBatchNorm2d(C, running=running, momentum=momentum))
    rows = dist.share(len(X), dist.world_size(), dist.rank())
    results = two_steps(layer, X[rows.start : rows.stop], settle_statistics)
    return *results, list(layer.buffers())


@pytest.mark.parametrize("running", RUNNING)
@pytest.mark.parametrize("momentum", [0.1, None])
def test_ghost_batch_norm_is_local_batch_norm_of_real_ranks(run_ranks, running, momentum):
    """5 images are 3 + 2: outputs, gradients and running statistics to 1e-12."""
    ghost = weighted(GhostBatchNorm2d(C, num_ranks=2, momentum=momentum))
    outputs, grad, *parameter_grads = two_steps(ghost, X, lambda _: None)
    ranks = run_ranks(2, on_a_rank, running, momentum)

    def close(a, b):
        torch.testing.assert_close(a, b, rtol=1e-12, atol=1e-12)

    close(outputs, [torch.cat(parts) for parts in zip(*(rank[0] for rank in ranks), strict=True)])
    close(grad, torch.cat([rank[1] for rank in ranks]))
    # DistributedDataParallel adds these up over the ranks.
    close(parameter_grads, [ranks[0][i] + ranks[1][i] for i in (2, 3)])
    for rank in ranks:
        close(list(ghost.trackers[running].buffers()), rank[4])
    take_running(ghost, running)
    close([ghost.running_mean, ghost.running_var], ranks[0][4][:2])
    evaluated = ghost.eval()(X)
    theirs = weighted(nn.BatchNorm2d(C)).eval()
    theirs.running_mean, theirs.running_var = ranks[0][4][:2]
    close(evaluated, theirs(X))


def test_a_pooled_branch_of_one_image_a_rank_needs_the_others():
    pooled = X[:4].mean((2, 3), keepdim=True)
    with pytest.raises(ValueError, match="more than 1 value per channel"):
        GhostBatchNorm2d(C, num_ranks=4).double()(pooled)
    whole = GhostBatchNorm2d(C, num_ranks=4, whole_if_pooled=True).double()
    plain = nn.BatchNorm2d(C).double()
    torch.testing.assert_close(whole(pooled), plain(pooled), rtol=0, atol=1e-14)
    for tracker in whole.trackers.values():
        torch.testing.assert_close(tracker.running_var, plain.running_var, rtol=0, atol=1e-14)


@pytest.fixture(scope="module")
def data(tmp_path_factory):
    root = tmp_path_factory.mktemp("data")
    write_data(root)
    return root


@pytest.mark.parametrize(
    ("name", "norm", "ranks"),
    [
        ("sync", {"kind": "sync"}, 1),
        ("local_2_strict", {"kind": "local", "running": "mean"}, 2),
    ],
)
def test_a_treatment_trains_what_segtrain_train_does(run_ranks, tmp_path, data, name, norm, ranks):
    options = experiment(data, norm=norm, train={"steps": 3, "batch_size": 4})
    path = write_config(tmp_path / "c.yaml", options)
    assert run_ranks(ranks, train, path, tmp_path / "run") == [0] * ranks
    wanted = load(tmp_path / "run/checkpoints/last.pt").model

    config = load_config(path)
    (treatment,) = [treatment for treatment in TREATMENTS if treatment.name == name]
    state, losses = norm_training.train(config, treatment.norm(config), "test")
    assert len(losses) == 3
    if ranks > 1:
        take_running(state.model, "mean")
    weights = state.model.state_dict()
    for key, value in wanted.items():
        if not key.endswith("num_batches_tracked"):
            torch.testing.assert_close(weights[key], value, rtol=1e-9, atol=1e-11)
