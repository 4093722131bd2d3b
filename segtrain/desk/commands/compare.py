"""`segtrain compare`: whether one model or recipe is better than another."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from typing import Any

from segtrain.desk.results.compare import Comparison, compare, comparison_lines
from segtrain.desk.results.joined_folds import evaluated_whole
from segtrain.desk.results.runs import differing_recipes
from segtrain.desk.results.steps import steps_lines
from segtrain.desk.results.tables import latex_table, markdown_table
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.run.division import named_runs
from segtrain.text import first_of


def main(args: argparse.Namespace) -> int:
    """Prints the comparison and returns the exit code.

    args: runs (of side A; or A and B), other (runs of side B), by, json, markdown and latex
        (files), device, steps. A run may be a directory of folds, but not with `steps`; one of
        seeds stands for its runs.

    Raises:
        UserError: runs that cannot be compared, or read.
    """
    a, b = list(dict.fromkeys(args.runs)), list(dict.fromkeys(args.other))
    files = {"--json": args.json, "--markdown": args.markdown, "--latex": args.latex}
    files = {option: file for option, file in files.items() if file}
    if args.steps:
        if len({*a, *b}) != 2 or args.by or files:
            raise ConfigError("--steps: expected two runs, without --by and files")
        if len(pair := named_runs([*a, *b])) != 2:
            raise ConfigError("--steps: expected two runs, and a directory of seeds has several")
        print(*steps_lines(*pair), sep="\n")
        return EXIT_OK
    if not b:
        if len(a) != 2:
            raise ConfigError("expected two runs, or several a side: compare A A2 --with B B2")
        a, b = a[:1], a[1:]
    # First what was named, then what it stands for: a directory of seeds holds several runs.
    _refuse_both(a, b)
    runs = [named_runs(side) for side in (a, b)]
    _refuse_both(*runs)
    # Before the scores are read: a missing one takes an evaluation, which may be long.
    for option, file in files.items():
        with os_errors_as(ConfigError, f"{option} {file}", "cannot be written"):
            check_output(file, _FORMS[option][0])
    device = device_for(args.device)
    sides = [[evaluated_whole(path, device) for path in side] for side in runs]
    for side in sides:
        different = set(differing_recipes([result.run.config for result in side])) - {"seed"}
        if different:
            raise ConfigError(
                f"{first_of(result.run.directory for result in side)}: runs of one side may "
                f"differ in their seed only, and these do in {first_of(sorted(different), 3)}"
            )
        seeds = Counter(result.run.config.seed for result in side)
        if again := [seed for seed, number in seeds.items() if number > 1]:
            raise ConfigError(
                f"{first_of(result.run.directory for result in side)}: several of one side have "
                f"seed {again[0]}, and would count as if they were independent: name one of them"
            )
    try:
        found = compare(*([result.records for result in side] for side in sides), by=args.by)
    except ConfigError as error:
        raise ConfigError(f"{first_of([*a, *b], 4)}: {error}") from None
    for line in comparison_lines(found, *([result.run for result in side] for side in sides)):
        print(line)
    folders = [path if path.is_dir() else path.parent for path in (a[0], b[0])]
    titles = [f"{x}: {path.resolve().name}" for x, path in zip("AB", folders, strict=True)]
    for option, file in files.items():
        with os_errors_as(ExecutionError, file, "the comparison cannot be written"):
            write_output(file, _FORMS[option][1](found, titles))
    return EXIT_OK


def _refuse_both(a: Sequence[Path], b: Sequence[Path]) -> None:
    places = [{path.resolve() for path in side} for side in (a, b)]
    if both := places[0] & places[1]:
        raise ConfigError(f"{first_of(both)}: on both sides")


def _json(found: Comparison, _: Sequence[str]) -> str:
    return json.dumps(_finite(asdict(found)), indent=2, allow_nan=False) + "\n"


# How a file of an option begins, and what makes it.
_FORMS = {
    "--json": ('{\n  "scores": ', _json),
    "--markdown": ("| IoU in %", markdown_table),
    "--latex": ("% IoU in %", latex_table),
}


def _finite(value: Any) -> Any:
    """`value` for JSON: NaN, which it does not have, is null."""
    if isinstance(value, dict):
        return {key: _finite(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(item) for item in value]
    return None if isinstance(value, float) and math.isnan(value) else value
