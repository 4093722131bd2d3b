"""Options of a valid experiment that change nothing, or not what they seem to."""

from pydantic import BaseModel

from segtrain.config import Config
from segtrain.config.loading import yaml_value


def config_warnings(config: Config) -> list[str]:
    """One line for every option that was changed from its default and has no effect as things are.

    Options of the architecture are not here: `ModelConfig` refuses them.
    """
    lines = []
    for names, effective, reason in _conditions(config):
        section, *keys = names.split()
        part = getattr(config, section)
        lines += [
            f"{section}.{key}: {yaml_value(getattr(part, key))} has no effect: {reason}"
            for key in keys
            if not effective and getattr(part, key) != _default(part, key)
        ]
    return lines + _surprises(config)


def wrong_units(config: Config) -> list[str]:
    """One line if `data.mean`, one if `data.std` is in torchvision's units of 0..1, not 0..255.

    No check of `Config` itself: a run that was started with such numbers needs them to the end.
    """
    mean, std = config.data.mean, config.data.std
    wrong = {
        "mean": any(mean) and max(map(abs, mean)) <= 1,
        "std": max(std) < 1,
    }
    return [
        f"data.{key}: {list(values)} is in units of 0..1, and pixels are 0..255 here; "
        f"write [{', '.join(f'{255 * value:.6g}' for value in values)}]"
        for key, values in (("mean", mean), ("std", std))
        if wrong[key]
    ]


def changed_normalization(trained: Config, config: Config) -> list[str]:
    """What is wrong, or only other, with `data.mean` and `data.std` that `trained` had not."""
    before, now = trained.data, config.data
    changed = [key for key in ("mean", "std") if getattr(before, key) != getattr(now, key)]
    wrong = {line.partition(":")[0]: line for line in wrong_units(config)}
    lines = [
        f"warning: {wrong[f'data.{key}']}"
        if f"data.{key}" in wrong
        else f"note: data.{key}: {list(getattr(now, key))} here, {list(getattr(before, key))} in "
        "the training"
        for key in changed
    ]
    return lines + [f"warning: {line}" for line in _without_normalization(config) if changed]


def _without_normalization(config: Config) -> list[str]:
    """A line if pretrained weights get pixels of 0..255 as they are."""
    mean, std = config.data.mean, config.data.std
    if config.model.pretrained is None or max(std) > 1 or min(std) < 1 or max(map(abs, mean)) > 1:
        return []
    return [
        f"data.std: {list(std)} leaves pixels at 0..255, and the weights of model.pretrained "
        "expect about -2..2; leave data.mean and data.std out for the numbers of ImageNet"
    ]


def _conditions(config: Config) -> list[tuple[str, bool, str]]:
    """(section and its keys, whether they take effect, why not)."""
    data, augment, train, loss = config.data, config.augment, config.train, config.loss
    sgd = train.optimizer == "sgd"
    folders = data.layout == "folders"
    return [
        ("data images_dir labels_dir", folders, f"layout {data.layout} has its own directories"),
        ("data prefetch", data.num_workers != 0, "data.num_workers is 0"),
        ("augment rotate_prob", augment.rotate_deg > 0, "augment.rotate_deg is 0"),
        ("augment rotate_deg", augment.rotate_prob > 0, "augment.rotate_prob is 0"),
        (
            "augment brightness contrast saturation hue",
            augment.color_prob > 0,
            "augment.color_prob is 0",
        ),
        ("loss ohem_threshold ohem_min_kept", loss.kind == "ohem", f"loss.kind is {loss.kind}"),
        ("loss aux_weight", config.model.aux_head, "model.aux_head is false"),
        ("train momentum nesterov", sgd, f"train.optimizer is {train.optimizer}"),
        ("train betas", not sgd, f"train.optimizer is {train.optimizer}"),
        ("train warmup_start", train.warmup_steps > 0, "train.warmup_steps is 0"),
        ("train min_lr", train.poly_power > 0, "train.poly_power is 0, a constant learning rate"),
        ("eval crop_size overlap", config.eval.mode == "slide", "eval.mode is whole"),
        ("eval every_steps", _reached(config.eval.every_steps, train.steps), "train.steps is less"),
        ("log every_steps", _reached(config.log.every_steps, train.steps), "train.steps is less"),
        (
            "checkpoint keep_limit",
            bool(config.checkpoint.keep_every_steps),
            "checkpoint.keep_every_steps is null",
        ),
    ]


def _surprises(config: Config) -> list[str]:
    lines = _without_normalization(config)
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


def _reached(every_steps: int | None, steps: int) -> bool:
    return every_steps is None or every_steps <= steps


def _default(part: BaseModel, key: str) -> object:
    return type(part).model_fields[key].default
