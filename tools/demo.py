"""The main job on data that is drawn here: data set, training on two ranks, scores, export.

`make demo` runs this. Every step is a `segtrain` command, shown before it runs.
"""

import json
import shlex
import shutil
import subprocess
import sys
import time
from pathlib import Path

from commands import DEMO, command

DATA, RUN = Path("runs/demo_data"), Path("runs/demo")

# What configs/demo.yaml was made for.
NUM_TRAIN, NUM_VAL, SIZE = 700, 100, (128, 256)
NUM_PICTURES = 4


def main() -> int:
    """Runs the demonstration in the current directory and returns its exit code."""
    began = time.monotonic()
    for old in (RUN, DATA):
        if old.exists():
            print(f"removing {old}, of an earlier demonstration")
            shutil.rmtree(old)
    scores = RUN / "scores.json"
    evaluation = ["--json", scores, "--overlays", RUN / "overlays", "--num-overlays", NUM_PICTURES]
    drawing = ["--num-train", NUM_TRAIN, "--num-val", NUM_VAL, "--size", *SIZE]
    photos = DATA / "leftImg8bit/val"
    for arguments in (
        ["data", "synth", DATA, *drawing],
        ["train", DEMO, "--nproc", 2, "--device", "cpu", "--output", RUN],
        ["eval", RUN, "--device", "cpu", *evaluation],
        ["export", RUN, "--format", "onnx", "--output", RUN / "model.onnx"],
        ["predict", RUN, photos, "--device", "cpu", "--output", RUN / "predictions"],
    ):
        if code := shown(*arguments):
            return code
    report(json.loads(scores.read_text()), time.monotonic() - began)
    return 0


def shown(*arguments: object) -> int:
    """Shows and runs one command; its exit code."""
    print(f"\n$ segtrain {shlex.join(map(str, arguments))}", flush=True)
    return subprocess.run(command(*arguments)).returncode


def report(scores: dict, seconds: float) -> None:
    """What was reached and where it lies."""
    print(f"\nfinished in {seconds / 60:.1f} minutes: mIoU {scores['mIoU']:.3f}\n")
    for row in scores["classes"]:
        if row["IoU"] is not None:
            print(f"  {row['name']:16} IoU {row['IoU']:.3f}")
    print(f"\nrun          {RUN}  (config, log, metrics.jsonl, checkpoints, model.onnx)")
    print(f"pictures     {RUN / 'overlays'}, {RUN / 'predictions'}")
    print(f"curves       {Path(sys.executable).parent}/tensorboard --logdir {RUN}")
    print("your data    see data/README.md")


if __name__ == "__main__":
    sys.exit(main())
