"""Writes a model to a file, which gets its name only after it was read back.

Exporters sometimes write graphs that are silently wrong at other sizes than the traced one. So a
graph is read back, run at several sizes and compared with the model.
"""

import json
from collections.abc import Iterator
from contextlib import contextmanager
from math import ceil
from pathlib import Path
from typing import Any, Literal, NamedTuple

import torch
from safetensors.torch import save
from torch import Tensor

from segtrain.checkpoint.format import experiment_fields, plugin_fields
from segtrain.checkpoint.trained import LoadedModel
from segtrain.data.check.channels import channels_to_json
from segtrain.errors import CheckpointError, ConfigError, ExecutionError
from segtrain.export.export_model import Case, ExportModel, ViewSize, metadata_of
from segtrain.export.formats import FORMATS, Run, quiet
from segtrain.files import os_errors_as, temporary
from segtrain.task.tasks import task_of
from segtrain.text import first_of
from segtrain.types import IGNORE_INDEX

# Largest difference allowed, as a share of the largest logit. Runtimes add in another order, which
# made 2e-6 to 2e-5 with random weights (all architectures, onnxruntime); pooling windows of another
# size make 1e-1, half precision 4e-3.
TOLERANCE = 1e-3

# Height and width are unequal, and neither is a multiple of a pooling grid's bins.
TRACED = Case(2, 104, 168)
# Not traced, so a size that became a constant shows: wider and taller, odd, another batch, and
# multiples of all strides.
UNSEEN = (Case(1, 131, 222), Case(2, 225, 128), Case(1, 96, 160))

# Of a view, as of predict's: a smaller one is a part of a feature.
_LEAST_VIEW_PX = 8

# The smallest of these sides shows timm's networks of patches more than one feature.
_LEAST_SCALE = 0.7


class Deviation(NamedTuple):
    """How far the file is from the model on one batch.

    difference: the largest one, relative to the largest logit. For label maps: how far the logit of
        the file's class lies below the best one, at most. Of probabilities relative to it or 1.
    """

    case: Case
    difference: float
    agreement: float  # fraction of pixels with the same class; of pixels and classes that overlap
    problem: str | None = None  # why the two could not be compared

    @property
    def passed(self) -> bool:
        """Whether the file may be used; a NaN fails."""
        return self.problem is None and self.difference <= TOLERANCE


def cases(
    fixed_size: tuple[int, int] | None, min_side_px: int = 1, view: ViewSize | None = None
) -> tuple[Case, ...]:
    """The batches to compare, with the smallest size if it is above 1; the first is traced."""
    if fixed_size is not None:
        return (Case(2, *fixed_size), Case(1, *fixed_size))
    least = (Case(1, min_side_px, min_side_px),) if min_side_px > 1 else ()
    shrinks = view is not None and view.short_side_px is None
    times = ceil(_LEAST_SCALE / view.scale) if shrinks else 1  # views keep several features a side
    usual = (Case(n, times * height, times * width) for n, height, width in (TRACED, *UNSEEN))
    return (*usual, *least)


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
    expected = _several(graph(images))
    try:
        found = _several(run(images))
    except Exception as error:  # any runtime, any reason: the file does not work at this size
        # The end: before it TorchScript shows the graph it ran.
        reason = f"{type(error).__name__}: {str(error).strip()[-300:]}"
        return Deviation(case, float("nan"), 0.0, f"it does not run: {reason}")
    own, wanted = ([f"{tuple(x.shape)} {x.dtype}" for x in each] for each in (found, expected))
    if own != wanted:
        what = f"{' and '.join(own)}, not {' and '.join(wanted)}"
        return Deviation(case, float("nan"), 0.0, f"its result is {what}")
    # All logits may be 0.
    scale = logits.abs().max().clamp_min(torch.finfo(logits.dtype).tiny)
    # A probability differs by at most half of what logits do.
    others = zip(found[1:], expected[1:], strict=True)
    differences = [(a - b).abs().max() / scale.clamp_min(1) for a, b in others]
    labels = found[0].long()
    if (below := graph.options.unknown_below) is not None:
        unknown, sure = labels == IGNORE_INDEX, graph.probability(logits).amax(1) - below
        differences.append(torch.where(unknown, sure, -sure).max() / scale.clamp_min(1))
        labels = torch.where(unknown, logits.argmax(1), labels)
    if not graph.options.argmax:
        worst, agreement = (found[0] - logits).abs().max(), graph.task.agreement(found[0], logits)
    elif int(labels.max()) >= logits.shape[1]:
        return Deviation(case, float("nan"), 0.0, f"it gives the class {int(labels.max())}")
    else:  # how far the class lies below the best: rounding may swap almost equal ones
        worst = (logits.amax(1) - logits.gather(1, labels.unsqueeze(1)).squeeze(1)).max()
        agreement = (found[0] == expected[0]).float().mean()
    worst = torch.stack([worst / scale, *differences]).max()  # a NaN too
    return Deviation(case, worst.item(), agreement.item())


