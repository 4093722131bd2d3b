"""Writes scenes as files: the same bytes for any number of processes."""

import argparse
import json
import multiprocessing
import os
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

import cv2
import numpy as np
from tqdm import tqdm

from segtrain.data.synthetic.scene import draw_scene
from segtrain.errors import ConfigError, DataError
from segtrain.files import read_bytes, write_whole
from segtrain.text import MAX_NAME, printable

SETTINGS_FILE = "synthetic.json"
# Raise it when the same (seed, split, index) gives another picture than before, so that folders
# drawn by an older segtrain are not taken for new ones.
DRAWING_VERSION = 3

_CITIES = {"train": ("ashdown", "brookfield", "carlow"), "val": ("dunmore",)}
_SPLIT_KEY = {"train": 1, "val": 2}
_CHUNK = 8
_LEAST_SIDE_PX = 32
_MAX_BYTES = 100_000
# Noise hardly compresses: a higher level takes five times as long for a twentieth of the bytes.
_PNG = (cv2.IMWRITE_PNG_COMPRESSION, 1)


class _Job(NamedTuple):
    image: Path
    label: Path
    key: tuple[int, int, int]
    size: tuple[int, int]


def write_dataset(
    root: str | Path,
    *,
    num_train: int,
    num_val: int,
    size: tuple[int, int] = (256, 512),
    seed: int = 0,
    jobs: int | None = None,
) -> int:
    """Draws the splits train and val under `root`; returns how many images were missing and drawn.

    Called again with the same settings it draws what is missing, so an interrupted call is taken
    up. size: (height, width) in pixels. jobs: processes; None: one a core. The bytes of every file
    depend on seed, split, index and size alone.

    Raises:
        DataError: `root` holds something else, or the same with other settings.
        ValueError: a count below 1 or an image too small to draw on.
    """
    if num_train < 1 or num_val < 1:
        raise ValueError(f"expected at least 1 image a split, got {num_train} and {num_val}")
    if min(size) < _LEAST_SIDE_PX:
        raise ValueError(f"size: expected sides of at least {_LEAST_SIDE_PX} pixels, got {size}")
    root = Path(root)
    settings = {
        "drawing_version": DRAWING_VERSION,
        "seed": seed,
        "size": list(size),
        "num_train": num_train,
        "num_val": num_val,
    }
    _claim(root, settings)
    counts = {"train": num_train, "val": num_val}
    missing = [job for job in _jobs(root, counts, size, seed) if not _done(job)]
    for folder in {path.parent for job in missing for path in (job.image, job.label)}:
        folder.mkdir(parents=True, exist_ok=True)
    _run(missing, jobs or os.cpu_count() or 1)
    return len(missing)


def main(args: argparse.Namespace) -> int:
    """The command `segtrain data synth ROOT`; returns the exit code."""
    size = tuple(args.size)
    if min(size) < _LEAST_SIDE_PX:
        raise ConfigError(f"--size: expected sides of at least {_LEAST_SIDE_PX} pixels, got {size}")
    drawn = write_dataset(
        args.root,
        num_train=args.num_train,
        num_val=args.num_val,
        size=size,
        seed=args.seed,
        jobs=args.jobs,
    )
    total = args.num_train + args.num_val
    print(
        f"{printable(args.root)}: {args.num_train} train and {args.num_val} val scenes of "
        f"{size[0]}x{size[1]}, {drawn} drawn, {total - drawn} there already"
    )
    return 0


def _claim(root: Path, settings: dict[str, object]) -> None:
    """Records the settings in an empty folder, or checks that they are those of its content."""
    record = root / SETTINGS_FILE
    if not root.is_dir() and root.exists():
        raise DataError(f"{root}: expected a folder, found a file; name another folder")
    if record.is_file():
        found = _read(record)
        if found != settings:
            raise DataError(
                f"{record}: {root} holds scenes drawn with other settings "
                f"({_differences(found, settings)}); name another folder, or delete this one"
            )
        return
    if root.is_dir() and any(root.iterdir()):
        raise DataError(
            f"{root}: expected an empty folder or one written by `segtrain data synth`, "
            "found other files; name another folder"
        )
    root.mkdir(parents=True, exist_ok=True)
    _replace(record, (json.dumps(settings, indent=2) + "\n").encode())


def _read(record: Path) -> dict[str, object]:
    try:
        found = json.loads(read_bytes(record, _MAX_BYTES))
    except (ValueError, OSError):
        found = None
    if not isinstance(found, dict):
        raise DataError(
            f"{record}: expected the settings of `segtrain data synth` as JSON; delete it"
        )
    return found


def _differences(found: dict[str, object], settings: dict[str, object]) -> str:
    """Every setting that differs, the one on disk first."""
    keys = [key for key in {**settings, **found} if found.get(key) != settings.get(key)]
    return ", ".join(
        f"{printable(key, MAX_NAME)} {printable(found.get(key), MAX_NAME)}, "
        f"asked for {settings.get(key)}"
        for key in keys[:10]
    )


def _jobs(root: Path, counts: dict[str, int], size: tuple[int, int], seed: int) -> Iterator[_Job]:
    for split, count in counts.items():
        cities = _CITIES[split]
        for index in range(count):
            city = cities[index % len(cities)]
            stem = f"{city}_{index:06d}_000019"
            yield _Job(
                root / "leftImg8bit" / split / city / f"{stem}_leftImg8bit.png",
                root / "gtFine" / split / city / f"{stem}_gtFine_labelIds.png",
                (seed, _SPLIT_KEY[split], index),
                size,
            )


def _done(job: _Job) -> bool:
    # Files appear under their names when they are complete, so being there is enough.
    return job.image.is_file() and job.label.is_file()


def _run(jobs: list[_Job], processes: int) -> None:
    chunks = [jobs[i : i + _CHUNK] for i in range(0, len(jobs), _CHUNK)]
    processes = min(processes, len(chunks))
    with tqdm(total=len(jobs), desc="drawing", unit="image", disable=not jobs) as bar:
        if processes <= 1:
            for chunk in chunks:
                bar.update(_draw(chunk))
            return
        with ProcessPoolExecutor(processes, _context(), initializer=_one_thread) as pool:
            futures = [pool.submit(_draw, chunk) for chunk in chunks]
            for future in as_completed(futures):
                bar.update(future.result())


def _context() -> multiprocessing.context.BaseContext:
    """How workers start: never by forking this process, which has threads (the bar's, torch's)."""
    if "forkserver" not in multiprocessing.get_all_start_methods():
        return multiprocessing.get_context("spawn")
    context = multiprocessing.get_context("forkserver")
    context.set_forkserver_preload([__name__])
    return context


def _one_thread() -> None:
    cv2.setNumThreads(0)


def _draw(chunk: list[_Job]) -> int:
    for job in chunk:
        image, label = draw_scene(np.random.default_rng(job.key), job.size)
        _replace(job.label, _png(label))
        _replace(job.image, _png(cv2.cvtColor(image, cv2.COLOR_RGB2BGR)))
    return len(chunk)


def _png(picture: np.ndarray) -> bytes:
    written, data = cv2.imencode(".png", picture, _PNG)
    assert written, "OpenCV encodes every uint8 array as PNG"
    return data.tobytes()


def _replace(path: Path, data: bytes) -> None:
    """Writes the file under another name first: under its own it is always complete."""
    write_whole(path, data, durable=False)
