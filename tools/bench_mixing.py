"""Times a training sample with and without class-uniform sampling, class mix and MixUp.

On one core, from PNG files of 1024x2048 pixels as in Cityscapes, decoding included. Rounds take
turns, so a busy machine troubles all alike: read the ratio. A second table says what measuring the
centroids adds to reading a label.
Run: python tools/bench_mixing.py [--samples N] [--rounds N]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np
import torch

from segtrain.config import AugmentConfig, DataConfig
from segtrain.data import open_dataset
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.labels import read_label
from segtrain.data.sample.centroids import label_centroids, measure_centroids
from segtrain.data.sample.stream import NO_MIXING, ClassUniform, Mixing, TrainStream
from segtrain.data.sample.transforms import TrainTransform

SIZE, CLASSES, IMAGES = (1024, 2048), 19, 4
CROP = (713, 713)


def write_scenes(root: Path) -> SegDataset:
    """Smooth noise with a street's worth of regions in 19 classes."""
    rng = np.random.default_rng(0)
    names = ", ".join(f"class{i}" for i in range(CLASSES))
    (root / "classes.yaml").write_text(f"classes: [{names}]\nignore_ids: [255]\n")
    for kind in ("images", "labels"):
        (root / kind / "train").mkdir(parents=True)
    for i in range(IMAGES):
        noise = rng.integers(0, 256, (*SIZE, 3), dtype=np.uint8)
        image = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 4), None, 0, 255, cv2.NORM_MINMAX)
        regions = rng.random((8, 16)).astype(np.float32)
        regions = cv2.resize(regions, SIZE[::-1], interpolation=cv2.INTER_CUBIC)
        label = (regions.clip(0, 0.999) * CLASSES).astype(np.uint8)
        cv2.imwrite(str(root / f"images/train/{i}.png"), image)
        cv2.imwrite(str(root / f"labels/train/{i}.png"), label)
    data = DataConfig(layout="folders", root=str(root), classes=str(root / "classes.yaml"))
    return open_dataset(data, "train")


def streams(dataset: SegDataset, root: Path) -> dict[str, TrainStream]:
    transform = TrainTransform(AugmentConfig(crop_size=CROP), mean=(124, 116, 104))
    centroids = measure_centroids(
        dataset, 1024, root / "centroids.json", device=torch.device("cpu"), keep=False
    )
    uniform = ClassUniform(centroids, fraction=0.5)

    def made(mixing: Mixing, class_uniform: ClassUniform | None = None) -> TrainStream:
        return TrainStream(
            dataset,
            transform,
            stream_seed=0,
            batch_size=1,
            class_uniform=class_uniform,
            mixing=mixing,
        )

    return {
        "plain": made(NO_MIXING),
        "class_uniform 0.5": made(NO_MIXING, uniform),
        "class_mix_prob 0.5": made(Mixing(None, 0.5)),
        "class_mix_prob 1": made(Mixing(None, 1.0)),
        "mixup_alpha 0.2": made(Mixing(0.2, 0.0)),
        "mixup_alpha 1": made(Mixing(1.0, 0.0)),
        "all: 0.5, 0.5, 0.2": made(Mixing(0.2, 0.5), uniform),
    }


def rounds_ms(works: dict[str, Callable[[], object]], rounds: int) -> dict[str, float]:
    """The median time of each."""
    times: dict[str, list[float]] = {name: [] for name in works}
    for _ in range(rounds):
        for name, work in works.items():
            # The time of this process alone: others on the machine hardly show.
            began = time.process_time()
            work()
            times[name].append((time.process_time() - began) * 1e3)
    return {name: statistics.median(values) for name, values in times.items()}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--samples", type=int, default=24, help="of each round (default: 24)")
    parser.add_argument("--rounds", type=int, default=5, help="(default: 5)")
    args = parser.parse_args()
    cv2.setNumThreads(0)
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        dataset = write_scenes(root)
        works = {
            name: lambda stream=stream: [stream[step, 0] for step in range(args.samples)]
            for name, stream in streams(dataset, root).items()
        }
        found = rounds_ms(works, args.rounds)
        print(f"{'a sample, crop 713x713':24}  {'ms':>6}  ratio")
        for name, value in found.items():
            print(f"{name:24}  {value / args.samples:6.1f}  {value / found['plain']:5.2f}")

        paths = [pair.label for pair in dataset.pairs]
        labels = [read_label(path, dataset.classes) for path in paths]
        works = {
            "read": lambda: [read_label(path, dataset.classes) for path in paths],
            "centroids": lambda: [label_centroids(label, 1024) for label in labels],
        }
        found = rounds_ms(works, args.rounds)
        print(f"\n{'a label, 1024x2048':24}  {'ms':>6}  ratio")
        for name, value in found.items():
            print(f"{name:24}  {value / IMAGES:6.1f}  {value / found['read']:5.2f}")


if __name__ == "__main__":
    main()
