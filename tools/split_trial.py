"""train.split on unequal ranks: throughput with even and with measured splits, and the losses.

Two ranks train a config; the second is slowed: stopped and continued by signals, every 20 ms, so
that it has a part of its time only.

    python tools/split_trial.py CONFIG --output DIR --speed 0.5 --set train.steps=100
"""

import argparse
import json
import os
import signal
import subprocess
import sys
import threading
import time
from contextlib import suppress
from pathlib import Path
from statistics import median

_PERIOD_S = 0.02


def main() -> None:
    """Trains with each split and prints a line each."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("config")
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--speed", type=float, default=0.5, help="of rank 1, beside rank 0")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    args = parser.parse_args()
    base = None
    for split in ("even", "measured"):
        directory = args.output / split
        lines = train(args.config, directory, [*args.set, f"train.split={split}"], args.speed)
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


def train(config: str, directory: Path, options: list[str], speed: float) -> list[str]:
    """Trains on two ranks, of which the second is slowed; what the log says of the split."""
    command = [sys.executable, "-m", "segtrain", "train", config, "--output", str(directory)]
    command += ["--nproc", "2", "--device", "cpu", *(f"--set={option}" for option in options)]
    process = subprocess.Popen(command)
    threading.Thread(target=slow_down, args=(process, speed), daemon=True).start()
    if process.wait():
        raise SystemExit(process.returncode)
    log = (directory / "train.log").read_text().splitlines()
    words = ("split ", "weights ")
    return [line.partition(" INFO ")[2] for line in log if any(f"INFO {w}" in line for w in words)]


def slow_down(launcher: subprocess.Popen, speed: float) -> None:
    """Lets rank 1 have this part of its time, until it ends."""
    while launcher.poll() is None:
        pid = rank_1(launcher.pid)
        with suppress(ProcessLookupError):
            while pid is not None:
                os.kill(pid, signal.SIGSTOP)
                time.sleep(_PERIOD_S * (1 - speed))
                os.kill(pid, signal.SIGCONT)
                time.sleep(_PERIOD_S * speed)
        time.sleep(0.1)


def rank_1(launcher: int) -> int | None:
    """The process with RANK=1 among the children of the launcher."""
    for path in Path("/proc").glob("[0-9]*/environ"):
        with suppress(OSError, IndexError):
            parent = path.with_name("stat").read_text().rpartition(")")[2].split()[1]
            if int(parent) == launcher and b"\0RANK=1\0" in b"\0" + path.read_bytes():
                return int(path.parent.name)
    return None


def metrics(directory: Path) -> list[dict]:
    """The lines of metrics.jsonl."""
    return [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]


if __name__ == "__main__":
    main()
