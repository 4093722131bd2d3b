"""`segtrain data`: check, pack, stats. A wrong config is refused before heavy imports."""

import argparse
from functools import partial
from importlib import import_module

from segtrain.commands.config import load_named
from segtrain.config.experiment import wrong_units
from segtrain.errors import ConfigError


def _run(name: str, args: argparse.Namespace) -> int:
    found = wrong_units(load_named(args))
    if name == "check" and found:
        raise ConfigError("\n".join(found))
    return getattr(import_module("segtrain.commands.data_set"), name)(args)


check, pack, stats = (partial(_run, name) for name in ("check", "pack", "stats"))
