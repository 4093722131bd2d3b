"""The `segtrain` command: its arguments, and the function that runs each command.

Help and refused configs take a fraction of a second: the module of a command, which may import
torch, is imported when the command runs.
"""

import argparse
import sys
from collections.abc import Callable, Sequence
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
    module, name = args.command.split(":")
    return exit_code.run(lambda: getattr(import_module(f"segtrain.{module}"), name)(args))


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="segtrain", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"segtrain {__version__}")
    commands = _group(parser)
    _add_train(commands)
    _add_eval(commands)
    _add_predict(commands)
    _add_export(commands)
    _add_data(commands)
    _add_config(commands)
    text = "print versions, devices and memory, and what is wrong (exit code 2: cannot train)"
    _add_command(commands, "doctor", "commands.doctor:main", text)
    return parser


class _Parser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of its texts and takes no abbreviated options."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs, allow_abbrev=False)

    def parse_args(self, args: Sequence[str], namespace: None = None) -> argparse.Namespace:
        """As argparse's, but an unknown option is refused with an example of what to write."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            hint = ""
            if hasattr(found, "set"):
                from segtrain.commands.hints import instead_of

                hint = instead_of(unknown, args)
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found

    def error(self, message: str) -> NoReturn:
        """Exits with 2; the message may quote what was typed or pasted."""
        super().error(printable(message))


Commands = argparse._SubParsersAction
Add = Callable[..., Any]


def _group(parser: argparse.ArgumentParser) -> Commands:
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def _add_command(commands: Commands, name: str, function: str, text: str) -> Add:
    """Adds the command that `function` ("module:name") runs; returns its `add_argument`."""
    folded = argparse.HelpFormatter
    parser = commands.add_parser(name, help=text, description=text, formatter_class=folded)
    parser.set_defaults(command=function)
    return parser.add_argument


def _add_train(commands: Commands) -> None:
    parser = commands.add_parser(
        "train",
        help="train a model from a config",
        description="Train the experiment in CONFIG; evaluate and save checkpoints on the way.",
        epilog="examples:\n"
        "  segtrain train own.yaml --nproc 4 --set train.lr=0.02\n"
        "  segtrain train own.yaml --resume\n"
        "  segtrain train own.yaml --nnodes 2 --node-rank 0 --rdzv-endpoint host0:29400\n"
        "  torchrun --nproc-per-node 4 -m segtrain train own.yaml",
    )
    parser.set_defaults(command="commands.train.target:main")
    add = parser.add_argument
    add("config", metavar="CONFIG", help=f"{_CONFIG_HELP}; with --resume also the run's directory")
    _add_set(add)
    _add_nproc(add)
    _add_device(add)
    add("--output", type=Path, metavar="DIR", help="run directory (default: runs/<name of CONFIG>)")
    _add_switch(add, "--resume", "go on at the last checkpoint, on any number of ranks")
    _add_switch(add, "--accept-changes", "with --resume: even if config or data have changed since")
    _add_switch(add, "--requeue", "in a SLURM job: at SIGUSR1 save, requeue the job and stop")
    add = parser.add_argument_group("several machines (the same command on each)").add_argument
    add("--nnodes", type=_positive, default=1, metavar="N", help="machines")
    text = "number of this machine; 0 serves the meeting point"
    add("--node-rank", type=_non_negative, metavar="R", help=text)
    add("--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="meeting point on machine 0")
    add("--rdzv-id", metavar="ID", help="name of the job, where several meet at the same point")
    text = "start all ranks again this often after one failed (default: 0)"
    add("--max-restarts", type=_non_negative, default=0, metavar="N", help=text)


def _add_eval(commands: Commands) -> None:
    text = "score a trained model on a split: IoU of every class, mIoU, mAcc, aAcc"
    add = _add_command(commands, "eval", "commands.launch:evaluate", text)
    add("checkpoint", metavar="RUN|CHECKPOINT", help=_SOURCE_HELP)
    add("--split", metavar="S", help="split (default: data.eval_split)")
    _add_set(add)
    _add_nproc(add)
    _add_device(add)
    add("--save-predictions", type=Path, metavar="DIR", help="write label maps with raw ids")
    add("--json", type=Path, metavar="FILE", help="write all scores as JSON")
    text = "write pictures of image, label and prediction"
    add("--overlays", type=Path, metavar="DIR", help=text)
    add("--num-overlays", type=_positive, default=8, metavar="N", help="how many (default: 8)")


def _add_predict(commands: Commands) -> None:
    text = "segment images of any size: write label maps, colour maps and overlays"
    add = _add_command(commands, "predict", "commands.predict:main", text)
    add("source", metavar="RUN|CHECKPOINT", help=_SOURCE_HELP)
    add("inputs", nargs="+", type=Path, metavar="INPUT", help="image, or folder of images")
    add("--output", type=Path, required=True, metavar="DIR", help="where to write the results")
    _add_switch(add, "--overwrite", "replace results that are already there")
    _add_set(add)
    _add_device(add)


def _add_export(commands: Commands) -> None:
    text = "write a trained model for other programs; the file is run and compared with the model"
    add = _add_command(commands, "export", "commands.export:main", text)
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
    _add_size(add, None, "write a file for images of this size only (default: any size)")


def _add_data(commands: Commands) -> None:
    actions = _group(commands.add_parser("data", help="make or check data sets"))
    text = "draw synthetic street scenes in the layout of Cityscapes"
    add = _add_command(actions, "synth", "synthetic:main", text)
    add("root", type=Path, metavar="ROOT", help="directory to write to")
    add("--num-train", type=_positive, default=200, metavar="N", help="default: 200")
    add("--num-val", type=_positive, default=40, metavar="N", help="default: 40")
    _add_size(add, [256, 512], "height and width in pixels (default: 256 512)")
    add("--seed", type=_non_negative, default=0, metavar="S", help="default: 0")
    _add_jobs(add)
    text = (
        "read both splits completely; report missing or damaged files, sizes that differ, label "
        "values outside the class file, and class frequencies"
    )
    add = _add_command(actions, "check", "commands.data:check", text)
    add("config", metavar="CONFIG", help=_CONFIG_HELP)
    _add_set(add)
    _add_jobs(add)
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")


def _add_config(commands: Commands) -> None:
    actions = _group(commands.add_parser("config", help="list, copy or show configs"))
    text = "list the configs that come with segtrain"
    _add_command(actions, "list", "commands.config:print_names", text)
    text = "copy the config NAME to FILE, and say which lines to change"
    add = _add_command(actions, "copy", "commands.config:copy", text)
    add("name", metavar="NAME", help="a name from 'segtrain config list'")
    add("file", type=Path, metavar="FILE", help="a new file, such as my.yaml")
    text = "check a config and print it with all defaults"
    add = _add_command(actions, "show", "commands.config:print_config", text)
    add("config", metavar="CONFIG", help=_CONFIG_HELP)
    _add_set(add)
    text = (
        "print the JSON Schema of configs, for editors: a config that begins with "
        "'# yaml-language-server: $schema=schema.json' is completed and checked"
    )
    add = _add_command(actions, "schema", "commands.config:write_schema", text)
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
    if _non_negative(text) == 0:
        raise argparse.ArgumentTypeError("expected an integer above 0, got '0'")
    return int(text)


def _non_negative(text: str) -> int:
    if not text.isascii() or not text.isdigit():
        raise argparse.ArgumentTypeError(f"expected a non-negative integer, got '{text}'")
    return int(text)


def _nproc(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got '{text}'")
    return text
