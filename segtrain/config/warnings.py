"""Options of a valid experiment that probably do not do what is meant."""

from segtrain.config.options import Config


def config_warnings(config: Config) -> list[str]:
    """One line for each such option; loading refuses those that cannot have an effect."""
    return [*_too_seldom(config), *_without_normalization(config), *_unlikely(config)]


def wrong_units(config: Config) -> list[str]:
    """One line for `data.mean` and for `data.std` where it is in torchvision's units of 0..1.

    `Config` accepts them: a run that was started with such numbers must be resumed with them.
    """
    mean, std = config.data.mean, config.data.std
    wrong = {"mean": any(mean) and max(map(abs, mean)) <= 1, "std": max(std) < 1}
    return [
        f"data.{key}: {list(values)} is in units of 0..1, and pixels are 0..255 here; "
        f"write [{', '.join(f'{255 * value:.6g}' for value in values)}]"
        for key, values in (("mean", mean), ("std", std))
        if wrong[key]
    ]


def changed_normalization(trained: Config, config: Config) -> list[str]:
    """Notes and warnings about `data.mean` and `data.std` that differ from the training's."""
    before, now = trained.data, config.data
    changed = [key for key in ("mean", "std") if getattr(before, key) != getattr(now, key)]
    wrong = {line.partition(":")[0]: line for line in wrong_units(config)}
    lines = []
    for key in changed:
        here, there = list(getattr(now, key)), list(getattr(before, key))
        line = wrong.get(f"data.{key}")
        note = f"note: data.{key}: {here} here, {there} in the training"
        lines.append(f"warning: {line}" if line else note)
    return lines + [f"warning: {line}" for line in _without_normalization(config) if changed]


def _too_seldom(config: Config) -> list[str]:
    # Not refused: a short trial of a recipe, --set train.steps=100, keeps its intervals.
    lines = []
    for path in ("eval.every_steps", "log.every_steps", "checkpoint.keep_every_steps"):
        name, key = path.split(".")
        section = getattr(config, name)
        steps = getattr(section, key)
        default = type(section).model_fields[key].default
        if steps is not None and steps > config.train.steps and steps != default:
            lines.append(f"{path}: {steps} has no effect: train.steps is less")
    return lines


def _without_normalization(config: Config) -> list[str]:
    """A line if pretrained weights get pixels of 0..255 as they are."""
    mean, std = config.data.mean, config.data.std
    if config.model.pretrained is None or max(std) > 1 or min(std) < 1 or max(map(abs, mean)) > 1:
        return []
    return [
        f"data.std: {list(std)} leaves pixels at 0..255, and the weights of model.pretrained "
        "expect about -2..2; leave data.mean and data.std out for the numbers of ImageNet"
    ]


def _unlikely(config: Config) -> list[str]:
    lines = []
    model, crop = config.model, config.augment.crop_size
    if model.aux_head and config.loss.aux_weight == 0:
        lines.append("loss.aux_weight: 0 trains the auxiliary head on nothing; set model.aux_head")
    if model.align_corners and any((size - 1) % 8 for size in crop):
        wanted = [round((size - 1) / 8) * 8 + 1 for size in crop]
        lines.append(
            f"augment.crop_size: {list(crop)} does not line up with features under "
            f"model.align_corners; sizes of 8 k + 1, such as {wanted}, do"
        )
    return lines
