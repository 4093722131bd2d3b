"""`segtrain export`: a checkpoint as ONNX, .pt2, TorchScript or safetensors."""

import argparse
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory

from segtrain.checkpoint.trained import LoadedModel, load_model
from segtrain.data import SegDataset, open_dataset
from segtrain.errors import EXIT_OK, ConfigError, DataError, ExecutionError
from segtrain.export.export_model import ViewSize, outside
from segtrain.export.formats import ONNX_OPSET, require_onnx
from segtrain.export.quantize import NUM_RUNS, Figures, Quantizer, processor
from segtrain.export.write import (
    TOLERANCE,
    Deviation,
    export_graph,
    export_weights,
    graph_of,
    min_side_px,
    replaced,
)
from segtrain.files import check_utf8, kind_of
from segtrain.inference.class_scores import InferenceSettings
from segtrain.inference.settings import set_after_training
from segtrain.metrics import percent
from segtrain.run.pictures import spread
from segtrain.task.decision_rule import rule_of
from segtrain.task.tasks import task_of
from segtrain.text import printable, table_lines

# Of each split; more is more certain, and takes longer.
_NUM_IMAGES = 50
# Points of mIoU; a file that loses more is rarely what anybody wants.
_MAX_LOSS = 2.0

# What the command has of `GraphOptions`.
_OF_GRAPHS = ("normalize", "argmax", "confidence", "unknown_below", "temperature")

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
    _check_task(args, loaded)
    short_side_px = loaded.config.data.short_side_px if args.scale else args.short_side
    view = ViewSize(short_side_px, args.scale or 1.0)
    if view == (None, 1):
        if args.scale:
            raise ConfigError("--scale 1: no effect: the run has no data.short_side_px")
        view = None
    if args.format == "safetensors":
        if loaded.members:
            raise ConfigError("--format safetensors: holds the weights of one model, no ensemble")
        count = export_weights(loaded, output, half=args.half)
        print(f"{count} tensors")
    else:
        size = tuple(args.size) if args.size else None
        asked = {name: getattr(args, name) for name in _OF_GRAPHS} | {"view": view}
        write = partial(export_graph, loaded, format=args.format, size=size, **asked)
        if args.quantize:
            graph = graph_of(loaded, **asked)
            datasets, settings = _images(args, loaded)
            with TemporaryDirectory() as folder:
                source = Path(folder) / output.name
                print("\n".join(_table(write(source))), flush=True)
                quantizer = Quantizer(loaded, graph, settings, size)
                _write_int8(args, quantizer, source, output, *datasets)
        else:
            print("\n".join(_table(write(output))))
        least = min_side_px(loaded, args.format, size, view)
        if args.size is None and least > 1:
            print(f"takes images of at least {least} px a side (metadata: min_side_px)")
    print("\n".join([*loaded.zeros(), *_how_to_use(loaded, args, view)]))
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
    given = [name for name in (*_OF_GRAPHS, "size", "scale", "short_side") if getattr(args, name)]
    if args.format == "safetensors" and given:
        options = ", ".join(f"--{name}" for name in given).replace("_", "-")
        problems.append(f"{options}: no effect on --format safetensors, which holds weights")
    if args.scale and args.short_side:
        problems.append("--scale, --short-side: give one of them")
    if args.temperature and args.argmax and not (args.confidence or args.unknown_below):
        problems.append("--temperature: moves no label; add --confidence or --unknown-below")
    if args.quantize and args.unknown_below:
        what = "which scores the label of every pixel; add --confidence, and compare it yourself"
        problems.append(f"--unknown-below: not with --quantize, {what}")
    if args.half and args.format != "safetensors":
        problems.append(f"--half: is for --format safetensors, not for {args.format}")
    if args.quantize and args.format != "onnx":
        problems.append(f"--quantize: is for --format onnx, not for {args.format}")
    if not args.quantize and (args.images or args.max_loss is not None or args.set):
        given = {
            "--images": args.images,
            "--max-loss": args.max_loss is not None,
            "--set": args.set,
        }
        options = ", ".join(option for option, value in given.items() if value)
        other = "; --scale and --short-side resize images in the file" if args.set else ""
        problems.append(f"{options}: no effect without --quantize{other}")
    if problems:
        raise ConfigError("\n".join(problems))
    if args.format == "onnx":
        require_onnx()


def _check_task(args: argparse.Namespace, loaded: LoadedModel) -> None:
    """ConfigError: what is asked of scores does not go with the task."""
    task = task_of(loaded.config.task)
    for name in ("argmax", "quantize", "confidence", "unknown_below", "temperature"):
        if getattr(args, name):
            task.check_classes(f"--{name}".replace("_", "-"))
    takes_highest = task.decoding(None).takes_highest
    if args.argmax and not takes_highest:
        raise ConfigError(
            "--argmax: a pixel may have several classes here; without it the file gives logits, "
            "and its metadata the thresholds of their sigmoids (inference)"
        )
    if args.unknown_below and task.refuses_rules:
        raise ConfigError(f"--unknown-below: {task.refuses_rules}")
    rule_of([], loaded.classes.names, args.unknown_below)
    if (args.confidence or args.unknown_below) and takes_highest and not args.argmax:
        raise ConfigError("--confidence, --unknown-below: are about labels; add --argmax")
    thresholds = InferenceSettings.from_config(loaded.config).thresholds or ()
    if args.temperature and any(value != 0.5 for value in thresholds):
        raise ConfigError("--temperature: eval.thresholds were found without it; leave it out")


