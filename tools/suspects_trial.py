"""Damages a twentieth of the training masks, trains, and counts how many `segtrain suspects` finds.

    python tools/suspects_trial.py camvid_small --data data/camvid --output /tmp/camvid
    python tools/suspects_trial.py demo --data data/scenes --output /tmp/scenes

In a copy of the data, masks drawn by a seed are shifted by 8 px, have two large classes swapped, or
lose an object to the class around it. Printed: how many are among the first 5 and 10 % of the
ranking, beside a ranking by the mean loss of all pixels in the later half of the training, and
chance; how many of those that stand out are damaged; and the ranks by kind. Started again, it goes
on.
"""

import argparse
import json
import shutil
import subprocess
import sys
from collections import defaultdict
from pathlib import Path

import cv2
import numpy as np

from segtrain.checkpoint.format import load
from segtrain.config import load_config, recipes
from segtrain.data import open_dataset
from segtrain.data.read.dataset import SegDataset
from segtrain.results.suspects import rank
from segtrain.training.sample_losses import LOSS, PIXELS, UNITS

SHIFT, KINDS = 8, ("shifted", "swapped", "left out")
LEAST_OBJECT = 0.005  # of the image
OPTIONS = ("eval.every_steps=null", "log.charts=false", "checkpoint.every_steps=100")


def damaged(label: np.ndarray, kind: str, known: set[int]) -> np.ndarray | None:
    """The label (H, W) with this damage; None: it has no classes or object that are large enough.

    known: the values of classes.
    """
    if kind == "shifted":
        return np.roll(label, (SHIFT, SHIFT), (0, 1))
    values, counts = np.unique(label[np.isin(label, list(known))], return_counts=True)
    largest = values[np.argsort(-counts)]
    found = label.copy()
    if kind == "swapped":
        if len(largest) < 3:
            return None
        found[label == largest[1]], found[label == largest[2]] = largest[2], largest[1]
        return found
    for value in largest[3:]:
        _, parts, facts, _ = cv2.connectedComponentsWithStats((label == value).astype(np.uint8))
        areas = facts[1:, cv2.CC_STAT_AREA]
        if areas.max() >= LEAST_OBJECT * label.size:
            part = (parts == 1 + areas.argmax()).astype(np.uint8)
            ring = label[(cv2.dilate(part, np.ones((5, 5), np.uint8)) == 1) & (part == 0)]
            around, times = np.unique(ring, return_counts=True)
            found[part == 1] = around[times.argmax()]
            return found
    return None


def damage(dataset: SegDataset, seed: int) -> dict[str, str]:
    """Damages masks of the data set; the kind of each, by its name."""
    known = {value for one in dataset.classes.classes for value in one.ids}
    chosen: dict[str, str] = {}
    for i in np.random.default_rng(seed).permutation(len(dataset)):
        if len(chosen) == len(dataset) // 20:
            break
        kind, path = KINDS[len(chosen) % len(KINDS)], str(dataset.pairs[i].label)
        found = damaged(cv2.imread(path, cv2.IMREAD_UNCHANGED), kind, known)
        if found is not None:
            cv2.imwrite(path, found)
            chosen[dataset.name(i)] = kind
    return chosen


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="as of segtrain train")
    parser.add_argument("--data", type=Path, required=True, help="root of its data")
    parser.add_argument("--output", type=Path, required=True, help="new folder")
    parser.add_argument("--set", action="append", default=[], help="as of segtrain train")
    parser.add_argument("--seed", type=int, default=0, help="of the damage")
    args = parser.parse_args()
    run, options = args.output / "run", [f"data.root={args.output / 'data'}", *OPTIONS, *args.set]
    config = load_config(recipes.find(args.config).path, options)
    listed = args.output / "damaged.json"
    if not listed.exists():
        shutil.copytree(args.data, args.output / "data", copy_function=shutil.copyfile)
        chosen = damage(open_dataset(config.data, config.data.train_split), args.seed)
        listed.write_text(json.dumps(chosen))
    chosen = json.loads(listed.read_text())
    words = [word for text in options for word in ("--set", text)]
    command = [sys.executable, "-m", "segtrain", "train", args.config, *words]
    subprocess.run([*command, "--output", str(run), "--resume"], check=True)

    dataset = open_dataset(config.data, config.data.train_split)
    sums = load(run / "checkpoints/last.pt").sample_losses["sums"].numpy()
    kinds = [chosen.get(dataset.name(i)) for i in range(len(dataset))]
    suspects = rank(sums[..., LOSS] / UNITS, sums[..., PIXELS]).suspects
    ranking = [one.index for one in suspects]
    later = sums[len(sums) // 2 :].sum((0, 2))  # (N, 2)
    by_mean = np.argsort(-later[:, LOSS] / np.maximum(later[:, PIXELS], 1)).tolist()
    for share in (0.05, 0.1):
        first = round(share * len(dataset))
        counts = [sum(kinds[i] is not None for i in found[:first]) for found in (ranking, by_mean)]
        print(
            f"first {first}: {counts[0]} of {len(chosen)}, by the mean loss {counts[1]}, "
            f"chance {share * len(chosen):.1f}"
        )
    outliers = [one.index for one in suspects if one.stands_out]
    print(f"stand out: {len(outliers)}, damaged: {sum(kinds[i] is not None for i in outliers)}")
    places = defaultdict(list)
    for place, i in enumerate(ranking, start=1):
        if kinds[i]:
            places[kinds[i]].append(place)
    for kind, found in places.items():
        print(f"{kind:9} ranks {found}")


if __name__ == "__main__":
    main()
