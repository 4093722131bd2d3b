"""Writes a model to a file, which gets its name only after it was read back.

Exporters sometimes write graphs that are silently wrong at other sizes than the traced one. So a
graph is read back, run at several sizes and compared with the model.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save

from segtrain import __version__
from segtrain.checkpoint.format import experiment_fields, plugin_fields
from segtrain.checkpoint.trained import LoadedModel
from segtrain.data.check.channels import channels_to_json
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.export.formats import FORMATS, Case, ExportModel, Run, quiet
from segtrain.files import os_errors_as, temporary
from segtrain.inference.class_scores import InferenceSettings
from segtrain.models.stem import RGB_CHANNELS
from segtrain.task.tasks import task_of
from segtrain.text import first_of

# Largest difference allowed, as a share of the largest logit. Runtimes add in another order, which
# made 2e-6 to 2e-5 with random weights (all architectures, onnxruntime); pooling windows of another
# size make 1e-1, half precision 4e-3.
TOLERANCE = 1e-3

# Height and width are unequal, and neither is a multiple of a pooling grid's bins.
TRACED = Case(2, 104, 168)
# Not traced, so a size that became a constant shows: wider and taller, odd, another batch, and
# multiples of all strides.
UNSEEN = (Case(1, 131, 222), Case(2, 225, 128), Case(1, 96, 160))


class Deviation(NamedTuple):
    """How far the file is from the model on one batch.

    difference: the largest one, relative to the largest logit. For label maps: how far the logit of
        the file's class lies below the best one, at most.
    """

    case: Case
    difference: float
    agreement: float  # fraction of pixels with the same class; of pixels and classes that overlap
    problem: str | None = None  # why the two could not be compared

    @property
    def passed(self) -> bool:
        """Whether the file may be used; a NaN fails."""
        return self.problem is None and self.difference <= TOLERANCE


def cases(fixed_size: tuple[int, int] | None, min_side_px: int = 1) -> tuple[Case, ...]:
    """The batches to compare, with the smallest size if it is above 1; the first is traced."""
    if fixed_size is not None:
        return (Case(2, *fixed_size), Case(1, *fixed_size))
    least = (Case(1, min_side_px, min_side_px),) if min_side_px > 1 else ()
    return (TRACED, *UNSEEN, *least)


@torch.no_grad()
def compare(run: Run, graph: ExportModel, case: Case) -> Deviation:
    """Compares `run`, the file read back, with `graph` on one batch.

    Raises:
        CheckpointError: the model itself gives NaN or infinity.
    """
    images = graph.example(case)
    logits = graph.logits(images)  # (N, K, H, W)
    if not logits.isfinite().all():
        raise CheckpointError(
            f"the model's logits are not finite (image {case.height}x{case.width}); export an "
            "earlier checkpoint"
        )
    expected = graph(images)
    try:
        result = run(images)
    except Exception as error:  # any runtime, any reason: the file does not work at this size
        # The end: before it TorchScript shows the graph it ran.
        reason = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        return Deviation(case, float("nan"), 0.0, f"it does not run: {reason}")
    if (result.shape, result.dtype) != (expected.shape, expected.dtype):
        what = f"{tuple(result.shape)} {result.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        return Deviation(case, float("nan"), 0.0, f"its result is {what}")
    # All logits may be 0.
    scale = logits.abs().max().clamp_min(torch.finfo(logits.dtype).tiny)
    if not graph.argmax:
        worst, agreement = (result - logits).abs().max(), graph.task.agreement(result, logits)
    elif int(result.max()) >= logits.shape[1]:
        return Deviation(case, float("nan"), 0.0, f"it gives the class {int(result.max())}")
    else:  # how far the class lies below the best: rounding may swap almost equal ones
        labels = result.long()
        worst = (logits.amax(1) - logits.gather(1, labels.unsqueeze(1)).squeeze(1)).max()
        agreement = (labels == logits.argmax(1)).float().mean()
    return Deviation(case, (worst / scale).item(), agreement.item())


def export_graph(
    loaded: LoadedModel,
    output: Path,
    *,
    format: Literal["onnx", "pt2", "torchscript"],
    normalize: Literal["uint8", "float32"] | None = None,
    argmax: bool = False,
    size: tuple[int, int] | None = None,
) -> list[Deviation]:
    """Writes the model's graph to `output` and returns how it compared with the model.

    normalize, argmax: what goes into the graph, see ExportModel.
    size: (height, width) of all images in px; None: any. The batch size is always free.

    Raises:
        ConfigError: images of the run do not fit into uint8.
        ExecutionError: the exporter failed, or the file differs from the model. `output` is then
            what it was before. The checkpoint is good, so this is no CheckpointError.
    """
    graph = graph_of(loaded, normalize=normalize, argmax=argmax)
    least = min_side_px(loaded, format) if size is None else 1
    steps = {"preprocessing": json.dumps(preprocessing(loaded, normalize=normalize, size=size))}
    metadata = _metadata(loaded) | steps | graph.describe(fixed_size=size, min_side_px=least)
    batches = cases(size, least)
    example = graph.example(batches[0])
    with replaced(output) as draft:
        with quiet():
            try:
                FORMATS[format].write(graph, example, size is not None, metadata, draft)
                run = FORMATS[format].read(draft)
            except (RuntimeError, ValueError) as error:
                reason = str(error).strip().partition("\n")[0]
                others = " or ".join(f"--format {name}" for name in FORMATS if name != format)
                raise ExecutionError(
                    f"{output}: the {format} exporter of torch {torch.__version__} failed: "
                    f"{reason}; try {others}" + (", or --size" if size is None else "")
                ) from error
            # Still inside the block: after an error `output` is what it was before.
            compared = [compare(run, graph, case) for case in batches]
        if not all(comparison.passed for comparison in compared):
            raise ExecutionError(_refusal(output, format, compared))
    return compared


def graph_of(
    loaded: LoadedModel, *, normalize: Literal["uint8", "float32"] | None, argmax: bool
) -> ExportModel:
    """What `export_graph` writes; ConfigError: images of the run do not fit into uint8."""
    data = loaded.config.data
    if normalize == "uint8" and data.value_range is not None and data.value_range[1] > 255:
        what = f"images have values of {list(data.value_range)} (data.value_range)"
        raise ConfigError(f"--normalize uint8: {what}; use --normalize float32")
    return ExportModel(
        loaded.model,
        data.mean,
        data.std,
        data.value_range,
        clip=data.clip,
        normalize=normalize,
        argmax=argmax,
        task=task_of(loaded.config.task),
    )


def export_weights(loaded: LoadedModel, output: Path, *, half: bool = False) -> int:
    """Writes the weights to `output` as safetensors and returns the number of tensors.

    With the config and the classes, so that `checkpoint.load_model` reads the file.

    half: kernels of convolutions become float16. Norms and biases stay as they are: running
        variances may be too large for it.

    Raises:
        ExecutionError: a kernel is too large for float16, or the file cannot be written.
    """
    weights = loaded.model.state_dict()
    # A copy each: safetensors refuses tensors that share memory or are stored channels-last.
    dense = torch.contiguous_format
    copies = {k: t.detach().cpu().clone(memory_format=dense) for k, t in weights.items()}
    if half:
        copies = {k: t.half() if t.dim() > 1 else t for k, t in copies.items()}
        if too_large := [k for k, t in copies.items() if t.dim() > 1 and not t.isfinite().all()]:
            what = f"not written: too large for float16 (--half): {first_of(too_large)}"
            raise ExecutionError(f"{output}: {what}")
    steps = {"preprocessing": json.dumps(preprocessing(loaded))}
    metadata = _metadata(loaded) | steps | experiment_fields(loaded.config, loaded.classes)
    if records := plugin_fields(loaded.config):
        metadata["plugins"] = json.dumps(records)
    if loaded.channels is not None:
        metadata["channels"] = channels_to_json(loaded.channels)
    content = save(copies, metadata=metadata)
    with replaced(output) as draft:
        draft.write_bytes(content)  # by Python, which reports a full disk as what it is
    return len(copies)


def min_side_px(loaded: LoadedModel, format: str) -> int:
    """The least height and width that a file of this format for any size takes.

    torch.export makes a constant of a side of a single feature, and refuses images that have one.
    """
    models = [config.model for config in loaded.configs]
    # timm's stems of patches round sizes down, all other layers up.
    two_pixels = max(
        2 * model.output_stride if model.backbone.startswith("timm/") else model.output_stride + 1
        for model in models
    )
    return two_pixels if format == "pt2" else 1


def _refusal(output: Path, format: str, compared: list[Deviation]) -> str:
    lines = [f"{output}: not written: the {format} file differs from the model"]
    for deviation in compared:
        if not deviation.passed:
            far = (
                f"max difference {deviation.difference:.1e} of the largest, "
                f"{deviation.agreement:.2%} equal"
            )
            batch, height, width = deviation.case
            lines.append(f"  at {height}x{width}, batch {batch}: {deviation.problem or far}")
    return "\n".join([*lines, "  --size HEIGHT WIDTH writes a file for that one size"])


def preprocessing(
    loaded: LoadedModel,
    *,
    normalize: Literal["uint8", "float32"] | None = None,
    size: tuple[int, int] | None = None,
) -> list[dict[str, Any]]:
    """The steps from a stored image to the input of the network, in order, for the metadata.

    As `segtrain predict` takes them, on numbers of float32. A null as `high` stands for the largest
    value of 8 or 16 bits. The arguments are those of `export_graph`: what the graph does itself is
    left out.
    """
    data = loaded.config.data
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
    if normalize is None or data.value_range is None:
        steps.append({"step": "scale", "low": low, "high": high, "to": [0, 255]})
    short_side = InferenceSettings.from_config(loaded.config).short_side_px
    if size is not None or short_side is not None:
        to = {"short_side_px": short_side, "sides": "floor(side * short_side_px / shorter + 0.5)"}
        to = to if size is None else {"height_width": list(size)}
        steps.append({"step": "resize", **to, "method": "bilinear, no antialiasing"})
    if normalize is None:
        steps.append({"step": "normalize", "mean": list(data.mean), "std": list(data.std)})
    return steps


def _metadata(loaded: LoadedModel) -> dict[str, str]:
    config, classes = loaded.config, loaded.classes
    settings = InferenceSettings.from_config(config)
    return {
        "segtrain_version": __version__,
        "torch_version": torch.__version__,
        "model": " + ".join(
            f"{member.model.arch} {member.model.backbone}" for member in loaded.configs
        ),
        "step": loaded.steps,
        **({"ensemble": loaded.about} if loaded.members else {}),
        "task": config.task,
        "class_names": json.dumps(list(classes.names)),
        "class_ids": json.dumps(list(classes.write_ids)),
        "class_colors": json.dumps([list(color) for color in classes.palette]),
        "mean": json.dumps(list(config.data.mean)),
        "std": json.dumps(list(config.data.std)),
        "value_range": json.dumps(config.data.value_range),
        # What predict does around the network. An image of another size than in training gives
        # wrong classes without any error.
        "short_side_px": json.dumps(settings.short_side_px),
        "inference": json.dumps(settings.to_dict()),
    }


@contextmanager
def replaced(output: Path) -> Iterator[Path]:
    """A name beside `output` to write to; it becomes `output` when the block ends without error."""
    with os_errors_as(ExecutionError, output, "cannot be written"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with temporary(output, suffix=output.suffix) as draft:
            yield draft
            draft.replace(output)
