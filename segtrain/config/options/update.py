"""Rules of the optimization: for chosen layers, and for large batches."""

from collections.abc import Iterator
from typing import Annotated, Any, Literal

from pydantic import Field

from segtrain.config.options.section import NonNegativeFloat, PositiveFloat, Section, option

Name = Annotated[str, Field(min_length=1)]


class LayerRule(Section):
    """What holds for chosen weights; where two rules set the same, the later one counts."""

    names: Annotated[tuple[Name, ...], Field(min_length=1)] = option(
        ..., "weights or modules by name, such as backbone.layer1 or '*.bn1'; * fits anything"
    )
    freeze: bool | None = option(
        None,
        "true: these weights stay as they are; a batch norm that is frozen altogether "
        "normalizes by its running statistics, which stay too",
    )
    lr_mult: PositiveFloat | None = option(
        None, "learning rate factor, instead of 1 or train.head_lr_mult"
    )
    weight_decay: NonNegativeFloat | None = option(
        None, "instead of train.weight_decay and train.new_weight_decay"
    )
    decay_toward: Literal["zero", "start"] | None = option(None, "instead of train.decay_toward")
    hold_zeros: bool = option(
        False, "kernel elements that are 0 when training starts stay 0: pruned weights"
    )

    def _mistakes(self) -> Iterator[str]:
        settings = [key for key in type(self).model_fields if key != "names"]
        chosen = [key for key in settings if getattr(self, key) is not None]
        chosen = [key for key in chosen if key != "hold_zeros" or self.hold_zeros]
        if not chosen:
            yield f"names: nothing is said about these weights; set one of {', '.join(settings)}"
        if self.freeze:
            for key in chosen:
                if key != "freeze":
                    yield f"{key}: has no effect on frozen weights; remove it"


# PSPNet's learning rate of 0.01, the default, is meant for 16 images (arXiv:1612.01105, section 5).
_USUAL_BATCH_SIZE = 16


def with_large_batch(data: dict[str, Any]) -> dict[str, Any]:
    """An experiment, as written, with what train.large_batch sets where it says nothing.

    Values may still be of any type: the options are checked later.
    """
    train, model = data.get("train"), data.get("model", {})
    if not (isinstance(train, dict) and train.get("large_batch") is True):
        return data
    found: dict[str, Any] = {"decay_norm_and_bias": False, "momentum_correction": True}
    if "lr" not in train:
        found["lr_batch_size"] = _USUAL_BATCH_SIZE
    steps, size = train.get("steps", 40_000), train.get("batch_size", _USUAL_BATCH_SIZE)
    if type(steps) is int and train.get("schedule") != "one_cycle":  # which is refused beside it
        found["warmup_steps"] = max(1, round(steps * 5 / 90))  # 5 epochs of 90, as in section 2.2
    reference = (found | train).get("lr_batch_size")
    if type(size) is int and type(reference) is int and reference > 0 and size > 0:
        found["warmup_start"] = min(1.0, reference / size)
    data = {**data, "train": found | train}
    if isinstance(model, dict) and _starts_random_resnet(model, train):
        data["model"] = {"zero_init_residual": True, **model}
    return data


def _starts_random_resnet(model: dict[str, Any], train: dict[str, Any]) -> bool:
    random = model.get("pretrained") is None and train.get("init_from") is None
    return random and str(model.get("backbone", "resnet")).startswith("resnet")
