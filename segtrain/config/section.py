"""What every section of an experiment is made of: types of numbers, and the rules between options.

Two tables hold the rules, by the class of the section: NEEDS and CONFLICTS. What numbers must obey
beside others, such as warmup_steps < steps, is checked by the section's own `_mistakes`.
"""

from collections.abc import Iterator
from functools import reduce
from typing import Annotated, Any, ClassVar, Self

from pydantic import BaseModel, ConfigDict, Field, model_validator

from segtrain.config.messages import MAX_SHOWN, show
from segtrain.config.plugin_names import named_plugins
from segtrain.text import address_problem, printable, scheme_of

# torch counts in 64 bits.
Positive = Annotated[int, Field(gt=0, lt=2**63)]
NonNegative = Annotated[int, Field(ge=0, lt=2**63)]
Fraction = Annotated[float, Field(ge=0, le=1)]
FractionBelow1 = Annotated[float, Field(ge=0, lt=1)]
PositiveFloat = Annotated[float, Field(gt=0)]
NonNegativeFloat = Annotated[float, Field(ge=0)]
# Beyond these the arithmetic of sizes overflows, long after the memory of any machine.
Pixels = Annotated[int, Field(gt=0, le=100_000)]
Scale = Annotated[float, Field(gt=0, le=100)]
Size = tuple[Pixels, Pixels]
Positives = Annotated[tuple[Positive, ...], Field(min_length=1)]


# The backbones that `models.resnet.DEPTHS` has, with the options of ResNets.
RESNETS = ("resnet18", "resnet34", "resnet50", "resnet101")

# Options that have an effect only with another one: the one has this value, or any but null, 0 and
# false. Where several are named, one of them is enough.
NEEDS: dict[str, dict[str, str]] = {
    "DataConfig": {
        "images_dir": "layout=folders",
        "labels_dir": "layout=folders layout=list",
        "clip": "value_range",
    },
    "ModelConfig": {
        "stem num_stages multi_grid": " ".join(f"backbone={name}" for name in RESNETS),
        "multi_grid": "num_stages=4",
        "ppm_bins ppm_channels": "arch=pspnet",
        "aspp_rates separable": "arch=deeplabv3 arch=deeplabv3plus",
        "low_level_channels": "arch=deeplabv3plus",
        "aux_channels": "aux_head",
    },
    "NormConfig": {"images precise_batches momentum": "kind=sync"},
    "AugmentConfig": {"color_jitter": "color_prob"},
    "BaseLoss": {
        "class_weights": "kind=cross_entropy kind=ohem kind=focal kind=boundary_relaxation",
        "logit_adjustment": "class_weights",
        "label_smoothing positive_weights": "kind=cross_entropy",
        "ohem_fraction ohem_threshold ohem_min_kept": "kind=ohem",
        "ohem_threshold ohem_min_kept": "ohem_fraction=null",
    },
    "LayerRule": {"lr_mult weight_decay decay_toward keep_zeros zero": "freeze=null freeze=false"},
    "TrainConfig": {"staleness": "parallel=server"},
    "OptimConfig": {"momentum": "kind=sgd"},
    "ScheduleConfig": {
        "poly_power": "kind=poly",
        "min_lr": "kind=poly kind=cosine finish_from",
        "warmup_steps": "kind=poly kind=cosine kind=constant",
        "finish_from": "kind=constant",
    },
    "Config": {
        "loss.aux_weight": "model.aux_head",
        "eval.thresholds": "task=multilabel",
        "schedule.warmup_start": "schedule.warmup_steps",
    },
}

# Options that cannot go together: keys, the option beside them, and why. `key=value`: this value
# cannot; a key alone: any value but its default.
CONFLICTS: dict[str, tuple[tuple[str, str, str], ...]] = {
    "TrainConfig": (
        ("compile", "virtual_ranks", "they wait inside the model, and a compiled graph cannot"),
        ("shares", "virtual_ranks", "both cut the batch, of which only shares ignore the ranks"),
        ("shares", "compile", "shares wait inside the model, and a compiled graph cannot"),
        (
            "shares split virtual_ranks accumulate_steps compile deterministic precision=float16",
            "parallel",
            "its processes do not wait for each other",
        ),
    ),
    "Config": (
        (
            "augment.class_mix_prob augment.max_class_share data.class_uniform data.pack",
            "task",
            "they go by the one class of a pixel",
        ),
        ("augment.color_prob", "data.channels", "brightness, saturation and hue are those of RGB"),
        ("eval.precision", "train.precision=float64", "weights in float64 have no mixed precision"),
        ("model.recompute=blocks", "train.compile", "a compiled graph plans this by itself"),
        ("norm.images", "train.parallel", "every process has statistics of its own"),
        ("norm.precise_batches", "train.parallel", "its processes share running statistics"),
        ("optim.ema_decay", "train.parallel=hogwild", "no process has the steps of all"),
    ),
}


