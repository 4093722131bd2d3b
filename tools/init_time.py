"""Times `segtrain init`: python tools/init_time.py FOLDER [--pairs 32 2000 100000].

Draws folders of pairs below FOLDER, runs init on each, and prints what the command and all of its
processes took: seconds of processors and of the clock, and the largest process.
"""

import argparse
import os
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np

# Of so many pairs each file is drawn; of more, files are links to these.
_DRAWN = 500
_LARGE, _TINY = (360, 480), (64, 80)
_MOST_LARGE = 2000


def draw(folder: Path, number: int, size: tuple[int, int]) -> None:
    """Writes `number` noisy JPEGs of (height, width), and masks of three classes and a background.

    Those that are there already stay.
    """
    height, width = size
    rng = np.random.default_rng(0)
    for kind in ("images", "masks"):
        (folder / kind).mkdir(parents=True, exist_ok=True)
    for i in range(number):
        image, mask = folder / f"images/t{i:06}.jpg", folder / f"masks/t{i:06}.png"
        if mask.exists():
            continue
        if i >= _DRAWN:
            for file in (image, mask):
                file.hardlink_to(file.with_stem(f"t{i % _DRAWN:06}"))
            continue
        label = np.zeros(size, np.uint8)
        for k in (1, 2, 3):
            center = int(rng.integers(width)), int(rng.integers(height))
            cv2.circle(label, center, int(rng.integers(height // 8, height // 3)), k, -1)
            label[:6, 6 * k : 6 * k + 6] = k
        pixels = 60 * label[..., None] + rng.normal(40, 12, (*size, 3))
        cv2.imwrite(str(image), pixels.clip(0, 255).astype(np.uint8))
        cv2.imwrite(str(mask), label)


def measure(folder: Path) -> tuple[float, float, float]:
    """Seconds of processors, seconds, and MiB of the largest process of init on the folder."""
    with tempfile.TemporaryDirectory() as made:
        words = "-m", "segtrain", "init", str(folder), "--output", f"{made}/experiment"
        began = time.monotonic()
        process = subprocess.Popen([sys.executable, *words], stdout=subprocess.DEVNULL)
        _, process.returncode, usage = os.wait4(process.pid, 0)
        elapsed_s = time.monotonic() - began
    if process.returncode:
        sys.exit(f"segtrain init {folder} failed")
    return usage.ru_utime + usage.ru_stime, elapsed_s, usage.ru_maxrss / 1024


def main() -> None:
    """Prints a line for each number of pairs."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("folder", type=Path)
    parser.add_argument("--pairs", type=int, nargs="+", default=[32, 2000, 100_000])
    args = parser.parse_args()
    print("| pairs | size | processor s | s | MiB |\n|---|---|---|---|---|")
    for number in args.pairs:
        size = _LARGE if number <= _MOST_LARGE else _TINY
        draw(args.folder / str(number), number, size)
        figures = measure(args.folder / str(number))
        row = [f"{number:,}", "x".join(map(str, size)), *(f"{x:.1f}" for x in figures)]
        print(f"| {' | '.join(row)} |", flush=True)


if __name__ == "__main__":
    main()
