"""`segtrain data`: check, pack, stats."""

import argparse

from segtrain.commands.config import load_named
from segtrain.config.warnings import wrong_units
from segtrain.errors import ConfigError


def check(args: argparse.Namespace) -> int:
    """`segtrain data check`: refuses a wrong config before anything heavy is imported."""
    if found := wrong_units(load_named(args)):
        raise ConfigError("\n".join(found))
    from segtrain.commands import data_check

    return data_check.main(args)


def pack(args: argparse.Namespace) -> int:
    """`segtrain data pack`: refuses a wrong config before anything heavy is imported."""
    load_named(args)
    from segtrain.commands import data_pack

    return data_pack.main(args)


def stats(args: argparse.Namespace) -> int:
    """`segtrain data stats`: refuses a wrong config before anything heavy is imported."""
    load_named(args)
    from segtrain.commands import data_stats

    return data_stats.main(args)