class Section(BaseModel):
    """Unknown keys, wrong types, infinities and later changes are all refused."""

    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)
    addresses: ClassVar[tuple[str, ...]] = ()  # options that may be an address, such as s3://

    @model_validator(mode="after")
    def _check(self) -> Self:
        # A plugin's options may have the name of one of segtrain's sections.
        own = (
            each for each in type(self).__mro__ if each.__module__.startswith("segtrain.config.")
        )
        names = [each.__name__ for each in own]
        mistakes = list(self._mistakes())
        for key, value in self:
            if isinstance(value, str) and (scheme := scheme_of(value)):
                if key not in self.addresses:
                    mistakes.append(f"{key}: {scheme} is not read: expected a local path or name")
                elif problem := address_problem(value):
                    mistakes.append(f"{key}: {problem}")
        chosen = dict(named_plugins(self))
        for key, plugin in chosen.items():
            for word in sorted(plugin.uses | plugin.ignores):
                if word not in type(self).model_fields:
                    what = f"{plugin.name} says that it uses or ignores {word}, which is no option"
                    mistakes.append(f"{key}: {what} beside {key}")
                elif word in plugin.ignores:
                    mistakes += self._no_effect(word, False, f"{key} {plugin.name}")
        for name in names:
            for keys, needed in NEEDS.get(name, {}).items():
                named = (chosen.get(need.partition("=")[0]) for need in needed.split())
                by = [plugin for plugin in named if plugin]
                if not all(plugin.is_here for plugin in by):
                    continue  # nobody knows what it uses
                used = {key for plugin in by for key in plugin.uses}
                # A plugin may use an option that needs one of segtrain's own kinds otherwise.
                left = " ".join(key for key in keys.split() if key not in used)
                mistakes += self._no_effect(left, *self._has_one(needed))
            for keys, beside, why in CONFLICTS.get(name, ()):
                mistakes += self._conflicts(keys, beside, why)
        if mistakes:
            raise ValueError("\n".join(mistakes))
        return self

    def _mistakes(self) -> Iterator[str]:
        """A line `key: message` for each option that does not fit the others."""
        yield from ()

    def _no_effect(self, keys: str, effective: bool, reason: str) -> Iterator[str]:
        """A mistake for each of `keys` that differs from its default, unless it is `effective`."""
        for key in "" if effective else keys.split():
            value, default = self._look_up(key)
            if value != default:
                repair = f"remove it, or set it to its default, {show(default)}"
                yield f"{key}: has no effect with {reason}; {repair}"

    def _has_one(self, needed: str) -> tuple[bool, str]:
        """Whether one of the options has what it needs; and all of them with their values."""
        is_met, shown = False, {}
        for need in needed.split():
            key, _, wanted = need.partition("=")
            value, _ = self._look_up(key)
            shown[key] = f"{key} {_plain(value)}"
            is_met = is_met or (_plain(value) == wanted if wanted else bool(value))
        return is_met, " and ".join(shown.values())

    def _conflicts(self, keys: str, beside: str, why: str) -> Iterator[str]:
        if not self._is_chosen(beside):
            return
        other = beside.partition("=")[0]
        for key in filter(self._is_chosen, keys.split()):
            key, _, _ = key.partition("=")
            value, against = (_plain(self._look_up(each)[0]) for each in (key, other))
            yield f"{key}: {value} cannot go with {other} {against}: {why}; remove one of them"

    def _is_chosen(self, text: str) -> bool:
        """Whether the option has the value of `key=value`, or, for a key alone, no default."""
        key, _, wanted = text.partition("=")
        value, default = self._look_up(key)
        return _plain(value) == wanted if wanted else value != default

    def _look_up(self, key: str) -> tuple[Any, Any]:
        """The value and the default of the option `key`, or `section.key`."""
        *parts, name = key.split(".")
        section = reduce(getattr, parts, self)
        return getattr(section, name), type(section).model_fields[name].default


def option(default: Any, description: str, **limits: Any) -> Any:
    """An option of a section; `...` as default: it is required."""
    return Field(default, description=description, **limits)


def _plain(value: Any) -> str:
    """`value` in a message, without quotes and digits that say nothing."""
    if isinstance(value, float):
        return f"{value:g}"
    return printable(value, MAX_SHOWN) if isinstance(value, str) else show(value)
