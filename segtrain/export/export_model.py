"""The graph that a file holds: a network, what comes before and after it, and the words for it."""

import json
from collections.abc import Sequence
from dataclasses import replace
from fractions import Fraction
from functools import partial
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from segtrain import __version__
from segtrain.checkpoint.origin import origins
from segtrain.checkpoint.trained import LoadedModel
from segtrain.errors import ConfigError
from segtrain.inference.class_scores import InferenceSettings
from segtrain.models.blocks import Normalize, Values
from segtrain.models.stem import RGB_CHANNELS
from segtrain.task.contract import Task
from segtrain.task.decision_rule import DecisionRule
from segtrain.task.tasks import task_of
from segtrain.types import IGNORE_INDEX

# Example images are a random picture of this size, stretched, and some noise.
_COARSE = (4, 6)


class Case(NamedTuple):
    """The size of one batch of images that a file is traced with or checked on."""

    batch: int
    height: int
    width: int


class ViewSize(NamedTuple):
    """The size at which the network sees an image, that of `inference.settings.view_size`.

    short_side_px: to which the image is resized; None: it keeps its size. scale: after that.
    """

    short_side_px: int | None
    scale: float = 1.0

    def of(self, size: Sequence[Any]) -> tuple[Any, ...]:
        """(height, width) for an image of `size`, of integers or what an exporter has for them.

        By whole numbers of 64 bits: runtimes round products of floats each in its own way.
        """
        over, under = Fraction(self.scale).limit_denominator(10**6).as_integer_ratio()
        if self.short_side_px is not None:
            # A tracer takes what `min` finds in its example for the shorter side of all images.
            shorter = torch.minimum if torch.jit.is_tracing() else torch.sym_min
            over, under = over * self.short_side_px, under * shorter(*size)
        return tuple((2 * side * over + under) // (2 * under) for side in size)

    def least_side(self, least: int, size: tuple[int, int] | None) -> int:
        """The least side of images whose views have at least `least` px a side.

        size: of all images; None: any. ConfigError: their views are smaller.
        """
        if self.short_side_px is None and size is None:
            return next(side for side in range(1, 2**16) if self.of((side, side))[0] >= least)
        height, width = self.of(size or (least, least))
        if min(height, width) < least:
            what = f"the network would see {height}x{width} px, and needs {least} a side"
            raise ConfigError(f"--scale, --short-side: {what}")
        return 2 if size is None else 1  # of a free side of 1 exporters make a constant


class GraphOptions(NamedTuple):
    """What a graph does before and after the network.

    normalize: the input is what images store, in this dtype, which the file normalizes; None: the
        input is float32 and normalized already.
    argmax: the result is train ids (N, H, W) uint8, not logits (N, K, H, W).
    confidence: a second result, the probability of the label, (N, H, W) float32; where classes
        overlap, that of each, (N, K, H, W).
    unknown_below: labels of a lower probability become IGNORE_INDEX; None: none do.
    temperature: logits are divided by it (arXiv:1706.04599); None: by nothing.
    view: to which images are resized, and the logits back; None: nothing is.
    """

    normalize: Literal["uint8", "float32"] | None = None
    argmax: bool = False
    confidence: bool = False
    unknown_below: float | None = None
    temperature: float | None = None
    view: ViewSize | None = None


class ExportModel(nn.Module):
    """A segmentation model with what `GraphOptions` name before and after it.

    model: returns SegLogits; it is put into evaluation mode and float32.
    mean, std, value_range, clip: as in the config. align_corners: how logits are resized.
    task: what it was trained for; None: semantic. options: those of `GraphOptions`.
    """

    def __init__(
        self,
        model: nn.Module,
        mean: Values,
        std: Values,
        value_range: tuple[float, float] | None = None,
        *,
        clip: bool = False,
        align_corners: bool = False,
        task: Task | None = None,
        **options: Any,
    ) -> None:
        super().__init__()
        self.model, self.task = model, task or task_of("semantic")
        self.normalization = Normalize(mean, std, value_range, clip=clip)
        self.options, self.align_corners = GraphOptions(**options), align_corners
        self.float().eval()

    def forward(self, images: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Logits (N, K, H, W) float32 or, with `argmax`, train ids (N, H, W) uint8; confidence."""
        options, logits = self.options, self.logits(images)
        result = logits.argmax(dim=1).to(torch.uint8) if options.argmax else logits
        if options.unknown_below is not None:
            rule = DecisionRule({}, options.unknown_below)
            result = rule.label(self.probability(logits).movedim(1, 0))
        if not options.confidence:
            return result
        probability = self.probability(logits)
        return result, probability.amax(1) if options.argmax else probability

    def logits(self, images: Tensor) -> Tensor:
        """Logits (N, K, H, W) float32 of images in the form that `forward` takes."""
        size, options = images.shape[-2:], self.options
        bilinear = partial(functional.interpolate, mode="bilinear")  # no antialiasing, as predict's
        if options.normalize is not None:
            images = self.normalization(images)
        if options.view is not None:
            images = bilinear(images, options.view.of(size), align_corners=False)
        logits = self.model(images).out
        if options.view is not None:
            logits = bilinear(logits, tuple(size), align_corners=self.align_corners)
        return logits if options.temperature is None else logits / options.temperature

    def probability(self, logits: Tensor) -> Tensor:
        """Of each class, (N, K, H, W)."""
        return self.task.decoding(None).probabilities(logits, 1)

    def example(self, case: Case) -> Tensor:
        """Images (N, C, H, W) in the form that `forward` takes, the same on every call.

        Not noise alone: there all pooling windows have nearly the same mean, so a graph that pools
        over the wrong windows would pass.
        """
        rng = torch.Generator().manual_seed(sum(case))
        channels = len(self.normalization.mean)
        coarse = torch.rand(case.batch, channels, *_COARSE, generator=rng)
        smooth = functional.interpolate(coarse, size=case[1:], mode="bilinear", align_corners=True)
        noise = torch.rand(smooth.shape, generator=rng)
        low, high = self.normalization.value_range or (0.0, 255.0)
        images = low + (high - low) * (0.75 * smooth + 0.25 * noise)
        if self.normalization.value_range is None:
            images = images.to(torch.uint8)
        if self.options.normalize is None:
            return self.normalization(images)
        return images.to(getattr(torch, self.options.normalize))

    def describe(self, *, fixed_size: tuple[int, int] | None, min_side_px: int) -> dict[str, str]:
        """Input and output in words, for the file's metadata."""
        options, stored = self.options, self.normalization.value_range
        clip = "clipped to and " * self.normalization.clip
        unit = "pixel" if stored is None else f"value {clip}scaled from {{:g}}..{{:g}} to 0..255"
        value = f"float32, ({unit.format(*stored or ())} - mean) / std by channel"
        if options.normalize:
            scale = (
                "values as stored, {:g}..{:g}"
                if stored
                else "0..255 (16-bit values: divide by 257)"
            )
            value = f"{options.normalize}, {scale.format(*stored or ())}"
        height, width = fixed_size or ("H", "W")
        channels = len(self.normalization.mean)
        kind = "RGB " if channels == 3 else ""
        least = f"; H and W at least {min_side_px} px" if min_side_px > 1 else ""
        result = f"logits (N, K, {height}, {width}) float32, K in the order of class_names"
        if options.argmax:
            result = f"labels (N, {height}, {width}) uint8, index into class_names"
        if options.unknown_below is not None:
            result += f", {IGNORE_INDEX} where no probability is {options.unknown_below:g}"
        if options.confidence:
            shape = f"({'N' if options.argmax else 'N, K'}, {height}, {width})"
            result += f"; confidence {shape} float32, the probability"
        return {
            "min_side_px": str(min_side_px),
            "input": f"images (N, {channels}, {height}, {width}) {kind}{value}{least}",
            "output": result,
        }


def preprocessing(
    loaded: LoadedModel, *, size: tuple[int, int] | None = None, **options: Any
) -> list[dict[str, Any]]:
    """The steps from a stored image to the input of the network, in order, for the metadata.

    As `segtrain predict` takes them, on numbers of float32. A null as `high` stands for the largest
    value of 8 or 16 bits. The arguments are those of `export_graph`: what the graph does itself is
    left out.
    """
    data, asked = loaded.config.data, GraphOptions(**options)
    low, high = data.value_range or (0.0, None)
    channels = {"channels": data.channels, "order": "as stored", "exif_orientation": "ignored"}
    if data.channels == RGB_CHANNELS:
        channels |= {"order": "RGB", "grey": "three times", "palette": "its colours"}
    channels["alpha"] = "a channel" if data.channels in (2, 4) else "dropped"
    # In stored units, since images of whole numbers get a whole number.
    fill = {"where": "not finite, or a TIFF's number for no data", "low": low, "high": high}
    steps = [
        {"step": "read", **channels},
        {"step": "fill", **fill, "scaled": list(data.mean), "whole_numbers": "rounded"},
    ]
    steps += [{"step": "clip", "low": low, "high": high}] if data.clip else []
    if asked.normalize is None or data.value_range is None:
        steps.append({"step": "scale", "low": low, "high": high, "to": [0, 255]})
    short_side = outside(loaded, asked.view).short_side_px
    if size is not None or short_side is not None:
        to = {"short_side_px": short_side, "sides": "floor(side * short_side_px / shorter + 0.5)"}
        to = to if size is None else {"height_width": list(size)}
        steps.append({"step": "resize", **to, "method": "bilinear, no antialiasing"})
    if asked.normalize is None:
        steps.append({"step": "normalize", "mean": list(data.mean), "std": list(data.std)})
    return steps


def outside(loaded: LoadedModel, view: ViewSize | None) -> InferenceSettings:
    """What predict does and the file does not: a file with a view resizes the image itself."""
    settings = InferenceSettings.from_config(loaded.config)
    return settings if view is None else replace(settings, short_side_px=None, scales=(1.0,))


def metadata_of(
    loaded: LoadedModel, *, size: tuple[int, int] | None = None, **options: Any
) -> dict[str, str]:
    """What a file says of the model and of all around it; arguments: those of `export_graph`."""
    asked, config, classes = GraphOptions(**options), loaded.config, loaded.classes
    settings = outside(loaded, asked.view)
    return {
        "graph": json.dumps(asked._asdict() | {"view": asked.view and asked.view._asdict()}),
        "preprocessing": json.dumps(preprocessing(loaded, size=size, **options)),
        "segtrain_version": __version__,
        "torch_version": torch.__version__,
        "model": " + ".join(
            f"{member.model.arch} {member.model.backbone}" for member in loaded.configs
        ),
        "step": loaded.steps,
        "weights": json.dumps(origins(loaded)),
        **({"ensemble": loaded.about} if loaded.members else {}),
        "task": config.task,
        "class_names": json.dumps(list(classes.names)),
        "class_ids": json.dumps(list(classes.write_ids)),
        "ignored_id": str(classes.write_ignored),
        "class_colors": json.dumps([list(color) for color in classes.palette]),
        "mean": json.dumps(list(config.data.mean)),
        "std": json.dumps(list(config.data.std)),
        "value_range": json.dumps(config.data.value_range),
        # What predict does around the network. An image of another size than in training gives
        # wrong classes without any error.
        "short_side_px": json.dumps(settings.short_side_px),
        "inference": json.dumps(settings.to_dict()),
    }
