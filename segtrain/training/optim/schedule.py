"""The learning rate of each step: pure functions of the config and the step."""

import math
from bisect import bisect_right

from segtrain.config import Config

# One cycle begins with the rate divided by the first, and ends with that divided by the second:
# div_factor and final_div_factor of torch's OneCycleLR.
_CYCLE_START_DIV, _CYCLE_END_DIV = 25.0, 1e4


def poly(step: int, total: int, power: float = 0.9) -> float:
    """Fraction of the base learning rate at `step`, in [0, 1].

    (1 - step / total) ** power, as in PSPNet (arXiv:1612.01105, section 5).

    Raises:
        ValueError: `step` outside [0, total].
    """
    if not 0 <= step <= total:
        raise ValueError(f"step {step} is outside [0, {total}]")
    return (1 - step / total) ** power


def cosine(step: int, total: int) -> float:
    """Fraction of the base learning rate at `step`, in [0, 1].

    (1 + cos(pi * step / total)) / 2, as in arXiv:1608.03983, equation 5, without restarts.
    """
    return (1 + math.cos(math.pi * step / total)) / 2


def one_cycle(
    step: int, total: int, *, rise: float, start: float, peak: float, end: float
) -> float:
    """From `start` to `peak` in the first `rise` of the steps, then to `end`, along cosines.

    The one-cycle policy (arXiv:1708.07120) in two phases, as torch's OneCycleLR with anneal "cos".
    """
    turn = rise * total - 1
    if step <= turn:
        done, a, b = step / turn, start, peak
    else:
        done, a, b = (step - turn) / (total - 1 - turn), peak, end
    return b + (a - b) / 2 * (1 + math.cos(math.pi * done))


def base_lr(config: Config) -> float:
    """The backbone's learning rate after warmup, scaled with the batch size if the config says so.

    Linear scaling as in arXiv:1706.02677, section 2.1.
    """
    train, optim = config.train, config.optim
    scale = 1.0 if optim.lr_batch_size is None else train.batch_size / optim.lr_batch_size
    return optim.lr * scale


def learning_rate(config: Config, step: int) -> float:
    """The backbone's learning rate of update `step`, 0 .. steps - 1.

    Linear warmup from warmup_start times the rate (arXiv:1706.02677, section 2.2), multiplied with
    the schedule, which begins at the first step or after the warmup. min_lr is what poly and cosine
    end with.
    """
    decayed, schedule = _scheduled(config, step), config.schedule
    if step >= schedule.warmup_steps:
        return decayed
    done = step / schedule.warmup_steps
    return decayed * (schedule.warmup_start + (1 - schedule.warmup_start) * done)


def _scheduled(config: Config, step: int) -> float:
    """The learning rate without warmup."""
    lr, train, schedule = base_lr(config), config.train, config.schedule
    if schedule.kind == "one_cycle":
        start = lr / _CYCLE_START_DIV
        end = start / _CYCLE_END_DIV
        return one_cycle(step, train.steps, rise=schedule.cycle_rise, start=start, peak=lr, end=end)
    if schedule.kind == "step":
        return lr * schedule.milestone_factor ** bisect_right(schedule.milestones or (), step)
    begin = schedule.warmup_steps if schedule.after_warmup else 0
    done, total = max(step - begin, 0), train.steps - begin
    fraction = (
        poly(done, total, schedule.poly_power) if schedule.kind == "poly" else cosine(done, total)
    )
    return schedule.min_lr + (lr - schedule.min_lr) * fraction
