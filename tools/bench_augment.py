"""Times the training augmentation beside the usual pipeline on one core, also with decoding.

The usual pipeline resizes the whole image and label, rotates them if asked, pads, crops and flips;
it is given the same draws. With decoding, both first read image and label from PNG files: the usual
one by cv2.imread, ours with the checks of a training. Rounds alternate between the two, so a busy
machine troubles both alike: read the ratio.
Run: python tools/bench_augment.py [--samples N] [--rounds N]
"""

import argparse
import statistics
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

import cv2
import numpy as np

from segtrain.config import AugmentConfig
from segtrain.data.class_file import load_class_file
from segtrain.data.decode import read_image, read_label
from segtrain.data.geometry import Placement, resample_image, resample_label
from segtrain.data.transforms import TrainTransform, draw_placement
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


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--samples", type=int, default=24, help="draws of each case")
    parser.add_argument("--rounds", type=int, default=5, help="repetitions; the median is shown")
    options = parser.parse_args()
    cv2.setNumThreads(0)  # as in a loader worker
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
