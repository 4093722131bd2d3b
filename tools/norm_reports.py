"""What `norm_study.py` found, as markdown tables and charts that GitHub renders."""

import statistics
from collections.abc import Sequence

from norm_simulation import ESTIMATES, MEAN, MOMENTUM, NUM_BATCHES, NUM_RANKS, SD, TEXTBOOK
from norm_training import TREATMENTS, Result

_WORDS = {
    "sync": "`sync`",
    "local_1": "`local`",
    "local_2": "`local`",
    "local_2_strict": "`local`, pooled branch too",
    "group": "`group`",
    "sync_continued": "`sync`, continued",
    "frozen": "`frozen`, continued",
}
_KINDS = ESTIMATES[:3]


def training_summary(results: Sequence[Result]) -> list[dict]:
    """One row for every way to train and evaluate that was run, over the seeds.

    gap_mean, gap_sd: the mIoU minus that of the baseline with the same seed; None without it.
    """
    by_run = {(result.treatment, result.seed): result for result in results}
    rows = []
    for treatment in TREATMENTS:
        runs = [result for result in results if result.treatment == treatment.name]
        baseline = "sync_continued" if treatment.continues else "sync"
        paired = [
            (run, by_run[baseline, run.seed]) for run in runs if (baseline, run.seed) in by_run
        ]
        for how in treatment.evaluations if runs else ():
            scores = [run.mean_iou[how] for run in runs]
            gaps = [run.mean_iou[how] - other.mean_iou["running"] for run, other in paired]
            rows.append(
                {
                    "treatment": treatment.name,
                    "images_per_rank": treatment.images_per_rank,
                    "evaluated_with": how,
                    "seeds": [run.seed for run in runs],
                    "mIoU": scores,
                    "mIoU_mean": statistics.mean(scores),
                    "mIoU_sd": spread(scores),
                    "baseline": baseline,
                    "gap_mean": statistics.mean(gaps) if gaps else None,
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
        no_gap = is_baseline or row["gap_mean"] is None
        gap = "" if no_gap else f"{row['gap_mean']:+.3f} ± {row['gap_sd']:.3f}"
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
    rows = [row for row in training_summary(results) if row["evaluated_with"] != "precise"]
    labels = [
        row["treatment"].replace("_", " ")
        + (f" {row['evaluated_with']}" if row["images_per_rank"] else "")
        for row in rows
    ]
    return mermaid_chart(labels, "mIoU", bars=[row["mIoU_mean"] for row in rows])


def running_table(results: Sequence[Result]) -> str:
    """How far the running statistics of one training lie apart over the channels, in markdown."""
    rows = []
    for treatment in TREATMENTS:
        runs = [r.running for r in results if r.treatment == treatment.name and r.running]
        if runs:
            columns = [
                " / ".join(f"{statistics.mean(run[key][i] for run in runs):.3f}" for i in range(3))
                for key in ("var_rank0", "var_mean", "distance_rank0")
            ]
            rows.append((_WORDS[treatment.name], str(treatment.images_per_rank), *columns))
    header = (
        "`rank0` / `pooled` variance",
        "`mean` / `pooled` variance",
        "means of `rank0`, apart",
    )
    return markdown_table(("training", "images a rank", *header), rows)


def training_report(results: Sequence[Result]) -> str:
    """Everything found, in markdown."""
    seeds = sorted({result.seed for result in results})
    return "\n\n".join(
        [
            f"mIoU on the evaluation split, seeds {', '.join(map(str, seeds))}. `any`: how many "
            "images a rank holds does not matter. In `local` the globally pooled branch, which has "
            "one value a channel and image, shares its statistics, unless the row says otherwise.",
            training_table(results),
            training_chart(results),
            "Running statistics of `local` after training, 5 %, 50 % and 95 % quantiles over the "
            "channels; the last column in standard deviations of the channel.",
            running_table(results),
        ]
    )


def simulation_report(rows: Sequence[dict]) -> str:
    """Everything simulated, in markdown."""
    return "\n\n".join(
        [
            f"Normal data of mean {MEAN} and standard deviation {SD} (variance {SD**2:.2f}), "
            f"{NUM_RANKS} ranks of {TEXTBOOK.batch_size} values, momentum {MOMENTUM}, "
            f"{NUM_BATCHES:,} steps: mean ± standard deviation over the steps.",
            textbook_table(rows),
            "The running variance over the variance of all data, measured (exact) ± standard "
            "deviation; how far rank 0's running mean is off, in standard deviations of the data.",
            settings_table(rows),
            "Standard deviation of the running variance over its mean against the values a rank, "
            "where all ranks see the same data. From above: `rank0`, `mean`, `pooled`.",
            noise_chart(rows),
            "Running variance over the variance of all data against the standard deviation of the "
            "ranks' means, 100 values a rank. From above: `pooled`, the same with means drawn anew "
            "for every step, `mean` (and `rank0`).",
            spread_chart(rows),
        ]
    )


def textbook_table(rows: Sequence[dict]) -> str:
    """The simulation of the textbook, in markdown."""
    cells = [
        (
            f"`{row['estimate']}`" if " " not in row["estimate"] else row["estimate"],
            *(
                f"{row[how][key]['expectation']:.2f} ± {row[how][key]['sd']:.2f}"
                for key in ("mean", "var")
                for how in ("measured", "exact")
            ),
        )
        for name in ESTIMATES
        for row in [_row(rows, name, TEXTBOOK.batch_size)]
    ]
    return markdown_table(("tracked", "running mean", "exact", "running variance", "exact"), cells)


def settings_table(rows: Sequence[dict]) -> str:
    """The running variances in every setting, in markdown."""
    cells = []
    for first in (row for row in rows if row["estimate"] == ESTIMATES[0]):
        place = first["batch_size"], first["spread"], first["redrawn"]
        variances = [_variance_cell(_row(rows, kind, *place)) for kind in _KINDS]
        law = first["measured"]["mean"]
        off = f"{(law['expectation'] - MEAN) / SD:+.2f} ± {law['sd'] / SD:.2f}"
        cells.append((str(first["batch_size"]), _means_words(first), *variances, off))
    header = ("values a rank", "sd of the ranks' means", *(f"`{kind}`" for kind in _KINDS))
    return markdown_table((*header, "mean of `rank0`, off by"), cells)


def _means_words(row: dict) -> str:
    if row["spread"] == 0:
        return "0"
    return f"{row['spread']} sd, " + ("drawn every step" if row["redrawn"] else "constant")


def _variance_cell(row: dict) -> str:
    if row["exact"]["var"]["expectation"] == 0:
        return "none of one value"
    measured, whole = row["measured"]["var"], row["variance"]
    return (
        f"{measured['expectation'] / whole:.3f} ({row['exact']['var']['expectation'] / whole:.3f})"
        f" ± {measured['sd'] / whole:.3f}"
    )


def noise_chart(rows: Sequence[dict]) -> str:
    """The relative noise of the running variances against the number of values a rank."""
    sizes = (2, 4, 16, 100)
    lines = []
    for kind in _KINDS:
        laws = [_row(rows, kind, size)["measured"]["var"] for size in sizes]
        lines.append([law["sd"] / law["expectation"] for law in laws])
    return mermaid_chart([str(size) for size in sizes], "sd / variance", lines=lines)


def spread_chart(rows: Sequence[dict]) -> str:
    """The running variances against the spread of the ranks' means."""
    spreads = (0.0, 0.5, 1.0)
    lines = []
    for kind, redrawn in (("pooled", False), ("pooled", True), ("mean", False)):
        found = [_row(rows, kind, 100, spread, redrawn and spread > 0) for spread in spreads]
        lines.append([row["measured"]["var"]["expectation"] / row["variance"] for row in found])
    return mermaid_chart([f"{s:g} sd" for s in spreads], "running / true variance", lines=lines)


def _row(
    rows: Sequence[dict], estimate: str, size: int, spread: float = 0.0, redrawn: bool = False
) -> dict:
    place = (estimate, size, spread, redrawn)
    keys = ("estimate", "batch_size", "spread", "redrawn")
    return next(row for row in rows if tuple(row[key] for key in keys) == place)


def markdown_table(header: Sequence[str], rows: Sequence[Sequence[str]]) -> str:
    """A table in markdown."""
    lines = [header, ["---"] * len(header), *rows]
    return "\n".join(f"| {' | '.join(cells)} |" for cells in lines)


def mermaid_chart(
    labels: Sequence[str],
    axis: str,
    *,
    bars: Sequence[float] = (),
    lines: Sequence[Sequence[float]] = (),
) -> str:
    """A chart over 0 that GitHub renders; of bars it is a horizontal one, with room for labels."""
    series = [("bar", bars)] if bars else [("line", line) for line in lines]
    top = max(value for _, values in series for value in values) * 1.1
    names = ", ".join(f'"{label}"' for label in labels)
    return "\n".join(
        [
            "```mermaid",
            "xychart-beta horizontal" if bars else "xychart-beta",
            f"    x-axis [{names}]",
            f'    y-axis "{axis}" 0 --> {top:.2f}',
            *(f"    {kind} [{', '.join(f'{v:.3f}' for v in values)}]" for kind, values in series),
            "```",
        ]
    )
