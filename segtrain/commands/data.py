"""`segtrain data`: check, pack, stats."""

import argparse

from segtrain.commands.config import load_named
from segtrain.config.experiment import wrong_units
from segtrain.errors import ConfigError


def check(args: argparse.Namespace) -> int:
    """`segtrain data check`: refuses a wrong config before anything heavy is imported."""
    if found := wrong_units(load_named(args)):
        raise ConfigError("\n".join(found))
    from segtrain.commands import data_set

    return data_set.check(args)


def pack(args: argparse.Namespace) -> int:
    """`segtrain data pack`: refuses a wrong config before anything heavy is imported."""
    load_named(args)
    from segtrain.commands import data_set

    return data_set.pack(args)


def stats(args: argparse.Namespace) -> int:
    """`segtrain data stats`: refuses a wrong config before anything heavy is imported."""
    load_named(args)
    from segtrain.commands import data_set

    return data_set.stats(args)
