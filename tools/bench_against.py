"""Times segtrain beside torchvision's reference loop, smp, mmsegmentation and data pipelines.

The same network, crop, batch and machine, in one run. Each contender has a process of its own, and
all take turns, so a busy machine troubles them alike: read the ratios. Contenders that are not
installed are named.

    pip install mmengine==0.10.7 ftfy regex prettytable segmentation_models_pytorch timm
    pip install --no-deps mmsegmentation==1.2.2 mmcv-lite==2.1.0

Run: python tools/bench_against.py [--sections data train eval] [--json FILE]
"""

import argparse
import json
import statistics
import sys
from collections.abc import Sequence
from itertools import groupby
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
from against_data import MAX_SHARE, write_scenes
from against_models import (
    ALBUMENTATIONS,
    CASES,
    MMSEG,
    SEGTRAIN,
    SEMSEG,
    SMP,
    TORCHVISION,
    missing,
    work,
)
from against_processes import contenders

PEERS = (TORCHVISION, SMP, MMSEG, SEMSEG, ALBUMENTATIONS)
CROP, EVAL_SIZE = (713, 713), (512, 1024)
TITLES = {
    "data": "Training samples on one core",
    "work": "The same work",
    "train": "Training steps",
    "memory": "Peak memory of training",
    "eval": "Evaluation",
}


class Row(NamedTuple):
    """What one contender took, in each round."""

    title: str
    contender: str
    unit: str
    values: tuple[float, ...]

    def to_dict(self) -> dict[str, Any]:
        """For JSON, with the median and the spread."""
        median = statistics.median(self.values)
        return {
            **self._asdict(),
            "median": median,
            "low": min(self.values),
            "high": max(self.values),
        }


Specs = dict[str, dict[str, Any]]
Tables = dict[str, list[Row]]


def race(
    title: str, unit: str, specs: Specs, args: argparse.Namespace, orders: int, batch: int = 1
) -> tuple[list[Row], list[Row]]:
    """Of each contender its rate in rounds in which all take turns, and its largest memory.

    Args:
        orders: steps, images or samples of a round, each of `batch` units.
    """
    rates: dict[str, list[float]] = {name: [] for name in specs}
    peaks: dict[str, float] = {}
    with contenders(specs, 1 if unit == "samples/s" else args.threads) as found:
        for index in range(args.rounds):
            # There and back: a drift of the machine troubles all alike.
            for name in list(found)[:: 1 if index % 2 == 0 else -1]:
                done = found[name].do(orders)
                rates[name].append(batch * orders / done["seconds"])
                peaks[name] = done["peak_mib"]
    print(title, file=sys.stderr, flush=True)
    return (
        [Row(title, name, unit, tuple(values)) for name, values in rates.items()],
        [Row(title, name, "MiB", (peak,)) for name, peak in peaks.items()],
    )


def bench_data(args: argparse.Namespace, installed: Sequence[str]) -> Tables:
    """Samples a second on one core."""
    rows = []
    with TemporaryDirectory() as folder:
        size = write_scenes(Path(folder))
        print(f"images of {size:.2f} MB each", file=sys.stderr, flush=True)
        for colors in (False, True):
            for source in ("files", "decoded"):
                specs: Specs = {}
                for name in (SEGTRAIN, MMSEG, SEMSEG, TORCHVISION, ALBUMENTATIONS):
                    if name in installed and not (colors and name == SEMSEG):
                        specs[name] = {"contender": name, "source": source}
                share = {"share": MAX_SHARE}
                if MMSEG in specs:
                    specs[MMSEG] |= share  # as all its configs
                specs["segtrain, max_class_share"] = specs[SEGTRAIN] | share
                if source == "files":
                    specs["segtrain, pack"] = {"contender": SEGTRAIN, "source": "pack"}
                common = {"section": "data", "root": folder, "crop": CROP, "colors": colors}
                specs = {name: common | spec for name, spec in specs.items()}
                title = f"{source}, {'with' if colors else 'without'} colours"
                rows += race(title, "samples/s", specs, args, args.samples)[0]
    return {"data": rows}


def case_specs(section: str, case: str, installed: Sequence[str], **options: Any) -> Specs:
    """The contenders of a case that are installed."""
    names = [n for n in (SEGTRAIN, TORCHVISION, CASES[case].peer) if n in installed]
    common = {"section": section, "case_name": case, **options}
    return {name: {"contender": name, **common} for name in names}


