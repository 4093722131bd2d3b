"""The config of a converted model: what the file says, what is assumed, what the user sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from segtrain.config import Config, DataConfig, ModelConfig, override_config
from segtrain.config.loading import yaml_value
from segtrain.convert.plan import Options, Plan
from segtrain.errors import CheckpointError, ConfigError
from segtrain.text import MAX_NAME, printable

_LAYOUTS = get_args(DataConfig.model_fields["layout"].annotation)
_INPUT = ("mean", "std", "short_side_px")
_DILATION = ("model.contract_dilation", "model.basic_block_dilation")


def make_config(plan: Plan, classes: str, overrides: Sequence[str]) -> Config:
    """The whole config: defaults, then `plan`, then the `section.key=value` overrides.

    classes: data.classes. The data lie in datasets/<name>, in the layout of that name if there is
        one: a guess that eval and train let the user change.

    Raises:
        ConfigError: a wrong override.
    """
    path = Path(classes)
    name = path.name.removesuffix(".yaml").removesuffix(".yml").removesuffix(".classes")
    by_name = classes == name
    sections: dict[str, dict[str, Any]] = {
        "data": {
            "layout": name if by_name and name in _LAYOUTS else "folders",
            "root": f"datasets/{name}",
            "classes": classes if by_name else str(path.absolute()),
        }
    }
    for key, value in plan.options().items():
        section, _, option = key.partition(".")
        if key not in _DILATION:
            sections.setdefault(section, {})[option] = value
    try:
        config = Config.model_validate(sections)
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(str(part) for part in first["loc"])
        what = printable(f"{where}: {first['msg']}", 3 * MAX_NAME)
        raise CheckpointError(
            f"the file describes a model that segtrain does not have: {what}"
        ) from None
    config = override_config(config, overrides, source="the converted model")
    # Refused where no stage is dilated, which the overrides decide.
    if not has_dilation(config.model):
        return config
    given = _given(overrides)
    late = {k: v for k, v in plan.options().items() if k in _DILATION and k not in given}
    return override_config(config, describe(late).split(), source="the converted model")


def has_dilation(model: ModelConfig) -> bool:
    """Whether a stage of the backbone has dilations instead of its stride."""
    return model.output_stride < 2 ** (model.num_stages + 1)


def drops_aux_head(overrides: Sequence[str]) -> bool:
    """Whether the user sets model.aux_head to false.

    Raises:
        ConfigError: it is set to something else than true and false.
    """
    ours = [text for text in overrides if text.partition("=")[0].strip() == "model.aux_head"]
    data = {"layout": _LAYOUTS[0], "root": "datasets", "classes": "voc"}
    config = override_config(Config.model_validate({"data": data}), ours, source="the defaults")
    return bool(ours) and not config.model.aux_head


def split_options(plan: Plan, config: Config, overrides: Sequence[str]) -> dict[str, Options]:
    """The options of `plan` as they are in `config`, by who decided: stated, assumed, set."""
    given = _given(overrides)
    hidden = given if has_dilation(config.model) else given | set(_DILATION)
    stated = {key: value for key, value in plan.stated.items() if key not in hidden}
    assumed = {k: v for k, v in plan.assumed.items() if k not in hidden and k not in stated}
    data = config.model_dump()
    by_user: Options = {}
    for key in sorted(given):
        section, _, option = key.partition(".")
        value = data[section][option] if option else data[section]
        by_user[key] = value
    return {"stated": stated, "assumed": assumed, "set": by_user}


def model_lines(config: Config) -> list[str]:
    """The options of the model and of its input that differ from the defaults, by sections."""
    lines = ["model:"]
    for key, field in ModelConfig.model_fields.items():
        value = getattr(config.model, key)
        if value != field.default or key in ("arch", "backbone"):
            lines.append(f"  {key}: {yaml_value(value)}")
    data = {key: getattr(config.data, key) for key in _INPUT}
    changed = {k: v for k, v in data.items() if v != DataConfig.model_fields[k].default}
    if changed:
        lines += ["data:", *(f"  {key}: {yaml_value(value)}" for key, value in changed.items())]
    return lines


def describe(options: Options) -> str:
    """`section.key=value`, separated by blanks."""
    return " ".join(f"{key}={yaml_value(value)}" for key, value in options.items())


def check_foreign(overrides: Sequence[str]) -> None:
    """Refuses overrides of options that a converted file has no use for.

    Raises:
        ConfigError: one of another section than model, data, augment, eval and norm; data.classes.
    """
    if "data.classes" in _given(overrides):
        raise ConfigError("--set data.classes: write --classes, which names the channels")
    sections = ("model.", "data.", "augment.", "eval.", "norm.")
    foreign = [text for text in overrides if not text.strip().startswith(sections)]
    if foreign:
        what = "is for training; convert takes model.*, data.*, augment.*, eval.* and norm.*"
        raise ConfigError("\n".join(f"--set {text}: {what}" for text in foreign))


def _given(overrides: Sequence[str]) -> set[str]:
    return {text.partition("=")[0].strip() for text in overrides}
