"""Running variances of several ranks on drawn data, beside their exact expectation and spread.

Every step, k ranks see B values each, and each normalizes by its own (`norm.images`). What is
tracked (`norm.running`) is the unbiased variance of the first rank, its mean over the ranks, or the
unbiased variance of all k B values together; the running variance is the exponential average
of that. The batch statistics are made by the functions that training uses. It takes 10 seconds.

    python tools/norm_simulation.py
"""

import math
from collections.abc import Iterator
from dataclasses import dataclass
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor

from segtrain.norm.kernels import packed, unbiased, unpacked_moments

MEAN, SD = 3.9, 12.4
NUM_RANKS = 4
MOMENTUM = 0.1
NUM_BATCHES = 10_000
# What is left of the start, 1, after these is 1e-9 of it.
BURN_IN = 200
# As `norm.running` names them.
ESTIMATES = ("first", "mean", "pooled")


@dataclass(frozen=True)
class Setting:
    """Data of the ranks: normal with standard deviation SD, about a mean of each rank's own.

    batch_size: B, values a rank and step.
    spread: standard deviation of the ranks' means, in units of SD.
    redrawn: the means are normal and drawn anew for every step, as those of images are; else they
        are constants, evenly spaced, whose mean is MEAN.
    """

    batch_size: int
    spread: float = 0.0
    redrawn: bool = False

    @property
    def variance(self) -> float:
        """The variance of all values that the ranks ever see together."""
        return SD**2 * (1 + self.spread**2)

    def rank_means(self) -> Tensor:
        """The constant means, (k,) float64, with standard deviation spread x SD over the ranks."""
        places = torch.arange(NUM_RANKS, dtype=torch.float64)
        places = (places - places.mean()) / places.std(correction=0)
        return MEAN + self.spread * SD * places

    def draw(self, num_batches: int, generator: torch.Generator) -> Tensor:
        """The values of all ranks and steps, (k, B, num_batches) float64."""
        shape = (NUM_RANKS, self.batch_size, num_batches)
        noise = torch.randn(shape, generator=generator, dtype=torch.float64) * SD
        if not self.redrawn:
            return noise + self.rank_means().view(-1, 1, 1)
        means = torch.randn(NUM_RANKS, 1, num_batches, generator=generator, dtype=torch.float64)
        return noise + MEAN + means * self.spread * SD


# From few values to many; then ranks that see different data, all the time or from step to step.
SETTINGS = (
    *(Setting(size) for size in (1, 2, 4, 16, 100)),
    *(Setting(size, spread) for size in (4, 100) for spread in (0.5, 1.0)),
    *(Setting(size, spread, redrawn=True) for size in (4, 100) for spread in (0.5, 1.0)),
)


class Law(NamedTuple):
    """Expectation and standard deviation of a number."""

    expectation: float
    sd: float


def batch_variances(values: Tensor) -> dict[str, Tensor]:
    """The variance that each of ESTIMATES makes of the steps, (T,) float64.

    values: (k, B, T).
    """
    size = values.shape[1]
    count = torch.tensor(size, dtype=torch.float64)
    # To the functions of the layers, every step is a channel.
    means, biased = values.mean(1), values.var(1, correction=0)  # (k, T)
    ranks = torch.stack([unbiased(var, count) for var in biased])
    parts = [packed(mean, var, size) for mean, var in zip(means, biased, strict=True)]
    _, pooled, whole_count = unpacked_moments(torch.stack(parts).sum(0))
    return {"first": ranks[0], "mean": ranks.mean(0), "pooled": unbiased(pooled, whole_count)}


def running_average(steps: Tensor) -> np.ndarray:
    """The exponential average after each of the steps, (T,), that begins with 1."""
    values = steps.tolist()
    average = np.empty(len(values))
    last = 1.0
    for i, value in enumerate(values):
        last += MOMENTUM * (value - last)
        average[i] = last
    return average


