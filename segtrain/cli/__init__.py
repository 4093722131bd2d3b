"""The `segtrain` command: the parser of its table of commands, and the function that runs one.

Help and refused configs take a fraction of a second: the module of a command, which may import
torch, is imported when the command runs.
"""

import argparse
import gc
import os
import re
import sys
from collections.abc import Sequence
from typing import NoReturn

from segtrain import __version__
from segtrain.cli.table import COMMANDS, GROUPS
from segtrain.commands import exit_code
from segtrain.text import printable

_DESCRIPTION = """\
Semantic segmentation training whose result does not depend on the number of devices.

  segtrain init my_data --output own         a config for your images; `config list` names recipes
  segtrain data check own                    is the data what the config says?
  segtrain train own                         train, evaluate, save checkpoints to runs/own
  segtrain eval runs/own                     IoU of every class
  segtrain predict runs/own photos/ --output predictions
  segtrain export runs/own --format onnx --output model.onnx
  segtrain convert model.pth --output model.pt   a checkpoint of another program
"""
_EPILOG = """\
exit codes: 0 done, 1 internal error, 2 command line or config, 3 data, 4 checkpoint,
5 non-finite loss, 6 a process or the system failed, 7 out of memory, 130 interrupted,
141 nobody reads the output, 143 terminated
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs the command line `argv` (None: that of the process) and returns the exit code."""
    exit_code.repair_stdio()
    # Read when torch is loaded. Threads of OpenMP that spin while they wait take the cores from
    # other programs: a step of two threads beside a busy machine took ten times as long.
    os.environ.setdefault("OMP_WAIT_POLICY", "PASSIVE")
    # What torch's import makes stays: to search it for garbage again and again took a fifth of it.
    gc.set_threshold(50_000)
    argv = sys.argv[1:] if argv is None else list(argv)
    args = _parser().parse_args(argv)
    args.argv = argv  # the launcher starts the same command once more for each rank
    return exit_code.run(args.function, args)


class _Parser(argparse.ArgumentParser):
    """A parser that keeps the line breaks of its texts and takes no abbreviated options."""

    def __init__(self, **kwargs) -> None:
        kwargs.setdefault("formatter_class", argparse.RawDescriptionHelpFormatter)
        super().__init__(**kwargs, allow_abbrev=False)

    def parse_known_args(
        self, args: Sequence[str] | None = None, namespace: argparse.Namespace | None = None
    ) -> tuple[argparse.Namespace, list[str]]:
        """As argparse's `parse_args`: the parser of the command refuses, with its own usage."""
        found, unknown = super().parse_known_args(args, namespace)
        if unknown:
            from segtrain.commands.hints import instead_of

            hint = instead_of(unknown, [*self.prog.split()[1:], *(args or ())])
            self.error(f"unrecognized arguments: {' '.join(unknown)}{hint}")
        return found, []

    def error(self, message: str) -> NoReturn:
        """Exits with 2; the message may quote what was typed or pasted."""
        if unknown := re.match(r"argument COMMAND: invalid choice: '(.*)' \(choose from ", message):
            from segtrain.config.messages import nearest

            commands = [command.name for command in COMMANDS]
            group = " ".join([*self.prog.split()[1:], unknown[1]])
            if near := nearest(group, commands):
                message = f"no command {unknown[1]}; did you mean {near}?"
        super().error(printable(message))


def _parser() -> argparse.ArgumentParser:
    """The parser of the whole table."""
    parser = _Parser(prog="segtrain", description=_DESCRIPTION, epilog=_EPILOG)
    parser.add_argument("--version", action="version", version=f"segtrain {__version__}")
    listed = {"title": "commands", "metavar": "COMMAND", "required": True}
    parents = {"": parser.add_subparsers(**listed)}
    for command in COMMANDS:
        group, _, name = command.name.rpartition(" ")
        if group not in parents:
            of_group = parents[""].add_parser(group, help=GROUPS[group])
            parents[group] = of_group.add_subparsers(**listed)
        of_command = parents[group].add_parser(name, **command.texts)
        of_command.set_defaults(function=command.function)
        groups = {"": of_command}
        for argument in command.arguments:
            if argument.group not in groups:
                groups[argument.group] = of_command.add_argument_group(argument.group)
            groups[argument.group].add_argument(argument.name, **argument.options)
    return parser