def bench_train(args: argparse.Namespace, installed: Sequence[str]) -> Tables:
    """Training images a second, memory, and the weights and operations of each."""
    found: Tables = {"train": [], "memory": [], "work": []}
    for case in args.cases:
        for side, batch in args.sizes:
            title, size = f"{case}, {side}x{side}, batch {batch}", (side, side)
            specs = case_specs("train", case, installed, size=size, batch=batch)
            works = {name: work(name, CASES[case], size) for name in specs}
            for key, unit in (("weights", "M weights"), ("gflop", "GFLOP an image")):
                scale = 1e-6 if key == "weights" else 1
                found["work"] += [
                    Row(title, name, unit, (scale * one[key],)) for name, one in works.items()
                ]
            if args.bfloat16:
                lower = {name: specs[name] | {"bfloat16": True} for name in (SEGTRAIN, TORCHVISION)}
                specs |= {f"{name}, bfloat16": spec for name, spec in lower.items()}
            rates, peaks = race(title, "images/s", specs, args, args.steps, batch)
            found["train"] += rates
            found["memory"] += peaks
    return found


def bench_eval(args: argparse.Namespace, installed: Sequence[str]) -> Tables:
    """Evaluated images a second."""
    rows = []
    for case in args.cases:
        specs = case_specs("eval", case, installed, size=EVAL_SIZE)
        title = f"{case}, {EVAL_SIZE[1]}x{EVAL_SIZE[0]}"
        rows += race(title, "images/s", specs, args, args.steps)[0]
    return {"eval": rows}


SECTIONS = {"data": bench_data, "train": bench_train, "eval": bench_eval}


def markdown(found: Tables, absent: dict[str, list[str]]) -> str:
    """A table for each section, and what is not installed.

    A ratio is the median over the rounds of this contender's figure by segtrain's.
    """
    lines = []
    for section, rows in found.items():
        lines += [
            f"## {TITLES[section]}",
            "",
            "| | contender | unit | median | spread | / segtrain |",
        ]
        lines += ["|---|---|---|---|---|---|"]
        for (title, unit), group in groupby(rows, key=lambda row: (row.title, row.unit)):
            for row in (group := list(group)):
                (base,) = (one.values for one in group if one.contender == SEGTRAIN)
                ratio = statistics.median(a / b for a, b in zip(row.values, base, strict=True))
                low, median, high = min(row.values), statistics.median(row.values), max(row.values)
                lines.append(
                    f"| {title} | {row.contender} | {unit} | {median:.4g} "
                    f"| {low:.4g} to {high:.4g} | {ratio:.4g} |"
                )
        lines.append("")
    for name, packages in absent.items():
        lines.append(f"{name}: not installed ({', '.join(packages)})")
    return "\n".join(lines).rstrip()


def _size(text: str) -> tuple[int, int]:
    side, batch = text.split(":")
    return int(side), int(batch)


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=list(SECTIONS))
    add("--rounds", type=int, default=5, help="in each of which all take turns (default: 5)")
    add("--threads", type=int, default=2, help="of training and evaluation (default: 2)")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add("--sizes", nargs="+", type=_size, default=[(256, 4), (384, 2)], metavar="SIDE:BATCH")
    add("--steps", type=int, default=2, help="steps or images of a round (default: 2)")
    add("--samples", type=int, default=24, help="training samples of a round (default: 24)")
    add("--bfloat16", action="store_true", help="train in bfloat16 too: segtrain, torchvision")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    args = parser.parse_args(argv)
    absent = {name: packages for name in PEERS if (packages := missing(name))}
    installed = [name for name in (SEGTRAIN, *PEERS) if name not in absent]
    found: Tables = {}
    for section in args.sections:
        found |= SECTIONS[section](args, installed)
    print(markdown(found, absent))
    if args.json:
        report = {section: [row.to_dict() for row in rows] for section, rows in found.items()}
        args.json.write_text(json.dumps({"not installed": absent, **report}, indent=2) + "\n")
    features = torch.cpu.get_capabilities()
    print(f"processor: {features['cpu_name']}, {'with' if features['amx_bf16'] else 'no'} AMX")


if __name__ == "__main__":
    main()
