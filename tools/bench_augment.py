"""Times the training augmentation beside the usual pipeline on one core, also with decoding.

The usual pipeline resizes the whole image and label, rotates them if asked, pads, crops and flips;
it is given the same draws. With decoding, both first read image and label from PNG files: the usual
one by cv2.imread, ours with the checks of a training. Rounds alternate between the two, so a busy
machine troubles both alike: read the ratio.

With --path: samples a second of one process, from PNG files or a pack to the finished sample, with
and without changes of colour. Wall time counts what others do on the machine, processor time not.
Run: python tools/bench_augment.py [--samples N] [--rounds N] [--path]
"""

import argparse
import json
import statistics
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import cv2
import numpy as np
import torch

from segtrain.cli import main as segtrain_main
from segtrain.config import AugmentConfig, Config, load_config
from segtrain.data import open_dataset
from segtrain.data.read.classes import load_class_file
from segtrain.data.read.decode import read_image
from segtrain.data.read.labels import read_label
from segtrain.data.sample.geometry import Placement, resample_image, resample_label
from segtrain.data.sample.stream import TrainStream
from segtrain.data.sample.transforms import TrainTransform, draw_placement
from segtrain.distributed.machine import keep_freed_memory
from segtrain.types import IGNORE_INDEX

MEAN = (124, 116, 104)
CASES = [
    ("1024x2048 -> 512x1024", (1024, 2048), {"crop_size": (512, 1024)}),
    ("1024x2048 -> 713x713", (1024, 2048), {"crop_size": (713, 713)}),
    (
        "1024x2048 -> 713x713, turned by 10",
        (1024, 2048),
        {"crop_size": (713, 713), "rotate_deg": 10.0},
    ),
    ("360x480 -> 224x288", (360, 480), {"crop_size": (224, 288)}),
]


def usual(
    image: np.ndarray, label: np.ndarray, placement: Placement
) -> tuple[np.ndarray, np.ndarray]:
    rows, columns = placement.rows, placement.columns
    size = (columns.scaled, rows.scaled)
    image = cv2.resize(image, size, interpolation=cv2.INTER_LINEAR)
    label = cv2.resize(label, size, interpolation=cv2.INTER_NEAREST)
    ignore = (IGNORE_INDEX,)
    if placement.angle_deg:
        matrix = cv2.getRotationMatrix2D((size[0] / 2, size[1] / 2), placement.angle_deg, 1)
        image = cv2.warpAffine(image, matrix, size, flags=cv2.INTER_LINEAR, borderValue=MEAN)
        label = cv2.warpAffine(label, matrix, size, flags=cv2.INTER_NEAREST, borderValue=ignore)
    below = max(0, rows.crop - rows.scaled)
    right = max(0, columns.crop - columns.scaled)
    if below or right:
        border = (0, below, 0, right, cv2.BORDER_CONSTANT)
        image = cv2.copyMakeBorder(image, *border, value=MEAN)
        label = cv2.copyMakeBorder(label, *border, value=ignore)
    top = min(round(rows.start * rows.factor), image.shape[0] - rows.crop)
    left = min(round(columns.start * columns.factor), image.shape[1] - columns.crop)
    window = np.s_[top : top + rows.crop, left : left + columns.crop]
    image, label = image[window], label[window]
    if placement.flip:
        return cv2.flip(image, 1), cv2.flip(label, 1)
    return np.ascontiguousarray(image), np.ascontiguousarray(label)


def ours(
    image: np.ndarray, label: np.ndarray, placement: Placement
) -> tuple[np.ndarray, np.ndarray]:
    return resample_image(image, placement, fill=MEAN), resample_label(label, placement)


class Files:
    """A scene as PNG files, read as the usual pipelines do and as a training of segtrain does."""

    def __init__(self, folder: Path, image: np.ndarray, label: np.ndarray) -> None:
        self._image, self._label = folder / "image.png", folder / "label.png"
        cv2.imwrite(str(self._image), image[..., ::-1])
        cv2.imwrite(str(self._label), label)
        self._classes = load_class_file("cityscapes")

    def usual(self, placement: Placement) -> None:
        image = cv2.cvtColor(cv2.imread(str(self._image)), cv2.COLOR_BGR2RGB)
        usual(image, cv2.imread(str(self._label), cv2.IMREAD_UNCHANGED), placement)

    def ours(self, placement: Placement) -> None:
        ours(read_image(self._image), read_label(self._label, self._classes), placement)


def time_ms(pipeline: Callable[..., object], calls: list[tuple[object, ...]]) -> float:
    # The time of this process alone: others on the machine hardly show.
    start = time.process_time()
    for arguments in calls:
        pipeline(*arguments)
    return (time.process_time() - start) / len(calls) * 1e3


def median_ms(
    pipelines: list[Callable[..., object]], make_calls: list[Callable[[], list]], rounds: int
) -> list[float]:
    times: list[list[float]] = [[] for _ in pipelines]
    for _ in range(rounds):
        for i, (pipeline, calls) in enumerate(zip(pipelines, make_calls, strict=True)):
            times[i].append(time_ms(pipeline, calls()))
    return [statistics.median(values) for values in times]


