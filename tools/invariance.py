"""The same experiment on 1, 2 and 3 ranks, its losses side by side.

Training amplifies rounding, so the yardstick stands beside the ranks in both precisions: one
process that adds up the images of each batch in another order.

    python tools/invariance.py runs/invariance
"""

import argparse
import sys
from pathlib import Path

from commands import DEMO, draw_scenes, logged, segtrain, settings

# Augmentation, dropout, auxiliary loss and a batch that neither 2 nor 3 ranks can share equally.
SETTINGS = (
    "data.num_workers=0",
    "augment.crop_size=[64, 96]",
    "augment.scale_range=[0.5, 1.5]",
    "augment.rotate_deg=10.0",
    "augment.color_prob=0.5",
    "model.head_channels=32",
    "train.batch_size=5",
    # At 0.05 rounding grows tenfold a step, and the yardstick parts as far as the ranks do.
    "optim.lr=0.02",
    "schedule.warmup_steps=0",
    "log.every_steps=1",
    "eval.every_steps=null",
)
RANKS = (2, 3)


def main() -> int:
    """Runs everything and prints the table; 0 if float64 agrees to 1e-9."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where data and runs are written")
    parser.add_argument("--steps", type=int, default=20, metavar="N")
    args = parser.parse_args()
    data = draw_scenes(args.directory / "data", 16, 2, (128, 256))
    common = (f"data.root={data}", f"train.steps={args.steps}", *SETTINGS)

    runs = {}
    for precision in ("float64", "float32"):
        chosen = (*common, f"train.precision={precision}")
        folder = args.directory / precision
        runs[precision] = [
            *(losses(folder / str(ranks), chosen, ranks) for ranks in (1, *RANKS)),
            reversed_losses(folder / "reversed", chosen),
        ]
    header = "".join(f"{name:>11}" for name in (*(f"{n} ranks" for n in RANKS), "reordered"))
    print(f"\nrelative difference to one rank {'float64':>18}{'float32':>44}")
    print(f"step   loss of one rank{header}{header}")
    for step, loss in enumerate(runs["float64"][0]):
        print(f"{step + 1:4}   {loss:.14f}", end="")
        for one, *others in runs.values():
            print("".join(f"{apart(values[step], one[step]):11.1e}" for values in others), end="")
        print()
    one, *many = runs["float64"][:-1]
    worst = max(apart(a, b) for values in many for a, b in zip(values, one, strict=True))
    print(f"\nfloat64, farthest apart: {worst:.1e}")
    return 0 if worst < 1e-9 else 1


def losses(run: Path, chosen: tuple[str, ...], ranks: int) -> list[float]:
    """The loss of every step of one run."""
    options = ["--nproc", ranks, "--device", "cpu", "--output", run, *settings(*chosen)]
    segtrain("train", DEMO, *options)
    return logged(run, "train/loss")


def reversed_losses(directory: Path, chosen: tuple[str, ...]) -> list[float]:
    """Of a run in this process with the images of each batch in reverse order."""
    import torch

    from segtrain.config import load_config
    from segtrain.distributed.layout import Layout
    from segtrain.trainer import loop, setup

    original = Layout.positions
    Layout.positions = lambda self, rank: [mine[::-1] for mine in original(self, rank)]
    try:
        config = load_config(DEMO, chosen)
        loop.run(setup.TrainRequest(config, directory, torch.device("cpu")))
    finally:
        Layout.positions = original
    return logged(directory, "train/loss")


def apart(a: float, b: float) -> float:
    """The relative difference."""
    return abs(a / b - 1)


if __name__ == "__main__":
    sys.exit(main())
