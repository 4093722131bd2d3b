"""The `segtrain` command: parses arguments and hands them to one module.

Nothing heavy is imported before it is needed: help and refused configs take a fraction of a second.
"""

import argparse
import errno
import io
import json
import os
import select
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, NoReturn

from segtrain import __version__
from segtrain.distributed import signals
from segtrain.distributed.exit_status import is_first_to_print, write_exit_status
from segtrain.distributed.launcher_folder import has_launcher
from segtrain.errors import (
    EXIT_INTERNAL,
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_PIPE,
    EXIT_SYSTEM,
    EXIT_TERMINATED,
    ConfigError,
    LostRanksError,
    UserError,
)
from segtrain.text import printable, printable_lines

if TYPE_CHECKING:
    from segtrain.config import Config

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
    _replace_closed_streams()
    argv = sys.argv[1:] if argv is None else list(argv)
    if isinstance(sys.stdout, io.TextIOWrapper):
        # Names of classes and files may hold letters that the terminal's language lacks.
        sys.stdout.reconfigure(errors="backslashreplace")
    args = _parser().parse_args(argv)
    args.argv = argv  # the launcher starts the same command once more for each rank
    return _run_as_rank(args) if has_launcher() else _run(args)


def _replace_closed_streams() -> None:
    """Opens /dev/null as every standard stream that is closed, as by `>&-`.

    Otherwise the next file to be opened, a checkpoint say, gets the number of stdout, and whatever
    is printed is written into it.
    """
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            # The lowest free number, which is this one; the ranks inherit it.
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)
    for name, mode in (("stdin", "r"), ("stdout", "w"), ("stderr", "w")):
        if getattr(sys, name) is None:  # Python found it closed at its start
            number = ("stdin", "stdout", "stderr").index(name)
            setattr(sys, name, open(number, mode, closefd=False))  # noqa: SIM115


def _run(args: argparse.Namespace) -> int:
    try:
        code = args.handler(args)
        sys.stdout.flush()
        return code
    except UserError as error:
        _show(str(error))
        return error.exit_code
    except KeyboardInterrupt:
        _show("interrupted")
        return EXIT_INTERRUPTED
    except BrokenPipeError:
        if not _stdout_is_closed():
            raise
        # Not success: what was to be printed may have been that something failed.
        return EXIT_PIPE
    except OSError as error:
        # What concerns a file or a connection has its name, or another number.
        written = error.filename is None and error.errno in (errno.ENOSPC, errno.EDQUOT, errno.EIO)
        problem = _stdout_problem() if written else None
        if problem is None:
            raise
        _show(f"standard output: {problem}")
        return EXIT_SYSTEM


def _run_as_rank(args: argparse.Namespace) -> int:
    """The same in a rank of the launcher: what all ranks have to say is said once."""
    signals.follow_launcher()
    code, consequence = EXIT_INTERNAL, False
    try:
        code = args.handler(args)
        sys.stdout.flush()
    except UserError as error:
        code, consequence = error.exit_code, isinstance(error, LostRanksError)
        if not consequence and is_first_to_print(str(error)):
            _show(str(error))
    finally:
        write_exit_status(code, consequence=consequence)
    # Having stopped when asked to is no failure: torch elastic must not start the ranks again.
    return EXIT_OK if code in (EXIT_INTERRUPTED, EXIT_TERMINATED) else code


def _show(message: str) -> None:
    for line in printable_lines(message):
        print(f"segtrain: {line}", file=sys.stderr)


def _stdout_is_closed() -> bool:
    """Whether the reader of stdout has gone, as in `segtrain config show FILE | head -1`.

    If so, stdout is pointed at nothing, or Python would complain once more at exit.
    """
    poll = select.poll()
    poll.register(sys.stdout.fileno(), 0)
    closed = any(event & (select.POLLERR | select.POLLHUP) for _, event in poll.poll(0))
    if closed:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return closed


def _stdout_problem() -> str | None:
    """Why stdout takes nothing any more, if so; it is pointed at nothing then, as above."""
    try:
        # Flushing would not tell: what could not be written may have been given up.
        os.write(sys.stdout.fileno(), b"\n")
    except OSError as error:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return (error.strerror or str(error)).lower()
    return None


def _load_config(args: argparse.Namespace) -> "Config":
    """The config that the command line names; `args.config` becomes the path of its file."""
    from segtrain.config import load_config, recipes

    found = recipes.find(args.config)
    if found.note:
        _show(found.note)
    args.config = str(found.path)
    return load_config(args.config, args.set)


