"""`segtrain config`: list, copy, show and schema; and the configs that other commands load."""

import argparse
import json
import os
from pathlib import Path

from segtrain.config import Config, config_schema, config_to_yaml, load_config, recipes
from segtrain.config.experiment import config_warnings, wrong_units
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.run.directory import CONFIG
from segtrain.text import say


def load_named(args: argparse.Namespace) -> Config:
    """The config that the command line names; `args.config` becomes the path of its file."""
    named = find_config(args.config)
    if named.note:
        say(named.note)
    args.config = str(named.path)
    return load_config(args.config, args.set)


def find_config(text: str) -> recipes.FoundConfig:
    """As `recipes.find`; of a folder the error also says what it holds, and what to do with it."""
    made = Path(text) / CONFIG  # of `segtrain init`
    try:
        return recipes.find(str(made) if made.is_file() else text)
    except ConfigError as error:
        if not os.path.isdir(text):
            raise
        from segtrain.data.read.recognize import with_recognized

        raise ConfigError(with_recognized(str(error), Path(text))) from None


def show_warnings(config: Config) -> None:
    """Writes a line to stderr for every option that probably does not do what is meant."""
    for line in (*config_warnings(config), *wrong_units(config)):
        say(f"warning: {line}")


def print_config(args: argparse.Namespace) -> int:
    """`segtrain config show`."""
    config = load_named(args)
    print(config_to_yaml(config), end="")
    show_warnings(config)
    return EXIT_OK


def print_names(_: argparse.Namespace) -> int:
    """`segtrain config list`."""
    names = recipes.names()
    for name in names:
        print(f"{name:{max(map(len, names))}}  {recipes.describe(name)}")
    return EXIT_OK


def copy(args: argparse.Namespace) -> int:
    """`segtrain config copy`."""
    for line in recipes.copy(args.name, args.file):
        print(line)
    return EXIT_OK


def write_schema(args: argparse.Namespace) -> int:
    """`segtrain config schema`."""
    text = json.dumps(config_schema(), indent=2) + "\n"
    if args.output is None:
        print(text, end="")
        return EXIT_OK
    with os_errors_as(ConfigError, f"--output {args.output}", "cannot be written"):
        check_output(args.output, '{\n  "$schema": ')
        write_output(args.output, text)
    return EXIT_OK
