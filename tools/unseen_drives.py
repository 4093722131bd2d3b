"""Trains recipes for CamVid with one drive left out, and scores them on that drive.

    python tools/unseen_drives.py --data data/camvid --output drives --recipe base --steps 4000

CamVid's training split holds three drives, and its validation split continues one of them, so it
says little about streets that no one has seen. Here the images of both splits are divided by drive;
`seen` stands for the ordinary splits. Runs are scored once, at their last step, and go on where
they were stopped. `--recipe table` trains nothing: it prints what there is.

Recipes are joined by `+`. `--recipe design` stands for seven such runs: with the base, each of
seven recipes is in four runs of eight, and any two of them are together in two. So what a recipe
adds is a difference of two means of four runs, with half the standard deviation of one of two runs.
The table has these differences, by least squares over all runs of a drive, seed and length.
"""

import argparse
import itertools
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np

from segtrain.evaluation.records import load_records
from segtrain.results.compare import compare

CONFIG, DRIVES = "camvid_deeplabv3plus_r18", ("0001TP", "0006R0", "0016E5")
STRONG_COLOR = ("augment.color_prob=0.8", "augment.brightness=0.35", "augment.hue=0.1")
GAMMA = "augment.extra=[{name: RandomGamma, args: {gamma_limit: [40, 200]}}]"
# What differs from CONFIG.
RECIPES: dict[str, tuple[str, ...]] = {
    "base": (),
    "color": (*STRONG_COLOR, GAMMA),
    "no_color": ("augment.color_prob=0.0",),
    "class_mix": ("augment.class_mix_prob=0.5",),
    "class_uniform": ("data.class_uniform=0.5",),
    "large_crops": ("augment.crop_size=[360, 480]", "train.batch_size=10"),
    "wide_scale": ("augment.scale_range=[0.5, 2.0]",),
    "stride_8": ("model.output_stride=8",),
    "four_stages": ("model.num_stages=4", "optim.weight_decay=0.1"),
    "deep_stem": ("model.stem=32-32-64",),
    "adamw": ("optim.kind=adamw", "optim.lr=1.0e-3"),
    "label_smoothing": ("loss.label_smoothing=0.1",),
    "dropout": ("model.dropout=0.3",),
    "mixup": ("augment.mixup_alpha=0.2",),
    "boundary": ("loss.kind=boundary_relaxation",),
    "group_norm": ("norm.kind=group",),
    "images_2": ("norm.images=2",),
    "no_adjustment": ("loss.logit_adjustment=0.0",),
}
# The 2^(7-4) design of Box and Hunter (1961), with the base as its first row.
DESIGN = (
    "wide_scale+class_mix+large_crops+dropout",
    "class_uniform+class_mix+boundary+dropout",
    "no_color+large_crops+boundary+dropout",
    "wide_scale+class_uniform+large_crops+boundary",
    "wide_scale+no_color+class_mix+boundary",
    "class_uniform+no_color+class_mix+large_crops",
    "wide_scale+class_uniform+no_color+dropout",
)


def write_lists(root: Path, data: Path) -> None:
    """Makes `root` a data set of CamVid's images with two lists for every drive."""
    root.mkdir(parents=True, exist_ok=True)
    for folder in ("images", "labels"):
        if not (root / folder).exists():
            (root / folder).symlink_to((data / folder).resolve())
    images = sorted(path.relative_to(root) for path in (root / "images").glob("*/*.*"))
    for drive, is_left_out in itertools.product(DRIVES, (False, True)):
        chosen = [path for path in images if path.name.startswith(drive) == is_left_out]
        chosen = [path for path in chosen if path.parts[1] in ("train", "val")]
        lines = (f"{path} labels/{path.parts[1]}/{path.stem}.png\n" for path in chosen)
        (root / f"{drive}_{'out' if is_left_out else 'in'}.txt").write_text("".join(lines))


