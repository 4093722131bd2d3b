"""The same experiment on 1, 2 and 3 ranks, its losses side by side.

Training amplifies rounding, so the yardstick stands beside the ranks in both precisions: one
process that adds up the images of each batch in another order.

    python tools/invariance.py runs/invariance
"""

import argparse
import json
import subprocess
import sys
from pathlib import Path

CONFIG = Path(__file__).resolve().parent.parent / "configs/demo.yaml"

# Augmentation, dropout, auxiliary loss and a batch that neither 2 nor 3 ranks can share equally.
SETTINGS = (
    "data.num_workers=0",
    "augment.crop_size=[64, 96]",
    "augment.scale_range=[0.5, 1.5]",
    "augment.rotate_deg=10.0",
    "augment.color_prob=0.5",
    "model.head_channels=32",
    "train.batch_size=5",
    "train.steps=20",
    # At 0.05 rounding grows tenfold a step, and the yardstick parts as far as the ranks do.
    "train.lr=0.02",
    "train.warmup_steps=0",
    "log.every_steps=1",
    "eval.every_steps=null",
)
RANKS = (2, 3)


def main() -> int:
    """Runs everything and prints the table; 0 if float64 agrees to 1e-9."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where data and runs are written")
    directory = parser.parse_args().directory
    data = directory / "data"
    command("data", "synth", data, "--num-train", 16, "--num-val", 2, "--size", 128, 256)

    runs = {
        precision: [
            losses(directory, data, 1, precision),
            *(losses(directory, data, ranks, precision) for ranks in RANKS),
            losses(directory, data, 1, precision, reverse=True),
        ]
        for precision in ("float64", "float32")
    }
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


def losses(
    directory: Path, data: Path, ranks: int, precision: str, *, reverse: bool = False
) -> list[float]:
    """The loss of every step of one run."""
    loop = directory / f"{precision}_{ranks}{'_reversed' if reverse else ''}"
    settings = [f"data.root={data}", f"train.precision={precision}", *SETTINGS]
    options = [word for setting in settings for word in ("--set", setting)]
    if reverse:
        train_reversed(loop, settings)
    else:
        command("train", CONFIG, "--nproc", ranks, "--device", "cpu", "--output", loop, *options)
    lines = [json.loads(line) for line in (loop / "metrics.jsonl").read_text().splitlines()]
    return [line["train/loss"] for line in lines if "train/loss" in line]


def train_reversed(run: Path, settings: list[str]) -> None:
    """Trains in this process with the images of each batch in reverse order."""
    import torch

    from segtrain.commands.train import loop
    from segtrain.config import load_config

    config = load_config(CONFIG, tuple(settings))
    loop.indices_of_rank = lambda batch_size, *_: [range(batch_size)[::-1]]
    loop.run(config, loop, device=torch.device("cpu"), resume=False)


def command(*arguments: object) -> None:
    """Runs one segtrain command, which must succeed."""
    subprocess.run([sys.executable, "-m", "segtrain", *map(str, arguments)], check=True)


def apart(a: float, b: float) -> float:
    """The relative difference."""
    return abs(a / b - 1)


if __name__ == "__main__":
    sys.exit(main())