def _train(args: argparse.Namespace) -> int:
    from segtrain.commands.train.target import train_target
    from segtrain.config import load_config
    from segtrain.run.directory import has_lost_config

    target = train_target(args.config, resume=args.resume, output=args.output)
    args.output = target.directory
    if target.note and "RANK" not in os.environ:  # once, not for every rank
        _show(target.note)
    if args.resume and target.is_own and has_lost_config(target.directory):
        from segtrain.checkpoint.recovery import restore_config

        for line in restore_config(target.directory):
            _show(line)
    config = load_config(target.config, args.set)
    if "RANK" not in os.environ:  # once, not for every rank
        _print_warnings(config)
    from segtrain.commands import launch

    return launch.train(args, config)


def _eval(args: argparse.Namespace) -> int:
    from segtrain.commands import launch

    return launch.evaluate(args)


def _predict(args: argparse.Namespace) -> int:
    from segtrain.commands import predict

    return predict.main(args)


def _export(args: argparse.Namespace) -> int:
    from segtrain import export

    return export.main(args)


def _doctor(_: argparse.Namespace) -> int:
    from segtrain.commands import doctor

    return doctor.main()


def _data_synth(args: argparse.Namespace) -> int:
    from segtrain import synthetic

    return synthetic.main(args)


def _data_check(args: argparse.Namespace) -> int:
    from segtrain.config.warnings import wrong_units

    config = _load_config(args)  # refused before anything heavy is imported
    if found := wrong_units(config):
        raise ConfigError("\n".join(found))
    from segtrain.commands import data_check

    return data_check.main(args)


def _config_show(args: argparse.Namespace) -> int:
    from segtrain.config import config_to_yaml
    from segtrain.config.warnings import wrong_units

    config = _load_config(args)
    print(config_to_yaml(config), end="")
    _print_warnings(config)
    for line in wrong_units(config):
        print(f"segtrain: warning: {line}", file=sys.stderr)
    return EXIT_OK


def _config_list(_: argparse.Namespace) -> int:
    from segtrain.config import recipes

    names = recipes.names()
    for name in names:
        print(f"{name:{max(map(len, names))}}  {recipes.describe(name)}")
    return EXIT_OK


def _config_copy(args: argparse.Namespace) -> int:
    from segtrain.config import recipes

    for line in recipes.copy(args.name, args.file):
        print(line)
    return EXIT_OK


def _config_schema(args: argparse.Namespace) -> int:
    from segtrain.config import config_schema
    from segtrain.files import reserve_output, write_output

    text = json.dumps(config_schema(), indent=2) + "\n"
    if args.output is None:
        print(text, end="")
        return EXIT_OK
    try:
        with reserve_output(args.output):
            write_output(args.output, text)
    except OSError as error:
        raise ConfigError(f"--output {args.output}: {(error.strerror or '').lower()}") from None
    return EXIT_OK


def _print_warnings(config: object) -> None:
    from segtrain.config.warnings import config_warnings

    for line in config_warnings(config):
        print(f"segtrain: warning: {printable(line)}", file=sys.stderr)


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="segtrain", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"segtrain {__version__}")
    commands = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    _add_train(commands)
    _add_eval(commands)
    _add_predict(commands)
    _add_export(commands)
    _add_data(commands)
    _add_config(commands)
    _add_doctor(commands)
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


def _add_train(commands: argparse._SubParsersAction) -> None:
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
    parser.add_argument(
        "config", metavar="CONFIG", help=f"{_CONFIG_HELP}; with --resume also the run's directory"
    )
    _add_set(parser)
    _add_nproc(parser)
    _add_device(parser)
    parser.add_argument(
        "--output", type=Path, metavar="DIR", help="run directory (default: runs/<name of CONFIG>)"
    )
    parser.add_argument(
        "--resume", action="store_true", help="go on at the last checkpoint, on any number of ranks"
    )
    parser.add_argument(
        "--accept-changes",
        action="store_true",
        help="with --resume: go on although config or data have changed since",
    )
    parser.add_argument(
        "--requeue",
        action="store_true",
        help="in a SLURM job: at SIGUSR1 save, requeue the job and stop (without: save and go on)",
    )
    group = parser.add_argument_group("several machines (the same command on each)")
    group.add_argument("--nnodes", type=_positive, default=1, metavar="N", help="machines")
    group.add_argument(
        "--node-rank",
        type=_non_negative,
        metavar="R",
        help="number of this machine; 0 serves the meeting point",
    )
    group.add_argument(
        "--rdzv-endpoint", type=_endpoint, metavar="HOST:PORT", help="meeting point on machine 0"
    )
    group.add_argument(
        "--rdzv-id", metavar="ID", help="name of the job, where several meet at the same point"
    )
    group.add_argument(
        "--max-restarts",
        type=_non_negative,
        default=0,
        metavar="N",
        help="start all ranks again this often after one failed (default: 0)",
    )
    parser.set_defaults(handler=lambda args: _train(_consistent_nodes(parser, args)))


