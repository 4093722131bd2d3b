"""How much the kind of batch statistics matters, in two studies.

`camvid` trains one experiment under every kind of statistics and compares the mIoU; it goes on
where it was stopped.

    python tools/norm_study.py camvid --data PATH --output runs/norm_study
"""

import argparse
import statistics
import sys
from collections.abc import Sequence
from pathlib import Path

from norm_training import TREATMENTS, Result, Study, to_json, write_text

from segtrain.config import Config, load_config
from segtrain.errors import UserError
from segtrain.malloc import keep_freed_memory

CONFIG = Path(__file__).resolve().parent.parent / "configs/camvid_small.yaml"

_WORDS = {
    "sync": "`sync`",
    "local_1": "`local`",
    "local_2": "`local`",
    "local_2_strict": "`local`, pooled branch too",
    "group": "`group`",
    "sync_continued": "`sync`, continued",
    "frozen": "`frozen`, continued",
}
_PRECISE = "precise"


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
    camvid = commands.add_parser("camvid", help="train under every kind of statistics")
    camvid.set_defaults(function=run_camvid)
    camvid.add_argument("--data", required=True, help="the data set, as data.root")
    camvid.add_argument("--output", type=Path, required=True, help="folder of the results")
    camvid.add_argument("--seeds", type=int, nargs="+", default=[0, 1, 2])
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


def run_camvid(args: argparse.Namespace) -> int:
    """Trains what is missing and writes the report."""
    keep_freed_memory()
    study = Study(camvid_config(args), args.continued_steps, args.precise_batches, args.output)
    results = study.run(args.seeds)
    report = f"{training_table(results)}\n\n{training_chart(results)}\n"
    write_text(args.output / "report.md", report)
    write_text(args.output / "results.json", to_json(training_summary(results)))
    print(f"\n{report}")
    return 0


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


def training_summary(results: Sequence[Result]) -> list[dict]:
    """One row for every way to train and evaluate, over the seeds."""
    by_run = {(result.treatment, result.seed): result for result in results}
    rows = []
    for treatment in TREATMENTS:
        runs = [result for result in results if result.treatment == treatment.name]
        baseline = "sync_continued" if treatment.continues else "sync"
        for how in treatment.evaluations:
            scores = [run.mean_iou[how] for run in runs]
            gaps = [
                run.mean_iou[how] - by_run[baseline, run.seed].mean_iou["running"] for run in runs
            ]
            rows.append(
                {
                    "treatment": treatment.name,
                    "images_per_rank": treatment.images_per_rank,
                    "evaluated_with": how,
                    "baseline": baseline,
                    "seeds": [run.seed for run in runs],
                    "mIoU": scores,
                    "mIoU_mean": statistics.mean(scores),
                    "mIoU_sd": spread(scores),
                    "gap_mean": statistics.mean(gaps),
                    "gap_sd": spread(gaps),
                    "train_loss": [run.losses[-1] for run in runs],
                }
            )
    return rows


def spread(values: Sequence[float]) -> float:
    """The sample standard deviation; 0 of a single value."""
    return statistics.stdev(values) if len(values) > 1 else 0.0


def training_table(results: Sequence[Result]) -> str:
    """The summary in markdown."""
    rows = []
    for row in training_summary(results):
        is_baseline = row["treatment"] == row["baseline"] and row["evaluated_with"] == "running"
        gap = "" if is_baseline else f"{row['gap_mean']:+.3f} ± {row['gap_sd']:.3f}"
        rows.append(
            (
                _WORDS[row["treatment"]],
                str(row["images_per_rank"] or "any"),
                row["evaluated_with"],
                f"{row['mIoU_mean']:.3f} ± {row['mIoU_sd']:.3f}",
                f"{min(row['mIoU']):.3f} to {max(row['mIoU']):.3f}",
                gap,
                f"{statistics.mean(row['train_loss']):.3f}",
            )
        )
    return markdown_table(
        (
            *("training", "images a rank", "evaluated with", "mIoU, mean ± sd", "range"),
            *("minus `sync`, same seed", "training loss"),
        ),
        rows,
    )


def training_chart(results: Sequence[Result]) -> str:
    """The mean mIoU of every way to train and evaluate, without precise statistics."""
    rows = [row for row in training_summary(results) if row["evaluated_with"] != _PRECISE]
    labels = [
        row["treatment"].replace("_", " ")
        + (f" {row['evaluated_with']}" if row["images_per_rank"] else "")
        for row in rows
    ]
    return mermaid_bars(labels, "mIoU", [row["mIoU_mean"] for row in rows])


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def mermaid_bars(labels: Sequence[str], axis: str, values: Sequence[float]) -> str:
    """A chart of bars from 0 that GitHub renders."""
    names = ", ".join(f'"{label}"' for label in labels)
    heights = ", ".join(f"{value:.3f}" for value in values)
    return (
        f'```mermaid\nxychart-beta horizontal\n    x-axis [{names}]\n    y-axis "{axis}" 0 --> '
        f"{max(values) * 1.1:.2f}\n    bar [{heights}]\n```"
    )


if __name__ == "__main__":
    raise SystemExit(main())
