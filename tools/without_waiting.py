"""Trains with workers that take unequal time, in the ways of train.parallel, and compares.

    python tools/without_waiting.py runs/pace --workers 4

Each sleeps --seconds before its part of a batch, the last one five times as long. The scenes
are drawn, the config is configs/demo.yaml but for what is set below. Evaluations take no time.
"""

import argparse
from pathlib import Path

from commands import DEMO, draw_scenes, logged, segtrain, settings

PACE = """
import time
from segtrain.distributed import collectives as dist
from segtrain.plugins import callback
from segtrain.training.part import Part
from contextlib import contextmanager

@callback("pace")
class Pace(Part):
    def __init__(self, _):
        pass

    @contextmanager
    def around(self, run):
        rank, last = dist.rank(), dist.world_size() - 1
        if rank or run.config.train.parallel != "server":
            time.sleep({seconds} * (5 if rank == last else 1))
        yield
"""
WAYS = {
    "sync": [],
    "hogwild": ["train.parallel=hogwild"],
    "server, staleness 0": ["train.parallel=server", "train.staleness=0"],
    "server, staleness 16": ["train.parallel=server"],
}


def main() -> None:
    """Trains all ways and prints the table."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("output", type=Path, help="a new folder for scenes and runs")
    parser.add_argument("--workers", type=int, default=4)
    parser.add_argument("--seconds", type=float, default=0.3)
    parser.add_argument("--steps", type=int, default=60)
    args = parser.parse_args()
    args.output.mkdir(parents=True)
    pace = args.output / "pace.py"
    pace.write_text(PACE.format(seconds=args.seconds))
    config = args.output / "config.yaml"
    config.write_text(f"plugins: [{pace.resolve()}]\n{DEMO.read_text()}")
    same = settings(
        data__root=draw_scenes(args.output / "scenes", 200, 40, (32, 64)),
        augment__crop_size=[32, 64],
        train__steps=args.steps,
        train__batch_size=2 * args.workers,
        schedule__warmup_steps=args.steps // 10,
        eval__every_steps=args.steps // 3,
        log__every_steps=1,
        log__callbacks=[{"name": "pace"}],
    )
    rows = ["| | images/s | mIoU | staleness, mean and largest |", "|---|---|---|---|"]
    for way, options in WAYS.items():
        run = args.output / way.replace(", ", "_").replace(" ", "_")
        ranks = args.workers + way.startswith("server")
        segtrain("train", config, "--nproc", ranks, "--output", run, *same, *settings(*options))
        speed = 2 * args.workers / (sum(seconds := logged(run, "time/step_s")) / len(seconds))
        scores = " / ".join(f"{score:.3f}" for score in logged(run, "eval/mIoU"))
        ages = logged(run, "staleness/mean"), logged(run, "staleness/max")
        old = f"{sum(ages[0]) / len(ages[0]):.1f}, {max(ages[1]):.0f}" if ages[0] else ""
        rows.append(f"| {way} | {speed:.1f} | {scores} | {old} |")
    print("\n".join(rows))


if __name__ == "__main__":
    main()
