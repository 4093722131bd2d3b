"""What the arguments of several commands share: the parser, types of values, common options."""

import argparse
from collections.abc import Callable, Sequence
from importlib import import_module
from typing import Any, NoReturn

from segtrain.text import printable

CONFIG_HELP = "experiment file (YAML), or a name from 'segtrain config list'"
SOURCE_HELP = (
    "run directory (its best checkpoint), checkpoint, exported .safetensors file, or the name of a "
    "config that comes with weights"
)

Commands = argparse._SubParsersAction
Add = Callable[..., Any]


class Parser(argparse.ArgumentParser):
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


def lazily(place: str) -> Callable[[argparse.Namespace], int]:
    """The function `module:name` of segtrain, whose module is imported when it is called."""
    module, name = place.split(":")

    def call(args: argparse.Namespace) -> int:
        return getattr(import_module(f"segtrain.{module}"), name)(args)

    return call


def group(parser: argparse.ArgumentParser) -> Commands:
    """Adds a group of commands to `parser`."""
    return parser.add_subparsers(title="commands", metavar="COMMAND", required=True)


def add_command(commands: Commands, name: str, function: str, **texts: str) -> Add:
    """Adds the command that `function` ("module:name") runs; returns its `add_argument`."""
    parser = commands.add_parser(name, **texts)
    parser.set_defaults(command=lazily(function))
    return parser.add_argument


def add_set(
    add: Add,
    examples: str = "train.lr=1e-3, augment.crop_size='[512, 1024]', model.pretrained=null",
) -> None:
    """Adds --set; `examples`: options that the command uses."""
    text = "change one option, checked like the file; may be repeated, the last one counts"
    metavar = "SECTION.KEY=VALUE"
    add("--set", action="append", default=[], metavar=metavar, help=f"{text} ({examples})")


def add_switch(add: Add, name: str, text: str) -> None:
    """Adds an option without a value."""
    add(name, action="store_true", help=text)


def add_nproc(add: Add) -> None:
    """Adds --nproc."""
    text = "processes on this machine (default: auto, one for each GPU, or one)"
    add("--nproc", type=_nproc, default="auto", metavar="N|auto", help=text)


def add_device(add: Add) -> None:
    """Adds --device."""
    text = "auto: CUDA if there is any (default)"
    add("--device", choices=("auto", "cpu", "cuda"), default="auto", help=text)


def add_jobs(add: Add) -> None:
    """Adds --jobs."""
    add("--jobs", type=positive, metavar="J", help="processes (default: one for each core)")


def add_size(add: Add, default: list[int] | None, text: str) -> None:
    """Adds --size, in pixels."""
    add("--size", nargs=2, type=positive, default=default, metavar=("H", "W"), help=text)


def positive(text: str) -> int:
    """An integer of at least 1."""
    return _integer(text, least=1)


def non_negative(text: str) -> int:
    """An integer of at least 0."""
    return _integer(text, least=0)


def _integer(text: str, *, least: int) -> int:
    if not text.isascii() or not text.isdigit() or int(text) < least:
        raise argparse.ArgumentTypeError(f"expected an integer of at least {least}, got '{text}'")
    return int(text)


def fraction_below_1(text: str) -> float:
    """A number of at least 0 and below 1."""
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"expected a number of at least 0 and below 1: '{text}'")
    return value


def steps(text: str) -> tuple[int | None, int | None]:
    """First and last step of `A:B`, each None where it is left out; `A` is one step."""
    first, colon, last = text.partition(":")
    if not colon:
        last = first  # one step
    steps = tuple(positive(number) if number else None for number in (first, last))
    if None not in steps and steps[0] > steps[1]:
        raise argparse.ArgumentTypeError(f"expected A up to B, got '{text}'")
    return steps


def _nproc(text: str) -> int | str:
    return text if text == "auto" else positive(text)


def endpoint(text: str) -> str:
    """HOST:PORT, checked."""
    host, _, port = text.rpartition(":")
    if not host or not port.isdigit() or not 0 < int(port) < 65536:
        raise argparse.ArgumentTypeError(f"expected HOST:PORT, got '{text}'")
    return text