def options(recipe: str, drive: str, root: Path) -> list[str]:
    """The settings of a run beside its seed and length."""
    parts = (text for part in recipe.split("+") for text in RECIPES[part])
    found = [*parts, "eval.every_steps=null", f"data.root={root}"]
    if drive != "seen":
        lists = f"data.train_split={drive}_in.txt", f"data.eval_split={drive}_out.txt"
        found += ["data.layout=list", *lists]
    return found


def effects(scores: dict[str, float]) -> dict[str, float]:
    """What each recipe adds to the score, by least squares; empty if the runs cannot tell."""
    parts = sorted({part for recipe in scores for part in recipe.split("+")} - {"base"})
    rows = [[1.0, *(part in recipe.split("+") for part in parts)] for recipe in scores]
    solution, _, rank, _ = np.linalg.lstsq(np.array(rows), np.array([*scores.values()]), rcond=None)
    return dict(zip(parts, solution[1:], strict=True)) if rank == len(parts) + 1 else {}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="root of CamVid")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument(
        "--recipe", nargs="+", default=["base"], help=f"{', '.join(RECIPES)}, design, table"
    )
    parser.add_argument("--drive", nargs="+", choices=(*DRIVES, "seen"), default=[DRIVES[1]])
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--jobs", type=int, default=1, help="runs at a time, which share a GPU")
    parser.add_argument(
        "--set", action="append", default=[], help="for all runs, as segtrain train"
    )
    args = parser.parse_args()
    root = args.output / "data"
    write_lists(root, args.data)
    recipes = [recipe for recipe in args.recipe if recipe not in ("table", "design")]
    recipes += DESIGN if "design" in args.recipe else ()
    if unknown := {part for recipe in recipes for part in recipe.split("+")} - {*RECIPES}:
        parser.error(f"unknown recipe: {', '.join(sorted(unknown))}")

    def train(one: tuple[int, str, str]) -> None:
        seed, recipe, drive = one
        run = args.output / f"{recipe}-{drive}-{seed}-{args.steps}"
        settings = [*options(recipe, drive, root), f"seed={seed}", f"train.steps={args.steps}"]
        words = [word for text in (*settings, *args.set) for word in ("--set", text)]
        command = [sys.executable, "-m", "segtrain", "train", CONFIG, *words, "--nproc", "1"]
        # Only what nobody else needs of the machine.
        idle = ["chrt", "--idle", "0", "nice", "-n", "19"]
        subprocess.run([*idle, *command, "--output", str(run), "--resume"], check=True)

    with ThreadPoolExecutor(args.jobs) as pool:
        runs = [
            pool.submit(train, one) for one in itertools.product(args.seed, recipes, args.drive)
        ]
        try:
            for run in runs:
                run.result()
        except BaseException:
            pool.shutdown(cancel_futures=True)  # a run that was stopped stops those after it
            raise
    print(f"{'recipe':46} left out  seed  steps   mIoU  minus base, 95 %")
    found = {run.name: load_records(run) for run in sorted(args.output.glob("*-*-*-*"))}
    groups: dict[tuple[str, ...], dict[str, float]] = {}
    for name, records in found.items():
        if records is None:
            continue
        recipe, drive, seed, steps = name.split("-")
        base, beside = found.get(f"base-{drive}-{seed}-{steps}"), ""
        if base is not None and recipe != "base":
            value, low, high = (100 * x for x in compare([base], [records], by="image").models[:3])
            beside = f"{value:+.1f} ({low:+.1f} to {high:+.1f})"
        mean = 100 * records.scores.mean_iou
        groups.setdefault((drive, seed, steps), {})[recipe] = mean
        print(f"{recipe:46} {drive:8} {seed:>5} {steps:>6}  {mean:5.1f}  {beside}")
    for (drive, seed, steps), scores in groups.items():
        for recipe, value in effects(scores).items():
            print(f"with {recipe:41} {drive:8} {seed:>5} {steps:>6}  {value:+5.1f}  over all runs")


if __name__ == "__main__":
    main()
