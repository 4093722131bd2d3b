"""train.split on unequal ranks: throughput with even and with measured splits, and the losses.

Two ranks train a config, each on a core of its own; on the second core runs an endless loop too, so
that this rank has half of its time.

    python tools/split_trial.py CONFIG --output DIR --set train.steps=100
"""

import argparse
import json
import os
import re
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

CORES = sorted(os.sched_getaffinity(0))


def main() -> None:
    """Keeps the second core busy, and compares."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    loop = f"import os; os.sched_setaffinity(0, {{{CORES[1]}}})\nwhile True: pass"
    beside = subprocess.Popen([sys.executable, "-c", loop])
    try:
        compare(args)
    finally:
        beside.kill()


def compare(args: argparse.Namespace) -> None:
    """Trains with each split and prints a line each."""
    base = None
    for split in ("even", "measured"):
        directory = args.output / split
        lines = train(args.config, directory, [*args.set, f"train.split={split}"])
        rates = [line["images_per_s"] for line in metrics(directory) if "images_per_s" in line]
        rate = median(rates[len(rates) // 2 :])
        base = base or rate
        print(f"{split:<9} {rate:.2f} images/s, {rate / base:.2f} times even")
        for line in lines:
            print(f"  {line}")
    first, second = (
        [x["train/loss"] for x in metrics(args.output / s) if "train/loss" in x]
        for s in ("even", "measured")
    )
    apart = max(abs(a - b) / abs(a) for a, b in zip(first, second, strict=True))
    print(f"losses differ by at most {apart:.1e} of themselves")


def train(config: str, directory: Path, options: list[str]) -> list[str]:
    """Trains on two ranks, of which the second is slow; what the log says of the split."""
    command = [sys.executable, "-m", "segtrain", "train", config, "--output", str(directory)]
    command += ["--nproc", "2", "--device", "cpu", *(f"--set={option}" for option in options)]
    process = subprocess.Popen(command)
    threading.Thread(target=pin_ranks, args=(process,), daemon=True).start()
    if process.wait():
        raise SystemExit(process.returncode)
    log = (directory / "train.log").read_text().splitlines()
    words = ("split ", "weights    sha256")
    return [line.partition(" INFO ")[2] for line in log if any(f"INFO {w}" in line for w in words)]


def pin_ranks(launcher: subprocess.Popen) -> None:
    """Keeps all threads of rank i on the i-th core, until the launcher ends."""
    while launcher.poll() is None:
        for path in Path("/proc").glob("[0-9]*/environ"):
            with suppress(OSError, IndexError):
                parent = path.with_name("stat").read_text().rpartition(")")[2].split()[1]
                found = re.search(rb"(?:^|\0)RANK=(\d)\0", path.read_bytes())
                if int(parent) == launcher.pid and found:
                    for task in path.with_name("task").iterdir():
                        os.sched_setaffinity(int(task.name), {CORES[int(found[1])]})
        time.sleep(1)


def metrics(directory: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
