"""Options of a valid experiment that have no effect, or probably not the one that is meant."""

from segtrain.config.loading import yaml_value
from segtrain.config.options import Config


def config_warnings(config: Config) -> list[str]:
    """One line for each such option; loading refuses those of the model and of norm."""
    return [*_without_effect(config), *_without_normalization(config), *_unlikely(config)]


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


def _without_effect(config: Config) -> list[str]:
    data, augment, train, loss = config.data, config.augment, config.train, config.loss
    steps = train.steps
    sgd, optimizer = train.optimizer == "sgd", f"train.optimizer is {train.optimizer}"
    folders, colors = data.layout == "folders", "brightness contrast saturation hue"
    evaluates = config.eval.every_steps is None or config.eval.every_steps <= steps
    keeps = config.checkpoint.keep_every_steps is not None
    rules = {
        "data": [
            ("images_dir labels_dir", folders, f"layout {data.layout} has its own directories"),
            ("prefetch", data.num_workers != 0, "data.num_workers is 0"),
        ],
        "augment": [
            ("rotate_prob", augment.rotate_deg > 0, "augment.rotate_deg is 0"),
            ("rotate_deg", augment.rotate_prob > 0, "augment.rotate_prob is 0"),
            (colors, augment.color_prob > 0, "augment.color_prob is 0"),
        ],
        "loss": [
            ("ohem_threshold ohem_min_kept", loss.kind == "ohem", f"loss.kind is {loss.kind}"),
            ("aux_weight", config.model.aux_head, "model.aux_head is false"),
        ],
        "train": [
            ("momentum nesterov", sgd, optimizer),
            ("betas", not sgd, optimizer),
            ("warmup_start", train.warmup_steps > 0, "train.warmup_steps is 0"),
            ("min_lr", train.poly_power > 0, "train.poly_power is 0, a constant learning rate"),
        ],
        "eval": [
            ("crop_size overlap", config.eval.mode == "slide", "eval.mode is whole"),
            ("every_steps", evaluates, "train.steps is less"),
        ],
        "log": [
            ("every_steps", config.log.every_steps <= steps, "train.steps is less"),
            ("weights_digest_every_steps", train.shares is not None, "train.shares is null"),
        ],
        "checkpoint": [("keep_limit", keeps, "checkpoint.keep_every_steps is null")],
    }
    return [
        f"{name}.{key}: {yaml_value(getattr(section, key))} has no effect: {reason}"
        for name in rules
        for section in [getattr(config, name)]
        for key, reason in section.without_effect(*rules[name])
    ]


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
