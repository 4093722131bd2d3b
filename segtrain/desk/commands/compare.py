"""`segtrain compare`: whether one model or recipe is better than another."""

import argparse
import json
import math
from collections import Counter
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path
from string import ascii_uppercase
from typing import Any

from segtrain.desk.results.compare import Comparison, compare, comparison_lines
from segtrain.desk.results.evaluated import Evaluated
from segtrain.desk.results.joined_folds import evaluated_whole
from segtrain.desk.results.on_list import evaluations_on
from segtrain.desk.results.runs import differing_recipes
from segtrain.desk.results.steps import steps_lines
from segtrain.desk.results.tables import latex_table, markdown_table, several_lines
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.run.division import named_runs
from segtrain.text import first_of


def main(args: argparse.Namespace) -> int:
    """Prints the comparison and returns the exit code.

    args: runs (a side each; or, with `other`, those of side A), other (runs of side B), on (a list
        or split), by, json, markdown and latex (files), set, device, steps. A run may be a
        directory of folds or of scored label maps, but not with `steps`; one of seeds stands for
        its runs.

    Raises:
        UserError: runs that cannot be compared, or read.
    """
    files = {"--json": args.json, "--markdown": args.markdown, "--latex": args.latex}
    files = {option: file for option, file in files.items() if file}
    if args.steps:
        pair = {*args.runs, *args.other}
        if len(pair) != 2 or args.by or files or args.on:
            raise ConfigError("--steps: expected two runs, without --by, --on and files")
        if len(pair := named_runs(dict.fromkeys([*args.runs, *args.other]))) != 2:
            raise ConfigError("--steps: expected two runs, and a directory of seeds has several")
        print(*steps_lines(*pair), sep="\n")
        return EXIT_OK
    named = [args.runs, args.other] if args.other else [[path] for path in args.runs]
    named = [list(dict.fromkeys(side)) for side in named]
    if not 1 < len(named) <= len(ascii_uppercase):
        raise ConfigError("expected two runs, or several a side: compare A A2 --with B B2")
    # First what was named, then what it stands for: a directory of seeds holds several runs.
    _refuse_both(named)
    runs = [named_runs(side) for side in named]
    _refuse_both(runs)
    # Before the scores are read: a missing one takes an evaluation, which may be long.
    for option, file in files.items():
        with os_errors_as(ConfigError, f"{option} {file}", "cannot be written"):
            check_output(file, _FORMS[option][0])
    sides = _sides(args, runs)
    first, *others = [[result.records for result in side] for side in sides]
    try:
        found = [compare(first, other, by=args.by) for other in others]
    except ConfigError as error:
        raise ConfigError(f"{first_of((x for side in named for x in side), 4)}: {error}") from None
    of_sides = [[result.run for result in side] for side in sides]
    lines = several_lines(found, of_sides) if others[1:] else comparison_lines(*found, *of_sides)
    print(*lines, sep="\n")
    folders = [path if path.is_dir() else path.parent for path, *_ in named]
    letters = zip(ascii_uppercase, folders, strict=False)
    titles = [f"{letter}: {path.resolve().name}" for letter, path in letters]
    for option, file in files.items():
        with os_errors_as(ExecutionError, file, "the comparison cannot be written"):
            write_output(file, _FORMS[option][1](found, titles))
    return EXIT_OK


def _sides(args: argparse.Namespace, runs: Sequence[Sequence[Path]]) -> list[list[Evaluated]]:
    """The scores of each side, of the images that each run was evaluated on, or of --on."""
    device = device_for(args.device)
    if args.on:  # all are checked before the first is evaluated
        begins = evaluations_on(args.on, [path for side in runs for path in side], device, args.set)
        sides = [[begins[path]() for path in side] for side in runs]
    else:
        sides = [[evaluated_whole(path, device, args.set) for path in side] for side in runs]
    for side in sides:
        _check_side(side)
    return sides


def _refuse_both(sides: Sequence[Sequence[Path]]) -> None:
    places = Counter(path for side in sides for path in {path.resolve() for path in side})
    if both := [path for path, number in places.items() if number > 1]:
        raise ConfigError(f"{first_of(both)}: on both sides")


def _check_side(side: Sequence[Evaluated]) -> None:
    """ConfigError: the runs of a side do not differ in their seeds alone."""
    names = first_of(result.run.directory for result in side)
    if read := [result for result in side if result.run.predictions]:
        # How other programs have made them is not known, but twice the same is no second seed.
        same = len({result.records.images.tobytes() for result in read}) < len(read)
        if same or len(read) < len(side):
            what = "of label maps are equal" if same else "are of runs, others of label maps"
            raise ConfigError(f"{names}: some scores of one side {what}")
        return
    different = set(differing_recipes([result.run.config for result in side])) - {"seed"}
    if different:
        what = f"differ in their seed only, and these do in {first_of(sorted(different), 3)}"
        raise ConfigError(f"{names}: runs of one side may {what}")
    seeds = Counter(result.run.config.seed for result in side)
    if again := [seed for seed, number in seeds.items() if number > 1]:
        what = f"seed {again[0]}, and would count as if they were independent: name one of them"
        raise ConfigError(f"{names}: several of one side have {what}")


def _json(found: Sequence[Comparison], _: Sequence[str]) -> str:
    table = asdict(found[0])
    if len(found) > 1:
        scores = found[0].scores[0], *(one.scores[1] for one in found)
        pairs = zip(ascii_uppercase[1:], map(asdict, found), strict=False)
        table = {"scores": scores, "comparisons": dict(pairs)}
    return json.dumps(_finite(table), indent=2, allow_nan=False) + "\n"


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
