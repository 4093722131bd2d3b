"""Options that are gone. A run that was started with them goes on, if they had today's value.

The config of a run is complete, so an older one holds every one of these.
"""

from collections.abc import Iterator
from typing import Any, NamedTuple

from segtrain.config.messages import KeyPath, Mistake, show


class RemovedOption(NamedTuple):
    """What an option that is gone had become.

    value: what it always is now. instead: what to write for another value; empty: nothing can be.
    in_network: trained weights compute something else with another value. The others are about
    training alone, so a model that was trained with another value can still be used.
    """

    value: Any
    instead: str = ""
    in_network: bool = False


_REPAIR = (
    "remove it (a run that was started so cannot go on, but its weights can start another one by "
    "train.init_from)"
)
_COLORS = "write augment.color_jitter: [brightness, contrast, saturation, hue]"

REMOVED = {
    "data.prefetch": RemovedOption(4),
    "augment.rotate_prob": RemovedOption(0.5),
    "augment.brightness": RemovedOption(0.125, _COLORS),
    "augment.contrast": RemovedOption(0.5, _COLORS),
    "augment.saturation": RemovedOption(0.5, _COLORS),
    "augment.hue": RemovedOption(0.1, _COLORS),
    "model.zero_init_residual": RemovedOption(False),
    "norm.num_groups": RemovedOption(32, in_network=True),
    "norm.eps": RemovedOption(1e-5, in_network=True),
    "loss.focal_gamma": RemovedOption(2.0),
    "loss.dice_squared": RemovedOption(True, "for kind: dice write dice_linear"),
    "loss.lovasz_per_image": RemovedOption(True, "for kind: lovasz write lovasz_batch"),
    "loss.boundary_px": RemovedOption(1),
    "train.channels_last": RemovedOption(True),
    "optim.nesterov": RemovedOption(False),
    "optim.betas": RemovedOption([0.9, 0.999]),
    "schedule.milestone_factor": RemovedOption(0.1),
    "schedule.cycle_rise": RemovedOption(0.3),
    "schedule.after_warmup": RemovedOption(False),
    "checkpoint.keep_limit": RemovedOption(5),
}


def value_now(key: str) -> Any:
    """What an option that is gone always is; None: there was none of this name."""
    names = key.split(".")
    removed = REMOVED.get(f"{names[0]}.{names[-1]}")
    return None if removed is None else removed.value


def drop_removed(
    options: dict[str, Any], *, trained: bool = False
) -> tuple[list[Mistake], dict[str, Any]]:
    """Takes these options out of `options`, by section.

    trained: a model that was trained so is only used: what concerns training alone is no mistake.

    Returns:
        A mistake for each that had another value than now, and these values by their full names
        where they are no mistake.
    """
    mistakes, gone = [], {}
    for path, section in _sections(options):
        for key in list(section):
            removed = REMOVED.get(f"{path[0]}.{key}")
            if removed is None:
                continue
            value = section.pop(key)
            if _is_same(value, removed.value):
                continue
            if trained and not removed.in_network:
                gone[".".join(map(str, (*path, key)))] = value
                continue
            message = f"is always {show(removed.value)} now, got {show(value)}; "
            message += removed.instead or _REPAIR
            mistakes.append(Mistake((*path, key), message))
    return mistakes, gone


def _sections(options: dict[str, Any]) -> Iterator[tuple[KeyPath, dict[str, Any]]]:
    """Every section with its place; the terms of loss.also have the options of loss."""
    for name, section in options.items():
        if isinstance(section, dict):
            yield (name,), section
    loss = options.get("loss")
    terms = loss.get("also") if isinstance(loss, dict) else None
    for i, term in enumerate(terms) if isinstance(terms, list | tuple) else ():
        if isinstance(term, dict):
            yield ("loss", "also", i), term


def _is_same(value: Any, other: Any) -> bool:
    """Whether they are equal; true and 1 are not, a list and a tuple are."""
    if isinstance(value, list | tuple) and isinstance(other, list):
        return list(value) == other
    return value == other and isinstance(value, bool) == isinstance(other, bool)
