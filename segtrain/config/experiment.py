"""All sections together, an experiment; and options that probably do not do what is meant."""

from collections.abc import Iterator
from typing import Annotated, Any

from pydantic import Field

from segtrain.config.data import AugmentConfig, DataConfig
from segtrain.config.loss import LossConfig, takes_class_weights
from segtrain.config.model import ModelConfig, NormConfig
from segtrain.config.run import CheckpointConfig, EvalConfig, LogConfig
from segtrain.config.section import Section, option
from segtrain.config.train import TrainConfig


class Config(Section):
    """One experiment."""

    seed: Annotated[int, Field(ge=0, lt=2**63)] = option(
        0, "decides weights, sample order, augmentation and dropout"
    )
    data: DataConfig
    augment: AugmentConfig = AugmentConfig()
    model: ModelConfig = ModelConfig()
    norm: NormConfig = NormConfig()
    loss: LossConfig = LossConfig()
    train: TrainConfig = TrainConfig()
    eval: EvalConfig = EvalConfig()
    log: LogConfig = LogConfig()
    checkpoint: CheckpointConfig = CheckpointConfig()

    def _mistakes(self) -> Iterator[str]:
        norm, train, model = self.norm, self.train, self.model
        loaded = "train.init_from, whose weights replace it"
        yield from self._no_effect(
            ("loss.aux_weight", model.aux_head, "model.aux_head false"),
            ("log.weights_digest_every_steps", train.shares is not None, "train.shares null"),
            ("model.recompute_norm", norm.is_batch_norm, f"norm.kind {norm.kind}"),
            ("model.zero_init_residual", train.init_from is None, loaded),
            ("train.patience", self.eval.every_steps is not None, "eval.every_steps null"),
        )
        yield from self._start_mistakes()
        if self.eval.precision is not None and train.precision == "float64":
            yield (
                f"eval.precision: {self.eval.precision} cannot go with train.precision float64: "
                "weights in float64 have no mixed precision; remove one of them"
            )
        if norm.is_batch_norm and train.batch_size // train.accumulate_steps == 1:
            yield (
                "train.batch_size: a pass of one image has one value a channel after global "
                "pooling, and batch norm needs two; use at least 2 images a pass "
                "(batch_size / accumulate_steps)"
            )
        if train.virtual_ranks > 1 and (norm.kind, norm.extent) != ("sync", "world"):
            yield (
                "train.virtual_ranks: need norm.kind sync over the world; with other statistics "
                "train.accumulate_steps is as good"
            )
        if train.shares is not None and norm.is_batch_norm:
            extent = "each rank alone" if norm.kind == "local" else f"extent {norm.extent}"
            if (norm.kind, norm.extent) != ("sync", "world"):
                yield (
                    f"train.shares: with batch norm over {extent} the result depends on the "
                    "number of ranks; use norm.kind sync over the world, or set train.shares to "
                    "null"
                )
        if train.parallel == "hogwild":
            if norm.is_batch_norm and (norm.kind, norm.extent) != ("sync", "world"):
                yield (
                    "norm: with train.parallel hogwild every process has statistics of its own, "
                    "whatever the extent; remove norm.kind and norm.extent"
                )
            for term in self.loss.terms:
                if term.kind == "ohem" or (term.kind == "lovasz" and not term.lovasz_per_image):
                    yield (
                        f"loss: {term.kind} is about the pixels of the whole batch, which no "
                        "process has with train.parallel hogwild; choose another loss"
                    )
            if norm.precise_batches is not None:
                yield (
                    "norm.precise_batches: cannot go with train.parallel hogwild, whose processes "
                    "share running statistics; set it to null"
                )
        weights = {t.class_weights for t in self.loss.terms if takes_class_weights(t.kind)}
        if train.accumulate_steps > 1 and len(weights) > 1:
            yield (
                "loss.also: with train.accumulate_steps passes are weighed by class weights, and "
                "those of the terms differ; give all terms the same class_weights, or use "
                "train.virtual_ranks instead"
            )
        uniform_steps = self.data.class_uniform_steps
        if uniform_steps is not None and uniform_steps >= train.steps:
            yield (
                f"data.class_uniform_steps: {uniform_steps} must be smaller than train.steps, "
                f"{train.steps}; for data.class_uniform in all steps set it to null"
            )
        yield from self._patience_mistakes()
        if (
            train.shares is not None
            and train.max_hours is not None
            and norm.precise_batches is not None
        ):
            yield (
                "train.max_hours: cannot go with train.shares and norm.precise_batches: the "
                "evaluation at its end changes running statistics, so a run that goes on would "
                "not have the bits of one that never ended; set norm.precise_batches to null"
            )
        if norm.kind == "frozen" and train.init_from is None:
            yield (
                "norm.kind: frozen statistics come with the weights that training starts from; "
                "name a run or checkpoint in train.init_from"
            )

    def _start_mistakes(self) -> Iterator[str]:
        """Options that are about the weights that training starts from."""
        model, train = self.model, self.train
        if model.pretrained is not None or train.init_from is not None:
            return
        resnet = model.backbone.startswith("resnet")
        if train.large_batch and resnet and not model.zero_init_residual:
            yield "model.zero_init_residual: false contradicts train.large_batch; remove one"
        rules = train.layers
        needs = {
            "decay_toward": any(x.decay_toward == "start" for x in (train, *rules)),
            "new_weight_decay": train.new_weight_decay is not None,
            "layers": any(rule.freeze or rule.hold_zeros for rule in rules),
        }
        for key, needed in needs.items():
            if needed:
                yield (
                    f"train.{key}: is about weights that are loaded, and all start from random "
                    "numbers here; name some in model.pretrained or train.init_from"
                )

    def _patience_mistakes(self) -> Iterator[str]:
        patience, every_steps = self.train.patience, self.eval.every_steps
        if patience is None or every_steps is None:
            return
        if (before_last := (self.train.steps - 1) // every_steps) <= patience:
            yield (
                f"train.patience: {patience} has no effect: there are {before_last} evaluations "
                "before the last, of which the first is always the best so far; use a smaller "
                "train.patience or eval.every_steps"
            )


SECTIONS: dict[str, type[Section]] = {
    name: field.annotation
    for name, field in Config.model_fields.items()
    if isinstance(field.annotation, type) and issubclass(field.annotation, Section)
}


def config_schema() -> dict[str, Any]:
    """JSON Schema of an experiment file, for completion and checks in editors."""
    schema = Config.model_json_schema()
    return {"$schema": "https://json-schema.org/draft/2020-12/schema", **schema}


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
