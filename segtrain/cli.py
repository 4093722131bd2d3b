"""The `segtrain` command: its arguments, and the function that runs each command.

Help and refused configs take a fraction of a second: the module of a command, which may import
torch, is imported when the command runs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
from functools import partial
from importlib import import_module
from pathlib import Path
from typing import Any, NoReturn

from segtrain import __version__
from segtrain.commands import exit_code, streams
from segtrain.text import printable

_DESCRIPTION = """\
Semantic segmentation training whose result does not depend on the number of devices.

  segtrain config copy own_data own.yaml     a config to begin with; `config list` names more
  segtrain data check own.yaml               is the data what the config says?
  segtrain train own.yaml                    train, evaluate, save checkpoints to runs/own
  segtrain eval runs/own                     IoU of every class
  segtrain predict runs/own photos/ --output predictions
  segtrain export runs/own --format onnx --output model.onnx
"""
_EPILOG = """\
exit codes: 0 done, 1 internal error, 2 command line or config, 3 data, 4 checkpoint,
5 non-finite loss, 6 a process or the system failed, 130 interrupted, 143 terminated
"""
_SET_HELP = (
    "change one option, checked like the file; may be repeated, the last one counts "
    "(train.lr=1e-3, augment.crop_size='[512, 1024]', model.pretrained=null)"
)
_CONFIG_HELP = "experiment file (YAML), or a name from 'segtrain config list'"
_SOURCE_HELP = "run directory (its best checkpoint) or checkpoint file"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: that of the process) and returns the exit code."""
    streams.prepare()
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(argv)
    args.argv = argv  # the launcher starts the same command once more for each rank
    return exit_code.run(partial(args.command, args))