def _several(results: Tensor | tuple[Tensor, ...]) -> tuple[Tensor, ...]:
    return results if isinstance(results, tuple) else (results,)


def export_graph(
    loaded: LoadedModel,
    output: Path,
    *,
    format: Literal["onnx", "pt2", "torchscript"],
    size: tuple[int, int] | None = None,
    **options: Any,
) -> list[Deviation]:
    """Writes the model's graph to `output` and returns how it compared with the model.

    size: (height, width) of all images in px; None: any. The batch size is always free.
    options: what goes into the graph, see `GraphOptions`.

    Raises:
        ConfigError: images of the run do not fit into uint8, or views are too small.
        ExecutionError: the exporter failed, or the file differs from the model. `output` is then
            what it was before. The checkpoint is good, so this is no CheckpointError.
    """
    graph = graph_of(loaded, **options)
    least = min_side_px(loaded, format, size, graph.options.view)
    metadata = metadata_of(loaded, size=size, **options)
    metadata |= graph.describe(fixed_size=size, min_side_px=least)
    batches = cases(size, least, graph.options.view)
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


def graph_of(loaded: LoadedModel, **options: Any) -> ExportModel:
    """What `export_graph` writes; ConfigError: images of the run do not fit into uint8."""
    data = loaded.config.data
    if options.get("normalize") == "uint8" and (data.value_range or (0, 0))[1] > 255:
        what = f"images have values of {list(data.value_range)} (data.value_range)"
        raise ConfigError(f"--normalize uint8: {what}; use --normalize float32")
    return ExportModel(
        loaded.model,
        data.mean,
        data.std,
        data.value_range,
        clip=data.clip,
        align_corners=loaded.config.model.align_corners,
        task=task_of(loaded.config.task),
        **options,
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
    metadata = metadata_of(loaded) | experiment_fields(loaded.config, loaded.classes)
    if records := plugin_fields(loaded.config):
        metadata["plugins"] = json.dumps(records)
    if loaded.channels is not None:
        metadata["channels"] = channels_to_json(loaded.channels)
    content = save(copies, metadata=metadata)
    with replaced(output) as draft:
        draft.write_bytes(content)  # by Python, which reports a full disk as what it is
    return len(copies)


def min_side_px(
    loaded: LoadedModel,
    format: str,
    size: tuple[int, int] | None = None,
    view: ViewSize | None = None,
) -> int:
    """The least height and width that a file of this format takes; size: of all images, or any.

    torch.export makes a constant of a side of a single feature, and refuses images that have one.
    """
    models = [config.model for config in loaded.configs]
    # timm's stems of patches round sizes down, all other layers up.
    two_pixels = max(
        2 * model.output_stride if model.backbone.startswith("timm/") else model.output_stride + 1
        for model in models
    )
    least = two_pixels if format == "pt2" and size is None else 1
    return least if view is None else view.least_side(max(least, _LEAST_VIEW_PX), size)


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


@contextmanager
def replaced(output: Path) -> Iterator[Path]:
    """A name beside `output` to write to; it becomes `output` when the block ends without error."""
    with os_errors_as(ExecutionError, output, "cannot be written"):
        output.parent.mkdir(parents=True, exist_ok=True)
        with temporary(output, suffix=output.suffix) as draft:
            yield draft
            draft.replace(output)
