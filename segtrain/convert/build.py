"""The config of a converted model: what the file says, what is assumed, what the user sets."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any, get_args

from segtrain.config import Config, DataConfig, ModelConfig, override_config
from segtrain.config.loading import yaml_value
from segtrain.convert.plan import Options, Plan
from segtrain.errors import CheckpointError, ConfigError

_LAYOUTS = get_args(DataConfig.model_fields["layout"].annotation)


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
    for options in (plan.assumed, plan.found, plan.stated):
        for key, value in options.items():
            section, _, option = key.partition(".")
            sections.setdefault(section, {})[option] = value
    try:
        config = Config.model_validate(sections)
    except ValueError as error:
        raise CheckpointError(
            f"the file describes a model that segtrain does not have: {error}"
        ) from None
    return override_config(config, overrides, source="the converted model")


def split_options(plan: Plan, config: Config, overrides: Sequence[str]) -> dict[str, Options]:
    """The options of `plan` as they are in `config`, by who decided: stated, assumed, set."""
    given = {text.partition("=")[0].strip() for text in overrides}
    stated = {key: value for key, value in plan.stated.items() if key not in given}
    assumed = {k: v for k, v in plan.assumed.items() if k not in given and k not in stated}
    data = config.model_dump()
    by_user: Options = {}
    for key in sorted(given):
        section, _, option = key.partition(".")
        value = data[section][option] if option else data[section]
        by_user[key] = value
    return {"stated": stated, "assumed": assumed, "set": by_user}


def model_lines(config: Config) -> list[str]:
    """The options of model that differ from the defaults, as a section of a config."""
    lines = ["model:"]
    for key, field in ModelConfig.model_fields.items():
        value = getattr(config.model, key)
        if value != field.default or key in ("arch", "backbone"):
            lines.append(f"  {key}: {yaml_value(value)}")
    return lines


def describe(options: Options) -> str:
    """`section.key=value`, separated by blanks."""
    return " ".join(f"{key}={yaml_value(value)}" for key, value in options.items())


def check_foreign(overrides: Sequence[str]) -> None:
    """Refuses overrides of options that a converted file has no use for.

    Raises:
        ConfigError: one of another section than model, data, augment, eval and norm.
    """
    sections = ("model.", "data.", "augment.", "eval.", "norm.")
    foreign = [text for text in overrides if not text.strip().startswith(sections)]
    if foreign:
        what = "is for training; convert takes model.*, data.*, augment.*, eval.* and norm.*"
        raise ConfigError("\n".join(f"--set {text}: {what}" for text in foreign))
