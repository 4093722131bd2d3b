"""How much the kind of batch statistics matters, in two studies.

`simulation` tracks the statistics of drawn data, whose exact values are known (10 seconds).
`camvid` trains one experiment under every kind of statistics and compares the mIoU (an hour or two
on two CPU cores); it goes on where it was stopped.

    python tools/norm_study.py simulation
    python tools/norm_study.py camvid --data PATH --output runs/norm_study
"""

import argparse
import sys
from pathlib import Path

from norm_reports import simulation_report, training_report, training_summary
from norm_simulation import run_simulation
from norm_training import TREATMENTS, Result, Study, to_json, write_text

from segtrain.config import Config, load_config
from segtrain.distributed.machine import keep_freed_memory
from segtrain.errors import UserError

CONFIG = Path(__file__).resolve().parent.parent / "configs/camvid_small.yaml"


def main() -> int:
    """The command line; returns the exit code."""
    args = _parser().parse_args()
    try:
        return args.function(args)
    except UserError as error:
        print(error, file=sys.stderr)
        return error.exit_code


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    commands = parser.add_subparsers(required=True, metavar="COMMAND")
    simulation = commands.add_parser("simulation", help="running statistics of drawn data")
    simulation.set_defaults(function=run_simulation_command)
    simulation.add_argument("--output", type=Path, help="folder to keep the report in")

    names = [treatment.name for treatment in TREATMENTS]
    camvid = commands.add_parser("camvid", help="train under every kind of statistics")
    camvid.set_defaults(function=run_camvid)
    camvid.add_argument("--data", required=True, help="the data set, as data.root")
    camvid.add_argument("--output", type=Path, required=True, help="folder of the results")
    camvid.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
    camvid.add_argument("--treatments", nargs="+", choices=names, default=names)
    camvid.add_argument("--steps", type=int, default=500, help="from random weights")
    camvid.add_argument(
        "--continued-steps", type=int, default=250, help="from the weights of sync on"
    )
    camvid.add_argument("--crop-size", type=int, nargs=2, default=[160, 216], metavar=("H", "W"))
    camvid.add_argument(
        "--precise-batches", type=int, default=50, help="for statistics taken after training"
    )
    camvid.add_argument("--config", type=Path, default=CONFIG)
    camvid.add_argument("--set", action="append", default=[], metavar="section.key=value")
    return parser


def run_simulation_command(args: argparse.Namespace) -> int:
    """Simulates, prints the report and keeps it if asked to."""
    rows = run_simulation()
    report = simulation_report(rows)
    if args.output:
        write_report(args.output, "simulation", report, rows)
    print(report)
    return 0


def run_camvid(args: argparse.Namespace) -> int:
    """Trains what is missing; the report is written anew after every seed."""
    keep_freed_memory()
    study = Study(camvid_config(args), args.continued_steps, args.precise_batches, args.output)
    treatments = [treatment for treatment in TREATMENTS if treatment.name in args.treatments]
    results: list[Result] = []
    for seed in args.seeds:
        results += study.run(seed, treatments)
        report = training_report(results)
        write_report(args.output, "camvid", report, training_summary(results))
    print(f"\n{report}")
    return 0


def write_report(folder: Path, name: str, report: str, rows: list[dict]) -> None:
    """Writes NAME.md for people and NAME.json for programs."""
    write_text(folder / f"{name}.md", report + "\n")
    write_text(folder / f"{name}.json", to_json(rows))


def camvid_config(args: argparse.Namespace) -> Config:
    """The experiment at the length and size that the command line asks for."""
    whole = load_config(args.config, [f"data.root={args.data}"])
    options = [
        f"data.root={args.data}",
        f"train.steps={args.steps}",
        # The same part of the training as in the recipe.
        f"train.warmup_steps={whole.train.warmup_steps * args.steps // whole.train.steps}",
        f"augment.crop_size={args.crop_size}",
        # An average of the weights would have buffers of its own.
        "train.ema_decay=null",
    ]
    return load_config(args.config, [*options, *args.set])


if __name__ == "__main__":
    raise SystemExit(main())
