"""`segtrain export`: a checkpoint as ONNX, .pt2, TorchScript or safetensors.

A file gets its name only after it was read back and agreed with the model: graphs on images of
sizes that were not traced, weights bit for bit. Exporters are known to write graphs that are
silently wrong at other sizes, and nobody would notice until the predictions disappoint.
"""

import argparse
import json
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import torch

import segtrain
from segtrain.checkpoint.loading import LoadedModel, load_model
from segtrain.config import config_to_yaml
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError
from segtrain.evaluation.settings import InferenceSettings
from segtrain.export.formats import FORMATS, ONNX_OPSET, quiet, require_onnx
from segtrain.export.graph import ExportModel
from segtrain.export.verify import TOLERANCE, Comparison, cases, compare
from segtrain.export.weights import check_weights, write_weights
from segtrain.files import kind_of, temporary
from segtrain.text import printable

__all__ = ["Comparison", "ExportModel", "export_graph", "export_weights", "main"]

# Of the names that each format usually has; the first is suggested.
_ENDINGS = {
    "onnx": (".onnx",),
    "pt2": (".pt2",),
    "torchscript": (".pt", ".pth", ".ts", ".torchscript"),
    "safetensors": (".safetensors",),
}


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code.

    args: source (run directory or checkpoint), format, output, normalize (None, "uint8" or
        "float32"), argmax, size (None or [height, width]), overwrite.
    """
    output = Path(args.output)
    _check_request(args, output)
    loaded = load_model(args.source)
    if args.format == "safetensors":
        count = export_weights(loaded, output)
        print(f"{count} tensors read back, equal bit for bit")
    else:
        compared = export_graph(
            loaded,
            output,
            format=args.format,
            normalize=args.normalize,
            argmax=args.argmax,
            size=tuple(args.size) if args.size else None,
        )
        print(table(compared))
        if args.size is None and (least := min_side_px(loaded, args.format)) > 1:
            print(f"takes images of at least {least} px a side (metadata: min_side_px)")
    print(_how_to_use(loaded, fixed_size=args.size))
    opset = f", opset {ONNX_OPSET}" if args.format == "onnx" else ""
    print(
        f"wrote {printable(output)} ({args.format}{opset}, {output.stat().st_size / 2**20:.1f} MiB)"
    )
    return EXIT_OK


def export_graph(
    loaded: LoadedModel,
    output: Path,
    *,
    format: Literal["onnx", "pt2", "torchscript"],
    normalize: Literal["uint8", "float32"] | None = None,
    argmax: bool = False,
    size: tuple[int, int] | None = None,
) -> list[Comparison]:
    """Writes the model's graph to `output` and returns how it compared with the model.

    normalize, argmax: what goes into the graph, see ExportModel.
    size: (height, width) of all images in px; None: any. The batch is always free.

    Raises:
        ExecutionError: the exporter failed, or the file differs from the model. The checkpoint is
            good, so this is no CheckpointError. There is no file then, or the one from before.
    """
    data = loaded.config.data
    graph = ExportModel(
        loaded.model, mean=data.mean, std=data.std, normalize=normalize, argmax=argmax
    )
    least = min_side_px(loaded, format) if size is None else 1
    about = graph.describe(fixed_size=size, min_side_px=least)
    metadata = {**_metadata(loaded), **about}
    traced, *_ = batches = cases(size, least)
    with _replaced(output) as draft:
        with quiet():
            try:
                FORMATS[format].write(
                    graph, graph.example(traced), size is not None, metadata, draft
                )
                run = FORMATS[format].read(draft)
            except (RuntimeError, ValueError) as error:
                raise ExecutionError(
                    f"{output}: the {format} exporter of torch {torch.__version__} failed: "
                    f"{str(error).strip()[:1000]}"
                ) from error
            compared = [compare(run, graph, case) for case in batches]
        if not all(comparison.passed for comparison in compared):
            raise ExecutionError(_refusal(output, format, compared))
    return compared


def min_side_px(loaded: LoadedModel, format: str) -> int:
    """The least height and width that a file of this format for any size takes.

    torch.export makes a constant of a side of a single feature, and refuses images that have one.
    """
    return loaded.config.model.output_stride + 1 if format == "pt2" else 1


def export_weights(loaded: LoadedModel, output: Path) -> int:
    """Writes the weights to `output` as safetensors and returns the number of tensors.

    Keys are those of the run's model; the metadata holds the resolved config and the classes.

    Raises:
        ExecutionError: what was read back differs from what was written.
    """
    weights = loaded.model.state_dict()
    metadata = {**_metadata(loaded), "config": config_to_yaml(loaded.config)}
    with _replaced(output) as draft:
        write_weights(weights, metadata, draft)
        check_weights(weights, metadata, draft)
    return len(weights)


def table(compared: list[Comparison]) -> str:
    """The comparisons as lines for people."""
    lines = ["  size (px)  batch  max difference  same class"]
    for i, (case, difference, agreement, _) in enumerate(compared):
        size = f"{case.height}x{case.width}"
        note = "  (traced)" if i == 0 else ""
        lines.append(f"{size:>11}  {case.batch:5d}  {difference:14.1e}  {agreement:10.4%}{note}")
    lines.append(f"differences are shares of the largest logit; {TOLERANCE:.0e} is allowed")
    return "\n".join(lines)


def _refusal(output: Path, format: str, compared: list[Comparison]) -> str:
    lines = [f"{output}: not written: the {format} file differs from the model"]
    for comparison in compared:
        if not comparison.passed:
            batch, height, width = comparison.case
            what = comparison.problem or (
                f"max difference {comparison.difference:.1e} of the largest logit, "
                f"at most {TOLERANCE:.0e} expected; "
                f"{comparison.agreement:.2%} of the pixels have the same class"
            )
            lines.append(f"  at {height}x{width}, batch {batch}: {what}")
    lines.append("  --size HEIGHT WIDTH writes a file for that one size, if this one is for others")
    return "\n".join(lines)


def _check_request(args: argparse.Namespace, output: Path) -> None:
    problems = []
    if output.is_dir():
        problems.append(f"--output {output}: is a directory; expected a file")
    elif output.exists() and not args.overwrite:
        problems.append(f"--output {output}: exists; choose another name or pass --overwrite")
    meant = [name for name, ends in _ENDINGS.items() if output.suffix.lower() in ends]
    if meant and args.format not in meant:
        problems.append(
            f"--output {output}: a name in {output.suffix} is for --format {meant[0]}; for "
            f"--format {args.format} write --output {output.with_suffix(_ENDINGS[args.format][0])}"
        )
    if args.format == "safetensors":
        options = {"--normalize": args.normalize, "--argmax": args.argmax, "--size": args.size}
        problems += [
            f"{name}: no effect on --format safetensors, which holds weights only"
            for name, value in options.items()
            if value
        ]
    if args.size and min(args.size) < 1:
        problems.append(f"--size: expected two positive numbers, got {args.size}")
    if output.is_dir():
        problems.append(f"--output {output}: is a directory; name the file")
    elif output.exists() and not output.is_file():  # replacing it would take it from everyone
        problems.append(f"--output {output}: is {kind_of(output)}; name a file")
    if problems:
        raise ConfigError("\n".join(problems))
    if args.format == "onnx":
        require_onnx()


def _how_to_use(loaded: LoadedModel, *, fixed_size: Sequence[int] | None) -> str:
    """What the caller of the file must do around it to get what `segtrain predict` gives."""
    settings = InferenceSettings.from_config(loaded.config)
    line = f"not in the file, done by predict: {settings.describe()}"
    if settings.short_side_px is not None and fixed_size is None:
        line += f"; resize images to a short side of {settings.short_side_px} px yourself"
    return f"{line} (metadata: short_side_px, inference)"


def _metadata(loaded: LoadedModel) -> dict[str, str]:
    config, classes = loaded.config, loaded.classes
    settings = InferenceSettings.from_config(config)
    return {
        "segtrain_version": segtrain.__version__,
        "torch_version": torch.__version__,
        "model": f"{config.model.arch} {config.model.backbone}",
        "step": str(loaded.step),
        "class_names": json.dumps(list(classes.names)),
        "class_ids": json.dumps(list(classes.write_ids)),
        "class_colors": json.dumps([list(color) for color in classes.palette]),
        "mean": json.dumps(list(config.data.mean)),
        "std": json.dumps(list(config.data.std)),
        # What predict does around the network. An image of another size than in training gives
        # wrong classes without any error.
        "short_side_px": json.dumps(settings.short_side_px),
        "inference": json.dumps(settings.to_dict()),
    }


@contextmanager
def _replaced(output: Path) -> Iterator[Path]:
    """A name beside `output` to write to; it becomes `output` when the block ends without error.

    Raises:
        ExecutionError: the disk is full, or the directory cannot be written.
    """
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with temporary(output, suffix=output.suffix) as draft:
            yield draft
            draft.replace(output)
    except OSError as error:
        raise ExecutionError(f"{output}: cannot be written: {error.strerror or error}") from error
