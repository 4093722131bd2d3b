"""`segtrain compare`: whether one model or recipe is better than another."""

import argparse
import json
import math
from collections import Counter
from dataclasses import asdict
from pathlib import Path
from typing import Any

from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.results.compare import compare, comparison_lines
from segtrain.results.joined_folds import evaluated_whole
from segtrain.results.runs import differing_recipes
from segtrain.results.steps import steps_lines
from segtrain.run.division import named_runs
from segtrain.text import first_of


def main(args: argparse.Namespace) -> int:
    """Prints the comparison and returns the exit code.

    args: runs (of side A; or A and B), other (runs of side B), by, json (a file), device, steps. A
        run may be a directory of folds, but not with `steps`.

    Raises:
        UserError: runs that cannot be compared, or read.
    """
    a, b = list(dict.fromkeys(args.runs)), list(dict.fromkeys(args.other))
    if args.steps:
        if len({*a, *b}) != 2 or args.by or args.json:
            raise ConfigError("--steps: expected two runs, without --by and --json")
        print(*steps_lines(*named_runs([*a, *b])), sep="\n")
        return EXIT_OK
    if not b:
        if len(a) != 2:
            raise ConfigError("expected two runs, or several a side: compare A A2 --with B B2")
        a, b = a[:1], a[1:]
    places = [{path.resolve() for path in side} for side in (a, b)]
    if both := places[0] & places[1]:
        raise ConfigError(f"{first_of(both)}: on both sides")
    if args.json:
        with os_errors_as(ConfigError, f"--json {args.json}", "cannot be written"):
            check_output(args.json, '{\n  "scores": ')
    device = device_for(args.device)
    sides = [[evaluated_whole(path, device) for path in named_runs(side)] for side in (a, b)]
    for side in sides:
        different = set(differing_recipes([one.run.config for one in side])) - {"seed"}
        if different:
            raise ConfigError(
                f"{first_of(one.run.directory for one in side)}: runs of one side may differ in "
                f"their seed only, and these do in {first_of(sorted(different), 3)}"
            )
        seeds = Counter(one.run.config.seed for one in side)
        if again := [seed for seed, number in seeds.items() if number > 1]:
            raise ConfigError(
                f"{first_of(one.run.directory for one in side)}: several of one side have seed "
                f"{again[0]}, and would count as if they were independent: name one of them"
            )
    try:
        found = compare(*([one.records for one in side] for side in sides), by=args.by)
    except ConfigError as error:
        raise ConfigError(f"{first_of([*a, *b], 4)}: {error}") from None
    for line in comparison_lines(found, *([one.run for one in side] for side in sides)):
        print(line)
    if args.json:
        with os_errors_as(ExecutionError, args.json, "the comparison cannot be written"):
            content = json.dumps(_finite(asdict(found)), indent=2, allow_nan=False) + "\n"
            write_output(Path(args.json), content)
    return EXIT_OK


def _finite(value: Any) -> Any:
    """`value` for JSON: NaN, which it does not have, is null."""
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and math.isnan(value) else value
