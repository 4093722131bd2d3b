"""`segtrain export`: a checkpoint as ONNX, .pt2, TorchScript or safetensors."""

import argparse
from pathlib import Path

from segtrain.checkpoint.trained import LoadedModel, load_model
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.evaluation.inference import InferenceSettings
from segtrain.export.formats import ONNX_OPSET, require_onnx
from segtrain.export.write import TOLERANCE, Deviation, export_graph, export_weights, min_side_px
from segtrain.files import check_utf8, kind_of
from segtrain.text import printable

# The usual endings of each format's files; the first is suggested.
_ENDINGS = {
    "onnx": (".onnx",),
    "pt2": (".pt2",),
    "torchscript": (".pt", ".pth", ".ts", ".torchscript"),
    "safetensors": (".safetensors",),
}


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    output = Path(args.output)
    check_output(output, overwrite=args.overwrite)
    _check_request(args, output)
    loaded = load_model(args.source, *args.others)
    if args.argmax and loaded.classes.overlapping:
        raise ConfigError(
            "--argmax: a pixel may have several classes here; without it the file gives logits, "
            "and its metadata the thresholds of their sigmoids (inference)"
        )
    if args.format == "safetensors":
        if loaded.members:
            raise ConfigError("--format safetensors: holds the weights of one model, no ensemble")
        count = export_weights(loaded, output, half=args.half)
        print(f"{count} tensors")
    else:
        compared = export_graph(
            loaded,
            output,
            format=args.format,
            normalize=args.normalize,
            argmax=args.argmax,
            size=tuple(args.size) if args.size else None,
        )
        print("\n".join(_table(compared)))
        if args.size is None and (least := min_side_px(loaded, args.format)) > 1:
            print(f"takes images of at least {least} px a side (metadata: min_side_px)")
    print("\n".join([*loaded.zeros(), _how_to_use(loaded, any_size=args.size is None)]))
    opset = f", opset {ONNX_OPSET}" if args.format == "onnx" else ""
    mib = output.stat().st_size / 2**20
    print(f"wrote {printable(output)} ({args.format}{opset}, {mib:.1f} MiB)")
    return EXIT_OK


def check_output(output: Path, *, overwrite: bool) -> None:
    """Refuses a name that libraries cannot write, a folder or device, and what is to be kept."""
    check_utf8(output)
    if output.exists() and not output.is_file():  # replacing a device would take it from everyone
        raise ConfigError(f"--output {output}: is {kind_of(output)}; name a file")
    if output.exists() and not overwrite:
        raise ConfigError(f"--output {output}: exists; choose another name or pass --overwrite")


def _check_request(args: argparse.Namespace, output: Path) -> None:
    problems = []
    meant = [name for name, ends in _ENDINGS.items() if output.suffix.lower() in ends]
    if meant and args.format not in meant:
        problems.append(
            f"--output {output}: a name in {output.suffix} is for --format {meant[0]}; for "
            f"--format {args.format} write --output {output.with_suffix(_ENDINGS[args.format][0])}"
        )
    if args.format == "safetensors" and (args.normalize or args.argmax or args.size):
        problems.append(
            "--normalize, --argmax, --size: no effect on --format safetensors, which holds weights"
        )
    if args.half and args.format != "safetensors":
        problems.append(f"--half: is for --format safetensors, not for {args.format}")
    if problems:
        raise ConfigError("\n".join(problems))
    if args.format == "onnx":
        require_onnx()


def _table(compared: list[Deviation]) -> list[str]:
    lines = ["  size (px)  batch  max difference  same class"]
    for i, (case, difference, agreement, _) in enumerate(compared):
        size = f"{case.height}x{case.width}"
        note = "  (traced)" if i == 0 else ""
        lines.append(f"{size:>11}  {case.batch:5d}  {difference:14.1e}  {agreement:10.4%}{note}")
    return [*lines, f"differences are shares of the largest logit; {TOLERANCE:.0e} is allowed"]


def _how_to_use(loaded: LoadedModel, *, any_size: bool) -> str:
    """What a program must do around the file to get what `segtrain predict` gives."""
    settings = InferenceSettings.from_config(loaded.config)
    line = f"not in the file, done by predict: {settings.describe()}"
    if loaded.members:
        line = f"{loaded.about}; logits are logarithms of it\n{line}"
    if settings.short_side_px is not None and any_size:
        line += f"; resize images to a short side of {settings.short_side_px} px yourself"
    return f"{line} (metadata: short_side_px, inference)"
