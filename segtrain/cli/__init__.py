"""The `segtrain` command: its arguments, and the function that runs each command.

Help and refused configs take a fraction of a second: the module of a command, which may import
torch, is imported when the command runs.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from contextlib import suppress
from functools import partial

from segtrain import __version__
from segtrain.cli.arguments import (
    add_bench,
    add_config,
    add_convert,
    add_data,
    add_eval,
    add_export,
    add_population,
    add_predict,
    add_train,
    add_verify,
)
from segtrain.cli.common import Parser, add_command, group
from segtrain.commands import exit_code
from segtrain.errors import ConfigError, UserError

_DESCRIPTION = """\
Semantic segmentation training whose result does not depend on the number of devices.

  segtrain config copy own_data own.yaml     a config to begin with; `config list` names more
  segtrain data check own.yaml               is the data what the config says?
  segtrain train own.yaml                    train, evaluate, save checkpoints to runs/own
  segtrain eval runs/own                     IoU of every class
  segtrain predict runs/own photos/ --output predictions
  segtrain export runs/own --format onnx --output model.onnx
  segtrain convert model.pth --output model.pt   a checkpoint of another program
"""
_EPILOG = """\
exit codes: 0 done, 1 internal error, 2 command line or config, 3 data, 4 checkpoint,
5 non-finite loss, 6 a process or the system failed, 130 interrupted, 143 terminated
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: that of the process) and returns the exit code."""
    exit_code.repair_stdio()
    # Read when torch is loaded. Threads of OpenMP that spin while they wait take the cores from
    # other programs: a step of two threads beside a busy machine took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(argv)
    args.argv = argv  # the launcher starts the same command once more for each rank
    return exit_code.run(partial(_run, args))


def _run(args: argparse.Namespace) -> int:
    """Runs the command; an error about an option says where it is written."""
    try:
        return args.command(args)
    except UserError as error:
        named = (getattr(args, key, None) for key in ("config", "checkpoint", "source", "run"))
        if source := next(filter(None, named), None):
            from segtrain.config import recipes
            from segtrain.config.loading import with_places

            with suppress(ConfigError):
                source = recipes.find(str(source)).path
            error.args = (with_places(str(error), str(source), getattr(args, "set", ())),)
        raise


def _parser() -> argparse.ArgumentParser:
    parser = Parser(prog="segtrain", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"segtrain {__version__}")
    commands = group(parser)
    add_train(commands)
    add_population(commands)
    add_bench(commands)
    add_eval(commands)
    add_verify(commands)
    add_predict(commands)
    add_export(commands)
    add_convert(commands)
    add_data(commands)
    add_config(commands)
    add_command(
        commands,
        "doctor",
        "commands.doctor:main",
        help="look at this machine and installation",
        description="Print versions, devices and memory, and what is wrong with them. Exit code 2 "
        "if nothing can be trained, else 0.",
    )
    return parser
