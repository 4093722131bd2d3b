"""tools/norm_simulation.py: the simulated statistics are what the layers track, as by formula."""

import math

import pytest
import torch
from norm_simulation import (
    ESTIMATES,
    NUM_RANKS,
    SETTINGS,
    Setting,
    batch_statistics,
    exact,
    running_average,
    simulate,
    standard_error,
)

from segtrain.distributed import collectives as dist
from segtrain.norm import SyncBatchNorm2d, placed, sync_running_stats

NUM_BATCHES = 4000


@pytest.mark.parametrize("setting", SETTINGS, ids=str)
def test_simulated_statistics_have_the_exact_law(setting):
    """Means over the steps within 4 standard errors; standard deviations likewise.

    An exponential average of momentum m is an autoregression with coefficient a = 1 - m; its sample
    variance has a relative variance of (2 (1 + a^2) / (1 - a^2) + kappa) / T, with the excess
    kurtosis kappa of what it averages, 12 at most (a chi-square of one degree of freedom).
    """
    decay = 0.9
    relative = (2 * (1 + decay**2) / (1 - decay**2) + 12) / NUM_BATCHES
    measured = simulate(setting, seed=1, num_batches=NUM_BATCHES)
    for name in ESTIMATES:
        for law, wanted in zip(measured[name], exact(setting, name), strict=True):
            error = standard_error(wanted, NUM_BATCHES)
            # The start (0, 1) is forgotten to a part of 1e-9.
            assert law.expectation == pytest.approx(wanted.expectation, abs=4 * error + 1e-8)
            assert law.sd == pytest.approx(wanted.sd, rel=4 * math.sqrt(relative) / 2, abs=1e-8)


def tracked(values):
    """Running means and variances of real layers, by kind, on this rank's part of `values`."""
    layers = {kind: SyncBatchNorm2d(1, images=1, running=kind).double() for kind in ESTIMATES}
    for step in values[dist.rank()].unbind(1):
        for layer in layers.values():
            with placed([1] * NUM_RANKS):
                layer(step.view(1, 1, -1, 1))
            sync_running_stats(layer)
    return {kind: (one.running_mean.item(), one.running_var.item()) for kind, one in layers.items()}


def test_the_simulation_tracks_what_the_layers_track(run_ranks):
    values = Setting(4, spread=1.0).draw(30, torch.Generator().manual_seed(0))  # (k, B, T)
    batches = batch_statistics(values)
    for found in run_ranks(NUM_RANKS, tracked, values):
        for kind, statistics in found.items():
            mean = running_average(batches[kind].mean, 0.0)[-1]
            var = running_average(batches[kind].var, 1.0)[-1]
            assert statistics == pytest.approx((mean, var), rel=1e-12)