def simulate(setting: Setting, seed: int) -> dict[str, Law]:
    """Mean and standard deviation over the steps of the running variance of each of ESTIMATES."""
    generator = torch.Generator().manual_seed(seed)
    values = setting.draw(BURN_IN + NUM_BATCHES, generator)
    results = {}
    for name, variances in batch_variances(values).items():
        track = running_average(variances)[BURN_IN:]
        results[name] = Law(float(track.mean()), float(track.std()))
    return results


def exact(setting: Setting, name: str) -> Law:
    """What `simulate` measures for the estimate `name`, by formula.

    With B values of each of k ranks, s² = SD², b² = spread² s² the variance of the ranks' means:

    - The sum of squares within a rank is s² chi²(B - 1), independent of its mean. So its unbiased
      variance has expectation s² and variance 2 s⁴ / (B - 1); the mean over the ranks keeps the
      expectation and has a k-th of the variance. The means of the ranks do not occur in either.
    - The sum of squares of all values is the one within, s² chi²(k (B - 1)), plus B times that of
      the ranks' means. For constant means this is s² times a noncentral chi² of k B - 1 degrees of
      freedom and noncentrality L = B k b² / s², of expectation k B - 1 + L and variance
      2 (k B - 1 + 2 L). For redrawn means it is (s² + B b²) chi²(k - 1). Over k B - 1:

          constant  s² + B k b² / (k B - 1)          2 s⁴ (k B - 1 + 2 L) / (k B - 1)²
          redrawn   s² + B (k - 1) b² / (k B - 1)    (2 k (B - 1) s⁴ + 2 (k - 1) (s² + B b²)²)
                                                     / (k B - 1)²

    - The exponential average of independent values of variance V has the same expectation and,
      when it has forgotten its start, variance V m / (2 - m): the sum of (m (1 - m)^i)² V.

    Of one value, B = 1, there is no unbiased variance; the layers track 0.
    """
    size, k = setting.batch_size, NUM_RANKS
    s2, b2 = SD**2, (setting.spread * SD) ** 2
    n = k * size if name == "pooled" else size
    if n == 1:
        expectation = variance = 0.0
    elif name != "pooled":
        expectation, variance = s2, 2 * s2**2 / (size - 1) / (1 if name == "first" else k)
    elif setting.redrawn:
        between = s2 + size * b2
        expectation = s2 + size * (k - 1) * b2 / (n - 1)
        variance = (2 * k * (size - 1) * s2**2 + 2 * (k - 1) * between**2) / (n - 1) ** 2
    else:
        noncentrality = n * b2 / s2
        expectation = s2 + n * b2 / (n - 1)
        variance = 2 * s2**2 * (n - 1 + 2 * noncentrality) / (n - 1) ** 2
    return Law(expectation, math.sqrt(variance * MOMENTUM / (2 - MOMENTUM)))


def table() -> Iterator[str]:
    """The running variance over the variance of all data: measured (exact) ± standard deviation."""
    yield f"| values a rank | sd of the ranks' means | {' | '.join(ESTIMATES)} |"
    yield "|---" * (2 + len(ESTIMATES)) + "|"
    for seed, setting in enumerate(SETTINGS):
        measured = simulate(setting, seed)
        cells = [_cell(measured[name], exact(setting, name), setting) for name in ESTIMATES]
        when = ", drawn every step" if setting.redrawn else ""
        yield f"| {setting.batch_size} | {setting.spread:g} sd{when} | {' | '.join(cells)} |"


def _cell(measured: Law, exact: Law, setting: Setting) -> str:
    if exact.expectation == 0:
        return "none of one value"
    values = (measured.expectation, exact.expectation, measured.sd)
    found, wanted, sd = (value / setting.variance for value in values)
    return f"{found:.3f} ({wanted:.3f}) ± {sd:.3f}"


if __name__ == "__main__":
    for line in table():
        print(line)
