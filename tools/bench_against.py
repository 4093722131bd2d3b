"""Times segtrain beside torchvision's reference loop, smp, mmsegmentation and data pipelines.

The same network, crop, batch and machine, in one run. Each contender has a process of its own, and
all take turns, so a busy machine troubles them alike: read the ratios. Contenders that are not
installed are named.

    pip install mmengine==0.10.7 ftfy regex prettytable segmentation_models_pytorch timm
    pip install --no-deps mmsegmentation==1.2.2 mmcv-lite==2.1.0

Run: python tools/bench_against.py [--sections data train eval memory] [--json FILE]
"""

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

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
from against_processes import Contender, contenders
from against_report import Row, markdown

SECTIONS = ("data", "train", "eval", "memory")
_MEMORY_STEPS = 3


def race(
    title: str, unit: str, specs: dict[str, dict[str, Any]], args: argparse.Namespace, count: int
) -> list[Row]:
    """A row for each contender: units a second in rounds in which all take turns."""
    rates: dict[str, list[float]] = {name: [] for name in specs}
    threads = 1 if unit == "samples/s" else args.threads
    with contenders(specs, threads) as found:
        for index in range(args.rounds):
            # There and back: a drift of the machine troubles all alike.
            for name in list(found)[:: 1 if index % 2 == 0 else -1]:
                rates[name].append(count / found[name].do(count)["seconds"])
    say(title)
    return [Row(title, name, unit, tuple(values)) for name, values in rates.items()]


def bench_data(args: argparse.Namespace, installed: Sequence[str], _: list[Row]) -> list[Row]:
    """Samples a second on one core."""
    rows = []
    with TemporaryDirectory(dir=args.scratch) as folder:
        size = write_scenes(Path(folder), tuple(args.image_size))
        say(f"images of {args.image_size[1]}x{args.image_size[0]}, {size:.2f} MB each")
        for colors in (False, True):
            for source in ("files", "decoded"):
                specs = {}
                for name in (SEGTRAIN, MMSEG, SEMSEG, TORCHVISION, ALBUMENTATIONS):
                    if name in installed and not (colors and name == SEMSEG):
                        specs[name] = {"contender": name, "source": source}
                share = {"share": MAX_SHARE}
                if MMSEG in specs:
                    specs[MMSEG] |= share  # as all its configs
                specs["segtrain, max_class_share"] = specs[SEGTRAIN] | share
                if source == "files":
                    specs["segtrain, pack"] = {"contender": SEGTRAIN, "source": "pack"}
                common = {"section": "data", "root": folder, "crop": args.crop, "colors": colors}
                specs = {name: common | spec for name, spec in specs.items()}
                title = f"{source}, {'with' if colors else 'without'} colours"
                rows += race(title, "samples/s", specs, args, args.samples)
    return rows


def case_specs(
    section: str, case: str, installed: Sequence[str], **options: Any
) -> dict[str, dict[str, Any]]:
    """The contenders of a case that are installed."""
    names = [n for n in (SEGTRAIN, TORCHVISION, CASES[case].peer) if n in installed]
    common = {"section": section, "case_name": case, **options}
    return {name: {"contender": name, **common} for name in names}


def bench_train(args: argparse.Namespace, installed: Sequence[str], works: list[Row]) -> list[Row]:
    """Training images a second, and by `works` the weights and operations of each."""
    rows = []
    for case in args.cases:
        for side, batch in args.sizes:
            title = f"{case}, {side}x{side}, batch {batch}"
            specs = case_specs("train", case, installed, size=(side, side), batch=batch)
            for name in specs:
                found = work(name, CASES[case], (side, side))
                works.append(Row(title, name, "GFLOP an image", (found["gflop"],)))
                works.append(Row(title, name, "weights", (found["weights"],)))
            rows += [
                row._replace(values=tuple(batch * v for v in row.values))
                for row in race(title, "images/s", specs, args, args.steps)
            ]
    return rows


def bench_eval(args: argparse.Namespace, installed: Sequence[str], _: list[Row]) -> list[Row]:
    """Evaluated images a second."""
    rows = []
    height, width = args.eval_size
    for case in args.cases:
        specs = case_specs("eval", case, installed, size=(height, width))
        rows += race(f"{case}, {width}x{height}", "images/s", specs, args, args.steps)
    return rows


def bench_memory(args: argparse.Namespace, installed: Sequence[str], _: list[Row]) -> list[Row]:
    """The largest resident memory of a process that trains, one after another."""
    rows = []
    for case in args.cases:
        for side, batch in args.sizes:
            title = f"{case}, {side}x{side}, batch {batch}"
            specs = case_specs("train", case, installed, size=(side, side), batch=batch)
            for name, spec in specs.items():
                contender = Contender(spec, args.threads)
                peak = contender.do(_MEMORY_STEPS)["peak_mib"]
                contender.close()
                rows.append(Row(title, name, "MiB", (peak,)))
            say(title)
    return rows


def say(text: str) -> None:
    print(text, file=sys.stderr, flush=True)


def arguments(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    add = parser.add_argument
    add("--sections", nargs="+", choices=SECTIONS, default=SECTIONS)
    add("--rounds", type=int, default=5, help="in each of which all take turns (default: 5)")
    add("--threads", type=int, default=2, help="of training and evaluation (default: 2)")
    add("--cases", nargs="+", choices=CASES, default=list(CASES), metavar="CASE")
    add("--sizes", nargs="+", type=_size, default=[(256, 4), (384, 2)], metavar="SIDE:BATCH")
    add("--steps", type=int, default=2, help="steps or images of a round (default: 2)")
    add("--samples", type=int, default=24, help="training samples of a round (default: 24)")
    add("--image-size", nargs=2, type=int, default=[1024, 2048], metavar=("H", "W"))
    add("--crop", nargs=2, type=int, default=[713, 713], metavar=("H", "W"))
    add("--eval-size", nargs=2, type=int, default=[512, 1024], metavar=("H", "W"))
    add("--scratch", type=Path, help="folder for data (default: the system's)")
    add("--json", type=Path, metavar="FILE", help="write the figures")
    return parser.parse_args(argv)


def _size(text: str) -> tuple[int, int]:
    side, batch = text.split(":")
    return int(side), int(batch)


def main(argv: Sequence[str] | None = None) -> None:
    args = arguments(argv)
    absent = {name: missing(name) for name in (TORCHVISION, SMP, MMSEG, SEMSEG, ALBUMENTATIONS)}
    absent = {name: packages for name, packages in absent.items() if packages}
    installed = [SEGTRAIN, TORCHVISION, SMP, MMSEG, SEMSEG, ALBUMENTATIONS]
    installed = [name for name in installed if name not in absent]
    benches = {
        "data": bench_data,
        "train": bench_train,
        "eval": bench_eval,
        "memory": bench_memory,
    }
    found: dict[str, list[Row]] = {}
    for section in args.sections:
        works: list[Row] = []
        found[section] = benches[section](args, installed, works)
        if works:
            found["work"] = works
    print(markdown(found, absent))
    if args.json:
        report = {section: [row.to_dict() for row in rows] for section, rows in found.items()}
        args.json.write_text(json.dumps({"not installed": absent, **report}, indent=2) + "\n")


if __name__ == "__main__":
    main()
