"""Trains recipes for CamVid with a drive left out, and scores them on that drive at several scales.

    python tools/camvid_tries.py --data data/camvid --output tries --recipe base fine --minutes 8

CamVid's training split holds three drives, and its validation split continues one of them, so it
says little about streets that no one has seen. Here the images of both splits are divided by drive;
`seen` stands for the ordinary splits. Recipes are joined by `+`. Images come from packs. Runs share
the device; what is done is not done again, and a run that was stopped goes on. At the end of the
minutes all runs save and stop. The table has what is scored.
"""

import argparse
import itertools
import json
import re
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

DRIVES = ("0006R0", "0001TP", "0016E5")
_BASE = "camvid_deeplabv3plus_r34"
# What differs from that.
RECIPES: dict[str, tuple[str, ...]] = {
    "base": (),
    "four_stages": ("model.num_stages=4", "optim.weight_decay=0.1"),
    "whole": ("augment.crop_size=[360, 480]",),
    "class_uniform": ("data.class_uniform=0.5",),
    "boundary": ("loss.kind=boundary_relaxation",),
    "ema": ("optim.ema_decay=0.9998",),
    "near": ("augment.scale_range=[0.9, 1.6]",),
    "no_mix": ("augment.class_mix_prob=0.0",),
    "wide_head": ("model.head_channels=256",),
}


def write_lists(root: Path, data: Path) -> None:
    """Makes `root` a data set of CamVid's images with two lists for every drive."""
    root.mkdir(parents=True, exist_ok=True)
    for folder in ("images", "labels"):
        if not (root / folder).exists():
            (root / folder).symlink_to((data / folder).resolve())
    images = sorted(path.relative_to(root) for path in (root / "images").glob("*/*.*"))
    images = [path for path in images if path.parts[1] in ("train", "val")]
    for name in (*DRIVES, "seen"):
        for is_out in (False, True):
            lines = [
                f"{path} labels/{path.parts[1]}/{path.stem}.png\n"
                for path in images
                if is_out == (path.parts[1] == "val" if name == "seen" else name in path.name)
            ]
            (root / f"{name}_{'out' if is_out else 'in'}.txt").write_text("".join(lines))


def lists(root: Path, drive: str) -> list[str]:
    splits = f"data.train_split={drive}_in.txt", f"data.eval_split={drive}_out.txt"
    return ["data.layout=list", f"data.root={root}", *splits]


def words(settings: list[str]) -> list[str]:
    return [word for setting in settings for word in ("--set", setting)]


def score(run: Path, scales: list[str], where: list[str]) -> None:
    """Writes scores.json: mIoU of the run at each scale."""
    from segtrain.cli import main

    found = {}
    for scale in scales:
        file = run / f"eval_{scale}.json"
        options = words([f"eval.scales=[{scale}]", "data.num_workers=2"])
        main(["eval", str(run), *where, *options, "--json", str(file)])
        found[scale] = json.loads(file.read_text())["mIoU"]
    (run / "scores.json").write_text(json.dumps(found))


