"""The kinds of statistics that a config can ask for, alone and in training."""

import itertools
import re

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from experiments import experiment, losses, train, write_config
from torch import nn

from segtrain.checkpoint.format import load
from segtrain.checkpoint.loading import load_model
from segtrain.config import NormConfig, load_config
from segtrain.data import open_dataset
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.evaluation.dataset import evaluate_dataset
from segtrain.evaluation.settings import InferenceSettings
from segtrain.norm import (
    FrozenBatchNorm2d,
    PartialBatchNorm2d,
    SyncBatchNorm2d,
    convert,
    describe_norm,
    make_inference_norm,
    make_norm,
    sync_running_stats,
)

C = 4
X = torch.randn(12, C, 5, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
# Ranks that see different data, and different amounts of it.
X = X * torch.linspace(0.5, 3, 12, dtype=torch.float64).view(12, 1, 1, 1) + torch.arange(12).view(
    12, 1, 1, 1
)
ROWS = {3: [slice(0, 3), slice(3, 4), slice(4, 12)], 4: [slice(i, i + 3) for i in (0, 3, 6, 9)]}


def close(a, b, atol=1e-12):
    torch.testing.assert_close(a, b, rtol=0, atol=atol)


WAYS = list(itertools.product(("rank0", "mean", "pooled"), (0.1, None)))


def two_steps(extents):
    """Outputs, the gradient and the buffers of a layer for each extent and each of WAYS."""
    found = []
    for extent, (running, momentum) in itertools.product(extents, WAYS):
        layer = PartialBatchNorm2d(C, extent=extent, running=running, momentum=momentum).double()
        x = X[ROWS[dist.world_size()][dist.rank()]].clone().requires_grad_()
        outputs = []
        for scale in (1.0, 2.0):
            y = layer(x * scale)
            y.pow(3).sum().backward()
            sync_running_stats(layer)
            outputs.append(y.detach())
        found.append((outputs, x.grad, list(layer.buffers())))
    return found


def batch_norm_of(parts, scale):
    """Each group's output by torch, and its mean and unbiased variance."""
    results = []
    for part in parts:
        mean, var = torch.zeros(2, C, dtype=torch.float64)
        y = F.batch_norm(part * scale, mean, var, training=True, momentum=1.0)
        results.append((y, mean, var))
    return results


def tracked(parts, running, momentum):
    """Running mean and variance after both steps, from the groups' parts of the batch."""
    running_mean, running_var = torch.zeros(C).double(), torch.ones(C).double()
    for step, scale in enumerate((1.0, 2.0), start=1):
        groups = batch_norm_of([X] if running == "pooled" else parts, scale)
        groups = groups[:1] if running == "rank0" else groups
        factor = momentum or 1 / step
        running_mean.lerp_(torch.stack([mean for _, mean, _ in groups]).mean(0), factor)
        running_var.lerp_(torch.stack([var for *_, var in groups]).mean(0), factor)
    return running_mean, running_var


@pytest.mark.parametrize(("ranks", "extents"), [(3, (1, 2)), (4, (2,))])
def test_groups_normalize_by_themselves_and_track_together(run_ranks, ranks, extents):
    results = run_ranks(ranks, two_steps, extents)
    for i, extent in enumerate(extents):
        of_extent = [found[i * len(WAYS) : (i + 1) * len(WAYS)] for found in results]
        compare_with_torch(of_extent, ranks, extent)


def compare_with_torch(results, ranks, extent):
    groups = [range(first, min(first + extent, ranks)) for first in range(0, ranks, extent)]
    x = X.clone().requires_grad_()
    parts = [torch.cat([x[ROWS[ranks][rank]] for rank in group]) for group in groups]
    outputs = [torch.cat([y for y, *_ in batch_norm_of(parts, scale)]) for scale in (1.0, 2.0)]
    sum(y.pow(3).sum() for y in outputs).backward()
    for rank, found in enumerate(results):
        rows = ROWS[ranks][rank]
        for way, (ys, grad, buffers) in zip(WAYS, found, strict=True):
            close(ys, [y.detach()[rows] for y in outputs])
            close(grad, x.grad[rows], atol=1e-10)
            mean, var = tracked([part.detach() for part in parts], *way)
            close(buffers, [mean, var, torch.tensor(2)], atol=1e-11)


def empty_groups():
    """Rank 0 (with `extent` 2 also rank 1) never has an image; the others' have mean 5."""
    found = {}
    for extent, running in itertools.product((1, 2), ("rank0", "mean", "pooled")):
        layer = PartialBatchNorm2d(3, extent=extent, running=running)
        generator = torch.Generator().manual_seed(dist.rank())
        for _ in range(50):
            images = 4 if dist.rank() >= extent else 0
            x = (5 + 2 * torch.randn(images, 3, 9, 9, generator=generator)).requires_grad_()
            layer(x).sum().backward()
            assert x.grad.shape == x.shape
            sync_running_stats(layer)
        assert layer.weight.grad.isfinite().all()
        found[extent, running] = layer.running_mean, layer.running_var
    return found, unsettled()


def unsettled():
    layer = PartialBatchNorm2d(3)
    layer(torch.randn(2, 3, 4, 4))
    layer.eval()
    try:
        layer(torch.randn(2, 3, 4, 4))
        said = None
    except RuntimeError as error:
        said = str(error)
    sync_running_stats(layer)
    return said, layer(torch.randn(2, 3, 4, 4)).shape


def test_empty_groups_have_no_say_and_unsettled_statistics_are_not_used(run_ranks):
    for found, (said, shape) in run_ranks(3, empty_groups):
        for (_, running), (mean, var) in found.items():
            if running == "rank0":  # whose group sees nothing
                close([mean, var], [torch.zeros(3), torch.ones(3)], atol=0)
            else:
                torch.testing.assert_close(mean, torch.full((3,), 5.0), rtol=0.05, atol=0)
                torch.testing.assert_close(var, torch.full((3,), 4.0), rtol=0.1, atol=0)
        assert said.startswith("1 batches have not reached the running statistics")
        assert shape == (2, 3, 4, 4)


def test_one_process_is_plain_batch_norm():
    ours, theirs = PartialBatchNorm2d(C).double(), nn.BatchNorm2d(C).double()
    close(ours(X), theirs(X), atol=0)
    sync_running_stats(ours)
    close(dict(ours.named_buffers()), dict(theirs.named_buffers()), atol=0)
    back = convert(ours, to="local")
    assert type(back) is nn.BatchNorm2d
    assert set(vars(back)) == set(vars(theirs))


def test_frozen_statistics_stay_and_are_used_in_training():
    layer = FrozenBatchNorm2d(C).double()
    with torch.no_grad():
        layer.running_mean.fill_(2.0)
        layer.running_var.fill_(9.0)
    y = layer.train()(X)
    close(y, (X - 2) / (9 + 1e-5) ** 0.5)
    y.sum().backward()
    assert layer.weight.grad is not None
    assert layer.num_batches_tracked == 0
    close(layer.running_mean, torch.full((C,), 2.0).double(), atol=0)


@pytest.mark.parametrize(
    ("options", "layer", "words"),
    [
        ({"momentum": 0.03, "eps": 1e-3}, SyncBatchNorm2d, "synchronized batch norm"),
        ({"extent": "node"}, PartialBatchNorm2d, "within each machine, .* pooled over all ranks"),
        ({"extent": 2, "running": "mean"}, PartialBatchNorm2d, "groups of 2 ranks, .* the mean"),
        ({"kind": "local", "running": "rank0"}, PartialBatchNorm2d, "local .* of rank 0"),
        ({"kind": "frozen"}, FrozenBatchNorm2d, "frozen"),
        ({"kind": "group"}, nn.GroupNorm, "group norm, at most 32 groups"),
        ({"precise_batches": 8}, SyncBatchNorm2d, "precise over 8 batches"),
    ],
)
def test_the_config_chooses_the_layer_and_says_so(options, layer, words):
    config = NormConfig(**options)
    made = make_norm(config)(48)
    assert type(made) is layer
    assert vars(config).items() >= {(k, v) for k, v in vars(made).items() if k in options}
    assert re.search(words, describe_norm(config))
    # What is loaded for evaluation has the same keys and computes the same.
    plain = make_inference_norm(config)(48)
    plain.load_state_dict(made.state_dict())
    x = torch.randn(2, 48, 3, 3)
    close(plain.eval()(x), made.eval()(x), atol=0)


def test_groups_train_and_are_evaluated_alike_on_all_ranks(run_ranks, tmp_path, data):
    """Ranks with running statistics of their own would score their shares by different models.

    Of three ranks in groups of two the last is alone, as with `kind: local`.
    """
    numbers = {"steps": 2, "precision": "float32", "batch_size": 6}
    options = experiment(data, norm={"extent": 2, "running": "mean"}, train=numbers)
    config = write_config(tmp_path / "c.yaml", options)
    assert run_ranks(3, train, config, tmp_path / "run") == [0] * 3
    assert np.isfinite(losses(tmp_path / "run")).all()
    (scored,) = losses(tmp_path / "run", "eval/mIoU")
    assert load(tmp_path / "run/checkpoints/last.pt").best["mean_iou"] == scored
    loaded = load_model(tmp_path / "run")
    outcome = evaluate_dataset(
        loaded.model,
        open_dataset(loaded.config.data, "val"),
        InferenceSettings.from_config(loaded.config),
        device=torch.device("cpu"),
        num_classes=loaded.classes.num_classes,
    )
    assert outcome.matrix.scores().mean_iou == pytest.approx(scored, abs=2e-3)


def test_precise_statistics_do_not_see_the_ranks(run_ranks, tmp_path, data):
    """The moving averages hardly move by themselves."""
    options = experiment(
        data,
        augment={"crop_size": [25, 33]},
        model={"backbone": "mobilenet_v2"},
        norm={"precise_batches": 2, "momentum": 1e-6},
        train={"steps": 1},
    )
    config = write_config(tmp_path / "c.yaml", options)
    found = []
    for ranks in (1, 2):
        run_ranks(ranks, train, config, tmp_path / f"{ranks}")
        found.append(load(tmp_path / f"{ranks}/checkpoints/last.pt").model)
    one, two = found
    for key, wanted in one.items():
        torch.testing.assert_close(two[key], wanted, rtol=1e-9, atol=1e-11)
    assert ((one["backbone.features.0.1.running_var"] - 1).abs() > 1e-3).all()


def test_frozen_statistics_of_random_weights_are_refused(tmp_path, data):
    config = write_config(tmp_path / "c.yaml", experiment(data, norm={"kind": "frozen"}))
    with pytest.raises(ConfigError, match=r"train\.init_from"):
        load_config(config)
