"""Writes scenes as the files of a data set: the same bytes for any number of processes."""

import argparse
import json
from functools import partial
from pathlib import Path

import cv2
import numpy as np

from segtrain.data.read.concurrent import for_each_pair
from segtrain.desk.synthetic.scene import draw_scene
from segtrain.distributed.machine import num_cores, process_pool
from segtrain.errors import ConfigError, DataError
from segtrain.files import write_atomic
from segtrain.text import printable

# Raise it when the same (seed, split, index) gives another picture than before, so that folders
# drawn by an older segtrain are not taken for new ones.
DRAWING_VERSION = 4

_CITIES = {"train": ("ashdown", "brookfield", "carlow"), "val": ("dunmore",)}
_SPLIT_KEY = {"train": 1, "val": 2}
_SCENES_PER_PROCESS = 8
# Smaller ones have no room for the things that are drawn.
_LEAST_PX = 16
# Noise hardly compresses: a higher level takes five times as long for a twentieth of the bytes.
_PNG = (cv2.IMWRITE_PNG_COMPRESSION, 1)


def main(args: argparse.Namespace) -> int:
    """The command `segtrain data synth ROOT`; returns the exit code."""
    size = tuple(args.size)
    if min(size) < _LEAST_PX:
        raise ConfigError(f"--size {size[0]} {size[1]}: a scene has at least {_LEAST_PX} px a side")
    counts = {"train": args.num_train, "val": args.num_val}
    drawn = write_dataset(args.root, counts, size=size, seed=args.seed, jobs=args.jobs)
    print(
        f"{printable(args.root)}: {args.num_train} train and {args.num_val} val scenes of "
        f"{size[0]}x{size[1]}, {drawn} drawn, {sum(counts.values()) - drawn} there already"
    )
    return 0


def write_dataset(
    root: Path, counts: dict[str, int], *, size: tuple[int, int], seed: int, jobs: int | None
) -> int:
    """Draws the splits train and val under `root`; returns how many scenes were missing and drawn.

    The bytes of a file depend on seed, split, index and size alone. counts: scenes per split.
    size: (H, W) in pixels. jobs: processes; None: one per core.

    Raises:
        DataError: `root` holds something else, or scenes drawn with other settings.
        ExecutionError: a process was killed.
    """
    settings = {"drawing_version": DRAWING_VERSION, "seed": seed, "size": list(size)}
    _claim(root, settings | {f"num_{split}": count for split, count in counts.items()})
    scenes = [(split, index) for split, count in counts.items() for index in range(count)]
    # A file is complete when it appears under its name: its presence is enough.
    missing = [one for one in scenes if not all(path.is_file() for path in _paths(root, *one))]
    draw = partial(_draw, root=root, size=size, seed=seed)
    useful = -(-len(missing) // _SCENES_PER_PROCESS)
    with process_pool(min(jobs or num_cores(), useful)) as pool:
        for _ in for_each_pair(draw, missing, pool, "drawing"):
            pass
    return len(missing)


def _claim(root: Path, settings: dict[str, object]) -> None:
    """Writes the settings into an empty folder, or checks that they are those of its content."""
    path, text = root / "synthetic.json", json.dumps(settings, indent=2) + "\n"
    if not root.exists() or (root.is_dir() and not any(root.iterdir())):
        root.mkdir(parents=True, exist_ok=True)
        write_atomic(path, text, durable=False)
    elif not path.is_file() or path.read_bytes() != text.encode():
        raise DataError(
            f"{printable(root)}: expected an empty folder, or scenes that synthetic.json says were "
            f"drawn with {settings}; name another folder, or delete this one"
        )


def _paths(root: Path, split: str, index: int) -> tuple[Path, Path, Path]:
    """Where the image, the label ids and the instances of a scene lie."""
    city = _CITIES[split][index % len(_CITIES[split])]
    stem = f"{city}_{index:06d}_000019"
    image = root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png"
    label = root / "gtFine" / split / city / f"{stem}_gtFine"
    return image, *(Path(f"{label}_{kind}.png") for kind in ("labelIds", "instanceIds"))


def _draw(scene: tuple[str, int], root: Path, size: tuple[int, int], seed: int) -> None:
    split, index = scene
    rng = np.random.default_rng((seed, _SPLIT_KEY[split], index))
    image, *labels = draw_scene(rng, size)
    pictures = (cv2.cvtColor(image, cv2.COLOR_RGB2BGR), *labels)
    for path, picture in zip(_paths(root, split, index), pictures, strict=True):
        _, data = cv2.imencode(".png", picture, _PNG)
        path.parent.mkdir(parents=True, exist_ok=True)
        write_atomic(path, data.tobytes(), durable=False)