class Tries:
    """Runs of commands, of which each is a process."""

    def __init__(self, args: argparse.Namespace) -> None:
        self.args, self.root = args, (args.output / "data").resolve()
        self.end = time.monotonic() + 60 * args.minutes
        self.where = ["--device", args.device, "--nproc", "1"]
        self.packing = {drive: threading.Lock() for drive in (*DRIVES, "seen")}
        self.todo = list(itertools.product(args.drive, args.seed, args.recipe))
        self.next = threading.Lock()

    def command(self, log: Path, *words: object) -> bool:
        """Whether the command ended well before the end of the minutes."""
        with log.open("a") as file:
            command = [sys.executable, *map(str, words)]
            process = subprocess.Popen(command, stdout=file, stderr=subprocess.STDOUT)
            try:
                return process.wait(max(self.end - time.monotonic(), 0.1)) == 0
            except subprocess.TimeoutExpired:
                process.send_signal(signal.SIGTERM)  # a training saves
                try:
                    process.wait(30)
                except subprocess.TimeoutExpired:
                    process.kill()
                return False

    def pack(self, drive: str) -> Path:
        folder = self.args.output / f"pack_{drive}"
        with self.packing[drive]:
            if not folder.exists():
                config = _BASE, "--output", folder
                options = words(lists(self.root, drive))
                jobs = "--jobs", 4
                log = self.args.output / f"pack_{drive}.log"
                self.command(log, "-m", "segtrain", "data", "pack", *config, *options, *jobs)
        return folder

    def work(self) -> None:
        while True:
            with self.next:
                if not self.todo or time.monotonic() >= self.end:
                    return
                drive, seed, recipe = self.todo.pop(0)
            run = self.args.output / f"{recipe}-{drive}-{seed}-{self.args.steps}"
            if not (run / "scores.json").exists():
                self.train(run, recipe, drive, seed)

    def train(self, run: Path, recipe: str, drive: str, seed: int) -> None:
        settings = [
            *(setting for part in recipe.split("+") for setting in RECIPES[part]),
            *lists(self.root, drive),
            f"data.pack={self.pack(drive)}",
            f"data.num_workers={self.args.workers}",
            f"seed={seed}",
            f"train.steps={self.args.steps}",
            "eval.every_steps=null",
            "checkpoint.every_steps=1000000",
            "log.every_steps=100",
        ]
        options = words([*settings, *self.args.set])
        train = "train", _BASE, *self.where, *options
        log, start = run.with_suffix(".log"), time.monotonic()
        if self.command(log, "-m", "segtrain", *train, "--output", run, "--resume"):
            (run / "minutes").write_text(f"{(time.monotonic() - start) / 60:.2f}")
            self.command(log, __file__, *sys.argv[1:], "--score", run)


def table(output: Path) -> None:
    print("recipe                        left out  seed  steps  minutes  images/s  mIoU at scale")
    for run in sorted(output.glob("*-*-*-*/scores.json")):
        recipe, drive, seed, steps = run.parent.name.split("-")
        minutes = float((run.parent / "minutes").read_text())
        scores = json.loads(run.read_text())
        speeds = re.findall(r"([\d.,]+) img/s", (run.parent / "train.log").read_text())
        beside = "  ".join(f"{scale}: {100 * score:.1f}" for scale, score in scores.items())
        print(f"{recipe:30}{drive:8}{seed:>6}{steps:>7}{minutes:9.1f}{speeds[-1]:>10}  {beside}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--data", type=Path, required=True, help="root of CamVid")
    parser.add_argument("--output", type=Path, required=True, help="folder of the runs")
    parser.add_argument("--recipe", nargs="+", default=["base"], help=", ".join(RECIPES))
    parser.add_argument("--drive", nargs="+", choices=(*DRIVES, "seen"), default=DRIVES)
    parser.add_argument("--seed", nargs="+", type=int, default=[0])
    parser.add_argument("--steps", type=int, default=2500)
    parser.add_argument("--minutes", type=float, default=1e4)
    parser.add_argument("--scales", nargs="+", default=["1.0", "1.5", "2.0"])
    parser.add_argument("--jobs", type=int, default=4, help="runs beside each other")
    parser.add_argument("--workers", type=int, default=3, help="of each run, which read data")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--set", action="append", default=[], help="for all runs")
    parser.add_argument("--score", type=Path, help=argparse.SUPPRESS)
    args = parser.parse_args()
    if unknown := {part for name in args.recipe for part in name.split("+")} - {*RECIPES}:
        parser.error(f"unknown recipe: {', '.join(sorted(unknown))}")
    tries = Tries(args)
    if args.score:
        score(args.score, args.scales, tries.where)
        return
    write_lists(tries.root, args.data)
    threads = [threading.Thread(target=tries.work) for _ in range(args.jobs)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    table(args.output)


if __name__ == "__main__":
    main()
