"""The learning rate of each step: pure functions of the config and the step."""

import math

from segtrain.config import Config
from segtrain.config.optim import CYCLE_RISE

# One cycle begins with the rate divided by the first, and ends with that divided by the second:
# div_factor and final_div_factor of torch's OneCycleLR.
_CYCLE_START_DIV, _CYCLE_END_DIV = 25.0, 1e4


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
    the schedule, which begins at the first step. min_lr is what poly, cosine
    and finish_from end with.

    Of 100 steps 10 are warmup, which begins at a fifth. Half way up, at step 5, the factor is 0.6,
    and the line from 1 to 0 is at 0.95: together 0.57.

    >>> schedule = {"poly_power": 1.0, "warmup_steps": 10, "warmup_start": 0.2}
    >>> sections = {"optim": {"lr": 1.0}, "schedule": schedule, "train": {"steps": 100}}
    >>> data = {"layout": "folders", "root": "street", "classes": "cityscapes"}
    >>> config = Config.model_validate({"data": data, **sections})
    >>> [round(learning_rate(config, step), 2) for step in (0, 5, 10, 50)]
    [0.2, 0.57, 0.9, 0.5]
    """
    schedule = config.schedule
    if schedule.finish_from is not None and step >= schedule.finish_from:
        return _finishing(config, step)
    decayed = _scheduled(config, step)
    if step >= schedule.warmup_steps:
        return decayed
    done = step / schedule.warmup_steps
    return decayed * (schedule.warmup_start + (1 - schedule.warmup_start) * done)


def describe_rates(config: Config, step: int) -> str:
    """The rates at the first step, after the warmup and at the last step.

    step: where the run goes on; the first is left out if finish_from is behind.
    """
    begin, rates = config.schedule.finish_from, [base_lr(config)]
    if begin is None or step < begin:
        rates.insert(0, learning_rate(config, 0))
    rates.append(learning_rate(config, config.train.steps - 1))
    return " -> ".join(dict.fromkeys(f"{rate:.3g}" for rate in rates))


def _finishing(config: Config, step: int) -> float:
    """The rate from finish_from on: 1 - sqrt(t), as in arXiv:2405.18392, for t from 0 to 1."""
    schedule, top = config.schedule, base_lr(config)
    done, total = step - schedule.finish_from, config.train.steps - schedule.finish_from
    return schedule.min_lr + (top - schedule.min_lr) * (1 - math.sqrt(done / total))


def _scheduled(config: Config, step: int) -> float:
    """The learning rate without warmup.

    poly: (1 - t) ** power, as in PSPNet (arXiv:1612.01105, section 5), for t from 0 to 1.
    cosine: (1 + cos(pi t)) / 2, as in arXiv:1608.03983, equation 5, without restarts.
    one_cycle: arXiv:1708.07120 in two phases along cosines, as torch's OneCycleLR.
    """
    lr, train, schedule = base_lr(config), config.train, config.schedule
    if schedule.kind == "one_cycle":
        start, turn = lr / _CYCLE_START_DIV, CYCLE_RISE * train.steps - 1
        if step <= turn:
            done, a, b = step / turn, start, lr
        else:
            done, a, b = (step - turn) / (train.steps - 1 - turn), lr, start / _CYCLE_END_DIV
        return b + (a - b) / 2 * (1 + math.cos(math.pi * done))
    if schedule.kind == "constant":
        return lr
    if schedule.kind == "poly":
        fraction = (1 - step / train.steps) ** schedule.poly_power
    else:
        fraction = (1 + math.cos(math.pi * step / train.steps)) / 2
    return schedule.min_lr + (lr - schedule.min_lr) * fraction