def _function(place: str) -> Callable[[argparse.Namespace], int]:
    """The function `module:name` of segtrain, whose module is imported when it is called."""
    module, name = place.split(":")

    def call(args: argparse.Namespace) -> int:
        return getattr(import_module(f"segtrain.{module}"), name)(args)

    return call


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="segtrain", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"segtrain {__version__}")
    commands = _group(parser)
    _add_train(commands)
    _add_eval(commands)
    _add_verify(commands)
    _add_predict(commands)
    _add_export(commands)
    _add_convert(commands)
    _add_data(commands)
    _add_config(commands)
    _add_command(
        commands,
        "doctor",
        "commands.doctor:main",
        help="look at this machine and installation",
        description="Print versions, devices and memory, and what is wrong with them. Exit code 2 "
        "if nothing can be trained, else 0.",
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of its texts and takes no abbreviated options."""

    _words: Sequence[str] = ()

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs, allow_abbrev=False)

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:
        """As argparse's, but an unknown option is refused with an example of what to write."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            from segtrain.commands.hints import instead_of

            self.error(f"unrecognized arguments: {' '.join(unknown)}{instead_of(unknown, args)}")
        return found

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's; the words are kept for `error`."""
        self._words = list(args or ())
        return super().parse_known_args(args, namespace)

    def error(self, message: str) -> NoReturn:
        """Exits with 2; the message may quote what was typed or pasted."""
        from segtrain.commands.hints import after_error

        hint = after_error(message, [*self.prog.split()[1:], *self._words])
        super().error(printable(message + hint))


Commands = argparse._SubParsersAction
Add = Callable[..., Any]


def _group(parser: argparse.ArgumentParser) -> Commands:
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _add_command(commands: Commands, name: str, function: str, **texts: str) -> Add:
    """Adds the command that `function` ("module:name") runs; returns its `add_argument`."""
    parser = commands.add_parser(name, **texts)
    parser.set_defaults(command=_function(function))
    return parser.add_argument


def _add_train(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model from a config",
        description="Train the experiment in CONFIG; evaluate and save checkpoints on the way.",
        epilog="examples:\n"
        "  segtrain train own.yaml --nproc 4 --set train.lr=0.02\n"
        "  segtrain train own.yaml --resume                        or: train runs/own --resume\n"
        "  segtrain train camvid_small --set data.root=CamVid      from 'segtrain config list'\n"
        "  segtrain train CONFIG --nnodes 2 --node-rank 0 --rdzv-endpoint host0:29400\n"
        "  torchrun --nproc-per-node 4 -m segtrain train CONFIG",
    )
    train = _function("commands.train.target:main")
    parser.set_defaults(command=lambda args: train(_consistent_nodes(parser, args)))
    add = parser.add_argument
    add("config", metavar="CONFIG", help=f"{_CONFIG_HELP}; with --resume also the run's directory")
    _add_set(add)
    _add_nproc(add)
    _add_device(add)
    add("--output", type=Path, metavar="DIR", help="run directory (default: runs/<name of CONFIG>)")
    _add_switch(add, "--resume", "go on at the last checkpoint, on any number of ranks")
    _add_switch(
        add, "--accept-changes", "with --resume: go on although config or data have changed since"
    )
    _add_switch(
        add,
        "--requeue",
        "in a SLURM job: at SIGUSR1 save, requeue the job and stop (without: save and go on)",
    )
    add = parser.add_argument_group("several machines (the same command on each)").add_argument
    add("--nnodes", type=_positive, default=1, metavar="N", help="machines")
    add(
        "--node-rank",
        type=_non_negative,
        metavar="R",
        help="number of this machine; 0 serves the meeting point",
    )
    add("--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="meeting point on machine 0")
    add("--rdzv-id", metavar="ID", help="name of the job, where several meet at the same point")
    add(
        "--max-restarts",
        type=_non_negative,
        default=0,
        metavar="N",
        help="start all ranks again this often after one failed (default: 0)",
    )


def _consistent_nodes(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> argparse.Namespace:
    if args.nnodes > 1 and args.rdzv_endpoint is None:
        parser.error("--nnodes: several machines need --rdzv-endpoint HOST:PORT")
    if args.node_rank is not None and args.node_rank >= args.nnodes:
        parser.error(f"--node-rank: expected less than --nnodes, {args.nnodes}")
    return args


def _add_eval(commands: Commands) -> None:
    add = _add_command(
        commands,
        "eval",
        "commands.launch:evaluate",
        help="score a model on a split",
        description="Score a trained model: IoU of every class, mIoU, mAcc, aAcc.",
        epilog="examples:\n"
        "  segtrain eval runs/own\n"
        "  segtrain eval runs/own --set eval.scales='[0.75, 1, 1.25]' --set eval.flip=true\n"
        "  segtrain eval runs/own/checkpoints/last.pt --split val --save-predictions out\n"
        "  segtrain eval runs/own --split test --no-labels --save-predictions out",
    )
    add("checkpoint", metavar="RUN|CHECKPOINT", help=_SOURCE_HELP)
    add("--split", metavar="S", help="split (default: data.eval_split)")
    _add_set(add)
    _add_nproc(add)
    _add_device(add)
    add("--save-predictions", type=Path, metavar="DIR", help="write label maps with raw ids")
    add(
        "--no-labels",
        action="store_true",
        help="the split has no labels: predict for a test server, score nothing",
    )
    add("--json", type=Path, metavar="FILE", help="write all scores as JSON")
    add(
        "--overlays",
        type=Path,
        metavar="DIR",
        help="write pictures of image, label and prediction",
    )
    add("--num-overlays", type=_positive, default=8, metavar="N", help="how many (default: 8)")


def _add_verify(commands: Commands) -> None:
    add = _add_command(
        commands,
        "verify",
        "commands.launch:verify",
        help="compute steps of a run again and compare every bit",
        description="Compute steps of a run with train.shares again, on any number of ranks, and "
        "compare\nsamples, losses, gradients and weights with its receipts and checkpoints. "
        "Nothing is\nwritten into the run, which may still be training.",
        epilog="The replay starts at the newest checkpoint before A, or at the beginning.\n\n"
        "examples:\n"
        "  segtrain verify runs/own                   from the newest checkpoint before the end\n"
        "  segtrain verify runs/own --steps 1: --nproc 4\n"
        "  segtrain verify runs/own --steps 900:1000 --set data.root=/elsewhere/data",
    )
    add("run", type=Path, metavar="RUN", help="run directory")
    add(
        "--steps",
        type=_steps,
        default=(None, None),
        metavar="A:B",
        help="first and last step, counted from 1, or one step (default: from the newest "
        "checkpoint before B; to the last receipt)",
    )
    _add_set(add)
    _add_nproc(add)
    _add_device(add)


def _add_predict(commands: Commands) -> None:
    add = _add_command(
        commands,
        "predict",
        "commands.predict:main",
        help="segment images",
        description="Segment images of any size: writes label maps, colour maps and overlays.",
        epilog="example:\n  segtrain predict runs/own photos/ extra.jpg --output predictions",
    )
    add("source", metavar="RUN|CHECKPOINT", help=_SOURCE_HELP)
    add("inputs", nargs="+", type=Path, metavar="INPUT", help="image, or folder of images")
    add("--output", type=Path, required=True, metavar="DIR", help="where to write the results")
    _add_switch(add, "--overwrite", "replace results that are already there")
    _add_set(add)
    _add_device(add)


def _add_export(commands: Commands) -> None:
    add = _add_command(
        commands,
        "export",
        "commands.export:main",
        help="write a model for other programs",
        description="Write a trained model for other programs; the file is run and compared with "
        "the model before it gets its name.",
        epilog="example:\n  segtrain export runs/own --format onnx --output own.onnx --normalize "
        "--argmax",
    )
    add("source", metavar="RUN|CHECKPOINT", help=_SOURCE_HELP)
    add(
        "--format",
        required=True,
        choices=("onnx", "pt2", "torchscript", "safetensors"),
        help="pt2: torch.export, for images of more than model.output_stride px a side; "
        "safetensors: weights only",
    )
    add("--output", type=Path, required=True, metavar="FILE", help="file to write")
    _add_switch(add, "--overwrite", "replace a file that is already there")
    add(
        "--normalize",
        nargs="?",
        const="uint8",
        choices=("uint8", "float32"),
        help="the file takes RGB of 0..255, as bytes (default) or floats, and normalizes it itself",
    )
    _add_switch(add, "--argmax", "the file returns train ids instead of logits")
    _add_size(
        add, None, "write a file for images of this height and width only (default: any size)"
    )


def _add_convert(commands: Commands) -> None:
    add = _add_command(
        commands,
        "convert",
        "commands.convert:main",
        help="make a checkpoint of another program one of segtrain",
        description="Read weights of torchvision (DeepLabV3), semseg (PSPNet), mmsegmentation,\n"
        "segmentation_models.pytorch (both PSPNet, DeepLabV3, DeepLabV3+) or VainF (DeepLabV3,\n"
        "DeepLabV3+), which are told apart by their keys, and write a checkpoint for eval,\n"
        "predict, export and train.init_from. A key that finds no place is an error.",
        epilog="What a file cannot say, such as model.output_stride, is assumed by the defaults of "
        "its\nprogram and printed; --set changes it.\n\n"
        "examples:\n"
        "  segtrain convert deeplabv3_resnet50_coco.pth --classes voc --output v3.pt\n"
        "  segtrain convert pspnet_r50.pth --classes cityscapes --output psp.pt "
        "--set model.output_stride=16\n"
        "  segtrain convert theirs.pth --classes own.yaml --class-order theirs.yaml "
        "--output own.pt",
    )
    add("file", type=Path, metavar="FILE", help="a .pth, .pt or .safetensors file")
    add("--output", type=Path, required=True, metavar="FILE", help="checkpoint to write, a .pt")
    add("--classes", metavar="NAME|FILE", help="class file (default: the names in the file)")
    add(
        "--class-order",
        metavar="NAME|FILE|stored",
        help="class file in the order of the file's channels, or 'stored': the names in the file; "
        "channels move to the order of --classes, by name",
    )
    add("--entry", metavar="KEY", help="which state dict to read, where the file holds several")
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="PREFIX",
        help="leave out keys that begin so and are no part of the model; may be repeated",
    )
    _add_switch(add, "--overwrite", "replace a file that is already there")
    _add_set(add)


def _add_data(commands: Commands) -> None:
    actions = _group(commands.add_parser("data", help="make or check data sets"))
    add = _add_command(
        actions,
        "synth",
        "synthetic:main",
        help="draw a synthetic data set",
        description="Draw synthetic street scenes in the layout of Cityscapes.",
        epilog="example:\n  segtrain data synth data/street --num-train 200 --num-val 40",
    )
    add("root", type=Path, metavar="ROOT", help="directory to write to")
    add("--num-train", type=_positive, default=200, metavar="N", help="default: 200")
    add("--num-val", type=_positive, default=40, metavar="N", help="default: 40")
    _add_size(add, [256, 512], "height and width in pixels (default: 256 512)")
    add("--seed", type=_non_negative, default=0, metavar="S", help="default: 0")
    _add_jobs(add)
    add = _add_command(
        actions,
        "check",
        "commands.data:check",
        help="check every image and label of a config",
        description="Read both splits completely and report all that is wrong: missing or damaged "
        "files, sizes that differ, label values outside the class file; and class frequencies.",
        epilog="example:\n  segtrain data check own.yaml",
    )
    add("config", metavar="CONFIG", help=_CONFIG_HELP)
    _add_set(add)
    _add_jobs(add)
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add = _add_command(
        actions,
        "stats",
        "commands.data:stats",
        help="count the classes of a split, and print class weights for the loss",
        description="Read a split once: pixels and images of each class, size, mean and standard "
        "deviation\nof the images, and class weights by median frequency, inverse frequency and "
        "effective\nnumber, as lines to paste into a config.",
        epilog="examples:\n  segtrain data stats own.yaml\n"
        "  segtrain data stats own.yaml --split val --json stats.json",
    )
    add("config", metavar="CONFIG", help=_CONFIG_HELP)
    add("--split", metavar="S", help="split (default: data.train_split)")
    add(
        "--beta",
        type=_fraction_below_1,
        metavar="B",
        help="of the effective number of pixels (default: 1 - 1 / pixels of a mean class)",
    )
    _add_set(add)
    _add_jobs(add)
    add("--json", type=Path, metavar="FILE", help="write all numbers as JSON")


def _add_config(commands: Commands) -> None:
    actions = _group(commands.add_parser("config", help="list, copy or show configs"))
    _add_command(
        actions,
        "list",
        "commands.config:print_names",
        help="list the configs that come with segtrain",
    )
    add = _add_command(
        actions,
        "copy",
        "commands.config:copy",
        help="copy a config that comes with segtrain",
        description="Copy the config NAME to FILE, and say which lines to change.",
        epilog="example:\n  segtrain config copy own_data my.yaml",
    )
    add("name", metavar="NAME", help="a name from 'segtrain config list'")
    add("file", type=Path, metavar="FILE", help="a new file, such as my.yaml")
    add = _add_command(
        actions,
        "show",
        "commands.config:print_config",
        help="check a config and print it with all defaults",
        epilog="examples:\n  segtrain config show own.yaml --set train.lr=0.02\n"
        "  segtrain config show camvid_small",
    )
    add("config", metavar="CONFIG", help=_CONFIG_HELP)
    _add_set(add)
    add = _add_command(
        actions,
        "schema",
        "commands.config:write_schema",
        help="print the JSON Schema of configs, for editors",
        epilog="an editor with a YAML language server completes and checks a config that begins\n"
        "with '# yaml-language-server: $schema=schema.json' after\n"
        "  segtrain config schema --output schema.json",
    )
    add("--output", type=Path, metavar="FILE", help="default: the terminal")


def _add_set(add: Add) -> None:
    add("--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=_SET_HELP)


def _add_switch(add: Add, name: str, text: str) -> None:
    add(name, action="store_true", help=text)


def _add_nproc(add: Add) -> None:
    text = "processes on this machine (default: auto, one for each GPU, or one)"
    add("--nproc", type=_nproc, default="auto", metavar="N|auto", help=text)


def _add_device(add: Add) -> None:
    text = "auto: CUDA if there is any (default)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)


def _add_jobs(add: Add) -> None:
    add("--jobs", type=_positive, metavar="J", help="processes (default: one for each core)")


def _add_size(add: Add, default: list[int] | None, text: str) -> None:
    add("--size", nargs=2, type=_positive, default=default, metavar=("H", "W"), help=text)


def _positive(text: str) -> int:
    return _integer(text, least=1)


def _non_negative(text: str) -> int:
    return _integer(text, least=0)


def _integer(text: str, *, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got '{text}'")
    return int(text)


def _fraction_below_1(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0 and below 1: '{text}'")
    return value


def _steps(text: str) -> tuple[int | None, int | None]:
    first, colon, last = text.partition(":")
    if not colon:
        last = first  # one step
    steps = tuple(_positive(number) if number else None for number in (first, last))
    if None not in steps and steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"expected A up to B, got '{text}'")
    return steps


def _nproc(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got '{text}'")
    return text