def scene(size: tuple[int, int]) -> tuple[np.ndarray, np.ndarray]:
    noise = np.random.default_rng(0).integers(0, 256, (*size, 3), dtype=np.uint8)
    image = cv2.normalize(cv2.GaussianBlur(noise, (0, 0), 4), None, 0, 255, cv2.NORM_MINMAX)
    return image, image[..., 0] // 16


def write_data(root: Path, size: tuple[int, int]) -> Config:
    """Scenes as PNG files, a pack of them, and a config that has both."""
    image, label = scene(size)
    for split, number in (("train", 4), ("val", 1)):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for i in range(number):
            shifted = np.roll(image, 100 * i, axis=1)
            cv2.imwrite(str(root / f"images/{split}/{i}.png"), shifted[..., ::-1])
            cv2.imwrite(str(root / f"labels/{split}/{i}.png"), np.roll(label, 100 * i, axis=1))
    classes = "".join(f"  - class{i}\n" for i in range(16))
    (root / "classes.yaml").write_text(f"classes:\n{classes}")
    config, data = root / "c.yaml", {"layout": "folders", "root": str(root)}
    data |= {"classes": str(root / "classes.yaml")}
    config.write_text(json.dumps({"data": data, "model": {}, "train": {"steps": 1}}))
    if segtrain_main(["data", "pack", str(config), "--output", str(root / "pack")]):
        raise SystemExit(1)
    return load_config(config)


def path_rows(size: tuple[int, int], crop: tuple[int, int], num: int, rounds: int) -> Iterator[str]:
    """Samples a second from files and from a pack; the median of rounds that alternate."""
    keep_freed_memory()  # as in a loader worker
    torch.set_num_threads(1)
    with tempfile.TemporaryDirectory() as folder:
        data = write_data(Path(folder), size).data
        streams = {}
        for source, pack in (("PNG", None), ("pack", str(Path(folder) / "pack"))):
            dataset = open_dataset(data.model_copy(update={"pack": pack}), "train")
            for colors, prob in (("", 0.0), (", colours", 0.5)):
                augment = AugmentConfig(crop_size=crop, color_prob=prob)
                streams[source + colors] = TrainStream(
                    dataset, TrainTransform(augment, mean=data.mean), stream_seed=0, batch_size=num
                )
        times: dict[str, list[tuple[float, float]]] = {name: [] for name in streams}
        for step in range(rounds + 1):
            for name, stream in streams.items():
                began = time.perf_counter(), time.process_time()
                for position in range(num):
                    stream[step, position]
                ended = time.perf_counter(), time.process_time()
                times[name].append((ended[0] - began[0], ended[1] - began[1]))
        for name, found in times.items():
            # Of the first round, pages are new and CRCs are checked.
            columns = zip(*found[1:], strict=True)
            wall, processor = (num / statistics.median(column) for column in columns)
            yield f"{name:36}{wall:10.1f}{processor:12.1f}"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=24, help="draws of each case")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; the median is shown")
    parser.add_argument("--path", action="store_true", help="samples a second of the whole path")
    options = parser.parse_args()
    cv2.setNumThreads(0)  # as in a loader worker
    if options.path:
        print(f"{'samples/s, 1024x2048 -> 713x713':36}{'wall':>10}{'processor':>12}")
        for line in path_rows((1024, 2048), (713, 713), options.samples, options.rounds):
            print(line)
        return
    print(
        f"{'ms per sample':36}{'usual':>8}{'ours':>8}{'ratio':>8}{'+ share':>9}{'+ colours':>11}"
        f"  decoding too: {'usual':>8}{'ours':>8}{'ratio':>8}"
    )
    for name, size, settings in CASES:
        with tempfile.TemporaryDirectory() as folder:
            print(row(name, size, settings, Path(folder), options.samples, options.rounds))


def row(
    name: str, size: tuple[int, int], settings: dict, folder: Path, num: int, rounds: int
) -> str:
    image, label = scene(size)
    files = Files(folder, image, label)
    geometry = AugmentConfig(**settings)
    drawn = [draw_placement(geometry, label, np.random.default_rng(i)) for i in range(num)]
    placed = [(image, label, placement) for placement in drawn]
    share = AugmentConfig(**settings, max_class_share=0.75)
    colors = AugmentConfig(**settings, max_class_share=0.75, color_prob=0.5, hue=0.1)
    pipelines = [TrainTransform(config, mean=MEAN) for config in (share, colors)]

    def seeded() -> list:
        return [(image, label, np.random.default_rng(i)) for i in range(num)]

    before, after, with_share, with_colors, all_before, all_after = median_ms(
        [usual, ours, *pipelines, files.usual, files.ours],
        [lambda: placed] * 2 + [seeded] * 2 + [lambda: [(one,) for one in drawn]] * 2,
        rounds,
    )
    return (
        f"{name:36}{before:8.2f}{after:8.2f}{before / after:8.2f}"
        f"{with_share:9.2f}{with_colors:11.2f}"
        f"{all_before:24.2f}{all_after:8.2f}{all_before / all_after:8.2f}"
    )


if __name__ == "__main__":
    main()