def _consistent_nodes(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> argparse.Namespace:
    if args.nnodes > 1 and args.rdzv_endpoint is None:
        parser.error("--nnodes: several machines need --rdzv-endpoint HOST:PORT")
    if args.node_rank is not None and args.node_rank >= args.nnodes:
        parser.error(f"--node-rank: expected less than --nnodes, {args.nnodes}")
    return args


def _add_eval(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "eval",
        help="score a model on a split",
        description="Score a trained model: IoU of every class, mIoU, mAcc, aAcc.",
        epilog="examples:\n"
        "  segtrain eval runs/own\n"
        "  segtrain eval runs/own --set eval.scales='[0.75, 1, 1.25]' --set eval.flip=true\n"
        "  segtrain eval runs/own/checkpoints/last.pt --split test --save-predictions out",
    )
    parser.add_argument("checkpoint", metavar="RUN|CHECKPOINT", help=_SOURCE_HELP)
    parser.add_argument("--split", metavar="S", help="split (default: data.eval_split)")
    _add_set(parser)
    _add_nproc(parser)
    _add_device(parser)
    parser.add_argument(
        "--save-predictions", type=Path, metavar="DIR", help="write label maps with raw ids"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write all scores as JSON")
    parser.add_argument(
        "--overlays", type=Path, metavar="DIR", help="write pictures of image, label and prediction"
    )
    parser.add_argument(
        "--num-overlays", type=_positive, default=8, metavar="N", help="how many (default: 8)"
    )
    parser.set_defaults(handler=_eval)


def _add_predict(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "predict",
        help="segment images",
        description="Segment images of any size: writes label maps, colour maps and overlays.",
        epilog="example:\n  segtrain predict runs/own photos/ extra.jpg --output predictions",
    )
    _add_source(parser)
    parser.add_argument(
        "inputs", nargs="+", type=Path, metavar="INPUT", help="image, or folder of images"
    )
    parser.add_argument(
        "--output", type=Path, required=True, metavar="DIR", help="where to write the results"
    )
    parser.add_argument(
        "--overwrite", action="store_true", help="replace results that are already there"
    )
    _add_set(parser)
    _add_device(parser)
    parser.set_defaults(handler=_predict)


def _add_export(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "export",
        help="write a model for other programs",
        description="Write a trained model for other programs; the file is run and compared with "
        "the model before it gets its name.",
        epilog="example:\n  segtrain export runs/own --format onnx --output own.onnx --normalize "
        "--argmax",
    )
    _add_source(parser)
    parser.add_argument(
        "--format",
        required=True,
        choices=("onnx", "pt2", "torchscript", "safetensors"),
        help="pt2: torch.export, for images of more than model.output_stride px a side; "
        "safetensors: weights only",
    )
    parser.add_argument("--output", type=Path, required=True, metavar="FILE", help="file to write")
    parser.add_argument(
        "--overwrite", action="store_true", help="replace a file that is already there"
    )
    parser.add_argument(
        "--normalize",
        nargs="?",
        const="uint8",
        choices=("uint8", "float32"),
        help="the file takes RGB of 0..255, as bytes (default) or floats, and normalizes it itself",
    )
    parser.add_argument(
        "--argmax", action="store_true", help="the file returns train ids instead of logits"
    )
    parser.add_argument(
        "--size",
        nargs=2,
        type=_positive,
        metavar=("H", "W"),
        help="write a file for images of this height and width only (default: any size)",
    )
    parser.set_defaults(handler=_export)


def _add_data(commands: argparse._SubParsersAction) -> None:
    group = commands.add_parser("data", help="make or check data sets")
    actions = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    synth = actions.add_parser(
        "synth",
        help="draw a synthetic data set",
        description="Draw synthetic street scenes in the layout of Cityscapes.",
        epilog="example:\n  segtrain data synth data/street --num-train 200 --num-val 40",
    )
    synth.add_argument("root", type=Path, metavar="ROOT", help="directory to write to")
    synth.add_argument("--num-train", type=_positive, default=200, metavar="N", help="default: 200")
    synth.add_argument("--num-val", type=_positive, default=40, metavar="N", help="default: 40")
    synth.add_argument(
        "--size",
        nargs=2,
        type=_positive,
        default=[256, 512],
        metavar=("H", "W"),
        help="height and width in pixels (default: 256 512)",
    )
    synth.add_argument("--seed", type=_non_negative, default=0, metavar="S", help="default: 0")
    _add_jobs(synth)
    synth.set_defaults(handler=_data_synth)
    check = actions.add_parser(
        "check",
        help="check every image and label of a config",
        description="Read both splits completely and report all that is wrong: missing or damaged "
        "files, sizes that differ, label values outside the class file; and class frequencies.",
        epilog="example:\n  segtrain data check own.yaml",
    )
    check.add_argument("config", metavar="CONFIG", help=_CONFIG_HELP)
    _add_set(check)
    _add_jobs(check)
    check.add_argument("--json", type=Path, metavar="FILE", help="write the report as JSON")
    check.set_defaults(handler=_data_check)


def _add_config(commands: argparse._SubParsersAction) -> None:
    group = commands.add_parser("config", help="list, copy or show configs")
    actions = group.add_subparsers(title="commands", metavar="COMMAND", required=True)
    listing = actions.add_parser("list", help="list the configs that come with segtrain")
    listing.set_defaults(handler=_config_list)
    copy = actions.add_parser(
        "copy",
        help="copy a config that comes with segtrain",
        description="Copy the config NAME to FILE, and say which lines to change.",
        epilog="example:\n  segtrain config copy own_data my.yaml",
    )
    copy.add_argument("name", metavar="NAME", help="a name from 'segtrain config list'")
    copy.add_argument("file", type=Path, metavar="FILE", help="a new file, such as my.yaml")
    copy.set_defaults(handler=_config_copy)
    show = actions.add_parser(
        "show",
        help="check a config and print it with all defaults",
        epilog="examples:\n  segtrain config show own.yaml --set train.lr=0.02\n"
        "  segtrain config show camvid_small",
    )
    show.add_argument("config", metavar="CONFIG", help=_CONFIG_HELP)
    _add_set(show)
    show.set_defaults(handler=_config_show)
    schema = actions.add_parser(
        "schema",
        help="print the JSON Schema of configs, for editors",
        epilog="an editor with a YAML language server completes and checks a config that begins\n"
        "with '# yaml-language-server: $schema=schema.json' after\n"
        "  segtrain config schema --output schema.json",
    )
    schema.add_argument("--output", type=Path, metavar="FILE", help="default: the terminal")
    schema.set_defaults(handler=_config_schema)


def _add_doctor(commands: argparse._SubParsersAction) -> None:
    parser = commands.add_parser(
        "doctor",
        help="look at this machine and installation",
        description="Print versions, devices and memory, and what is wrong with them. Exit code 2 "
        "if nothing can be trained, else 0.",
    )
    parser.set_defaults(handler=_doctor)


def _add_source(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("source", metavar="RUN|CHECKPOINT", help=_SOURCE_HELP)


def _add_set(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--set", action="append", default=[], metavar="SECTION.KEY=VALUE", help=_SET_HELP
    )


def _add_nproc(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--nproc",
        type=_nproc,
        default="auto",
        metavar="N|auto",
        help="processes on this machine (default: auto, one for each GPU, or one)",
    )


def _add_device(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--device",
        choices=("auto", "cpu", "cuda"),
        default="auto",
        help="auto: CUDA if there is any (default)",
    )


def _add_jobs(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--jobs", type=_positive, metavar="J", help="processes (default: one for each core)"
    )


def _positive(text: str) -> int:
    return _integer(text, least=1)


def _non_negative(text: str) -> int:
    return _integer(text, least=0)


def _integer(text: str, *, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got '{text}'")
    return int(text)


def _nproc(text: str) -> int | str:
    return text if text == "auto" else _positive(text)


def _endpoint(text: str) -> str:
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got '{text}'")
    return text