def _images(
    args: argparse.Namespace, loaded: LoadedModel
) -> tuple[tuple[SegDataset, SegDataset], InferenceSettings]:
    """The training and the evaluation split, and how the second is evaluated.

    Raises:
        DataError: the data are not where the config says, or have other classes.
    """
    config = set_after_training(loaded.config, args.set, ("data.", "eval."), source=args.source)
    data = config.data
    try:
        training = open_dataset(data, data.train_split, labelled=False)
        scored = open_dataset(data, data.eval_split)
    except DataError as error:
        what = "--quantize is calibrated on the training split: --set data.root=FOLDER says where"
        raise DataError(f"{error}\n{what}") from error
    if loaded.classes.names != scored.classes.names:
        raise DataError(f"{data.classes}: other classes than those of the model; see data.classes")
    return (training, scored), InferenceSettings.from_config(config)


def _write_int8(
    args: argparse.Namespace,
    quantizer: Quantizer,
    source: Path,
    output: Path,
    training: SegDataset,
    scored: SegDataset,
) -> None:
    """Makes `output` of the float file, and prints what it costs and gains.

    ExecutionError: it costs more than --max-loss; then there is no new file.
    """
    num_images = args.images or _NUM_IMAGES
    chosen = [sorted(spread(len(data), min(num_images, len(data)))) for data in (training, scored)]
    counted = [
        f"{len(indices)} of the {len(data)} images of split {data.split}"
        for data, indices in zip((training, scored), chosen, strict=True)
    ]
    print(f"calibrating int8 on {counted[0]}, spread evenly", flush=True)
    with replaced(output) as draft:
        quantizer.write(source, draft, training, chosen[0])
        figures = quantizer.figures((source, draft), scored, chosen[1])
        print("\n".join(_int8_table(figures)))
        print(figures.speed(processor()))
        print(f"mIoU of {counted[1]}: {quantizer.settings.describe()}", flush=True)
        most = _MAX_LOSS if args.max_loss is None else args.max_loss
        if not figures.loss <= most:  # a NaN too
            raise ExecutionError(
                f"{output}: not written: the mIoU falls by {figures.loss:.1f} points, and {most:g} "
                "are allowed; --max-loss allows more, --images calibrates on more images"
            )


def _int8_table(figures: Figures) -> list[str]:
    height, width = figures.size
    columns = [
        ("file", "float", "int8"),
        ("mIoU", *map(percent, figures.mean_iou)),
        ("ms", *(f"{x:.1f}" for x in figures.milliseconds)),
        ("MiB", *(f"{x:.1f}" for x in figures.mebibytes)),
    ]
    return [
        *table_lines(columns),
        f"{figures.agreement:.2%} of the labelled pixels get the same class; ms: median of "
        f"{NUM_RUNS} runs of an image of {height}x{width} by onnxruntime on this CPU",
    ]


def _table(compared: list[Deviation]) -> list[str]:
    lines = ["  size (px)  batch  max difference  same class"]
    for i, (case, difference, agreement, _) in enumerate(compared):
        size = f"{case.height}x{case.width}"
        note = "  (traced)" if i == 0 else ""
        lines.append(f"{size:>11}  {case.batch:5d}  {difference:14.1e}  {agreement:10.4%}{note}")
    return [*lines, f"differences are shares of the largest logit; {TOLERANCE:.0e} is allowed"]


def _how_to_use(
    loaded: LoadedModel, args: argparse.Namespace, view: ViewSize | None
) -> Iterator[str]:
    """What a program must do around the file to get what `segtrain predict` gives."""
    settings = outside(loaded, view)
    if loaded.members:
        yield f"{loaded.about}; logits are logarithms of it"
    if args.temperature:
        yield f"the file divides logits by {args.temperature:g} before their softmax"
    if view is not None:
        same = [f"eval.scales=[{args.scale or 1:g}]", "eval.mode=whole", "eval.flip=false"]
        same += [f"data.short_side_px={args.short_side}"] if args.short_side else []
        how = " ".join(f"--set {setting}" for setting in same)
        if loaded.config.train.precision.endswith("float16"):  # the file is float32
            how += " --set train.precision=float32"
        yield f"the file resizes images: segtrain eval {printable(args.source)} {how} scores that"
    # With a view, the file has the only scale in it.
    how = settings.describe() if view is None else settings.describe().replace("scale 1; ", "")
    line = f"not in the file, done by predict: {how}"
    if settings.short_side_px is not None and args.size is None:
        line += f"; resize images to a short side of {settings.short_side_px} px yourself, or let "
        line += "the file do it, as predict does: --scale 1"
    yield f"{line} (metadata: short_side_px, inference)"
