"""A small data set and a small experiment on it, for tests that train."""

import json
import multiprocessing
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml

COLORS = np.array([(90, 60, 70), (70, 140, 60), (60, 90, 200), (200, 190, 90)], dtype=np.uint8)


def write_data(root: Path, num_images: int = 8, size: tuple[int, int] = (56, 72)) -> None:
    """Noisy coloured shapes with 4 classes and some ignored: {images,labels}/<split>/."""
    rng = np.random.default_rng(0)
    (root / "classes.yaml").write_text("classes: [ground, plant, water, sand]\nignore_ids: [255]\n")
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for i in range(num_images if split == "train" else 3):
            label = np.zeros(size, dtype=np.uint8)
            for value in (1, 2, 3, 255):
                center = (int(rng.integers(size[1])), int(rng.integers(size[0])))
                cv2.circle(label, center, int(rng.integers(6, 20)), value, -1)
            image = COLORS[label % 4].astype(np.int16) + rng.normal(0, 20, (*size, 3))
            cv2.imwrite(str(root / f"images/{split}/{i}.png"), image.clip(0, 255).astype(np.uint8))
            cv2.imwrite(str(root / f"labels/{split}/{i}.png"), label)


def experiment(root: Path, **sections: dict[str, Any]) -> dict[str, Any]:
    """Everything at once that could tell the ranks apart: augmentation, dropout, auxiliary loss."""
    options: dict[str, dict[str, Any]] = {
        "data": {
            "layout": "folders",
            "root": str(root),
            "classes": str(root / "classes.yaml"),
            "num_workers": 0,
        },
        "augment": {
            "crop_size": [41, 57],
            "scale_range": [0.6, 1.5],
            "rotate_deg": 10.0,
            "blur_prob": 0.5,
            "color_prob": 0.5,
            "max_class_share": 0.75,
        },
        "model": {
            "backbone": "resnet18",
            "output_stride": 16,
            "head_channels": 16,
            "aux_channels": 16,
        },
        "train": {"steps": 20, "batch_size": 5, "lr": 0.02, "precision": "float64"},
        "log": {"every_steps": 1},
        "eval": {"every_steps": None},
    }
    for section, values in sections.items():
        options.setdefault(section, {}).update(values)
    return options


def write_config(path: Path, options: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(options))
    return path


def train(config: Path, directory: Path, resume: bool = False, **options: bool) -> int:
    """The whole `segtrain train` of one rank, without the launcher."""
    from segtrain.config import load_config
    from segtrain.train import run

    # A process of a fork server would have one of its own for the loader's workers.
    multiprocessing.set_start_method(None, force=True)
    cpu = torch.device("cpu")
    return run(load_config(config), directory, device=cpu, resume=resume, **options)


def losses(directory: Path, tag: str = "train/loss") -> list[float]:
    """The losses of every step that a run logged."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line[tag] for line in lines if tag in line]
