"""How cost grows: with ranks, crops, classes, loader processes, steps and the length of a list.

    python tools/bench_growth.py list           # opening lists of up to a million pairs
    python tools/bench_growth.py ranks crop classes workers
    python tools/bench_growth.py steps          # memory of a run of 2,000 steps

Prints one table for each subject. Times are medians of contenders that take turns; memory is the
largest resident set of a process that does nothing else.
"""

import argparse
import os
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import torch
from commands import DEMO, command, draw_scenes, logged, settings
from rounds import measure, on_ranks
from stepping import config_of, state_of, steps_of

from segtrain.config import Config, DataConfig, load_config
from segtrain.data.pack.opening import open_dataset
from segtrain.data.sample.loader import TrainLoader
from segtrain.data.sample.stream import TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.distributed.machine import descendants
from segtrain.training.measure import peak_bytes

_MIB = 2**20


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("subjects", nargs="+", choices=SUBJECTS)
    parser.add_argument("--pairs", type=int, nargs="+", default=[10**3, 10**4, 10**5, 10**6])
    parser.add_argument("--ranks", type=int, nargs="+", default=[1, 2, 4, 8])
    parser.add_argument("--crops", type=int, nargs="+", default=[64, 128, 256, 512])
    parser.add_argument("--classes", type=int, nargs="+", default=[11, 19, 150, 255])
    parser.add_argument("--workers", type=int, nargs="+", default=[0, 1, 2, 4])
    parser.add_argument("--steps", type=int, default=2000)
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    for subject in options.subjects:
        heading, rows = SUBJECTS[subject]
        print(f"\n{heading}", flush=True)
        for row in rows(options):
            print(row, flush=True)
    return 0


def _of_lists(options: argparse.Namespace) -> Iterator[str]:
    for number in options.pairs:
        with tempfile.TemporaryDirectory() as root:
            _write_list(Path(root), number)
            seconds, mib = on_ranks(1, "cpu", _open_list, root, group=False)
        yield f"{number:9,} {seconds:9.2f} {mib:7.0f}"


def _write_list(root: Path, number: int) -> None:
    """A list of `number` pairs of empty files, a thousand to a folder."""
    with (root / "train.txt").open("w") as file:
        for i in range(number):
            names = [f"{kind}/{i // 1000:04}/{i:07}.png" for kind in ("images", "labels")]
            for name in names:
                if i % 1000 == 0:
                    (root / name).parent.mkdir(parents=True)
                os.close(os.open(root / name, os.O_CREAT | os.O_WRONLY))
            file.write(" ".join(names) + "\n")


def _open_list(_: torch.device, root: str) -> tuple[float, float]:
    """Seconds to open the list, and the MiB that it took."""
    data = DataConfig(layout="list", root=root, classes="voc", train_split="train.txt")
    before = _peak_mib()
    began = time.perf_counter()
    open_dataset(data, data.train_split)
    return time.perf_counter() - began, _peak_mib() - before


def _peak_mib() -> float:
    return peak_bytes(torch.device("cpu")) / _MIB


def _step(device: torch.device, crop: int, images: int, num_classes: int, rounds: int) -> tuple:
    """Milliseconds of a training step, and the MiB of this process (collective)."""
    config = config_of((crop, crop), images, model={"backbone": "resnet18"})
    steps = steps_of(state_of(config, device, num_classes=num_classes), config, device, num_classes)
    times = measure({"step": partial(next, steps)}, device=device, rounds=rounds)["step"]
    return statistics.median(times), _peak_mib()


def _of_ranks(options: argparse.Namespace) -> Iterator[str]:
    for ranks in options.ranks:
        ms, mib = on_ranks(ranks, "cpu", _step, 128, 8, 19, options.rounds, group=ranks > 1)
        yield f"{ranks:9} {ms:9.0f} {mib:7.0f}"


def _of_crops(options: argparse.Namespace) -> Iterator[str]:
    for crop in options.crops:
        ms, mib = on_ranks(1, "cpu", _step, crop, 2, 19, options.rounds, group=False)
        yield f"{crop:9} {ms:9.0f} {mib:7.0f} {ms / (2 * crop * crop) * 1e6:13.0f}"


def _of_classes(options: argparse.Namespace) -> Iterator[str]:
    for number in options.classes:
        ms, mib = on_ranks(1, "cpu", _step, 256, 2, number, options.rounds, group=False)
        yield f"{number:9} {ms:9.0f} {mib:7.0f}"


def _of_workers(options: argparse.Namespace) -> Iterator[str]:
    with tempfile.TemporaryDirectory() as root:
        draw_scenes(Path(root), 24, 1, (512, 1024))
        calls = {str(workers): partial(_load, root, workers) for workers in options.workers}
        times = measure(calls, device=torch.device("cpu"), rounds=options.rounds, warmup=1)
    for workers, found in times.items():
        yield f"{workers:>9} {_LOADED / statistics.median(found) * 1e3:9.1f}"


_LOADED = 48  # samples


def _load(root: str, workers: int) -> None:
    config = _scenes_config(root, f"data.num_workers={workers}")
    train_set = open_dataset(config.data, config.data.train_split)
    stream = TrainStream(
        train_set,
        TrainTransform(config.augment, form=train_set.form),
        stream_seed=0,
        batch_size=4,
    )
    batches = TrainLoader(
        stream,
        indices=[range(4)],
        start_step=0,
        steps=_LOADED // 4,
        num_workers=workers,
        prefetch=2,
        pin_memory=False,
        timeout_s=600,
    )
    assert sum(len(batch.images) for batch in batches) == _LOADED


def _scenes_config(root: str, *changes: str) -> Config:
    return load_config(DEMO, [f"data.root={root}", *changes])


def _of_steps(options: argparse.Namespace) -> Iterator[str]:
    """Memory of all processes of a run, at ten moments."""
    with tempfile.TemporaryDirectory() as folder:
        root = Path(folder)
        draw_scenes(root / "scenes", 24, 4, (64, 128))
        changes = settings(
            data__root=root / "scenes",
            train__steps=options.steps,
            schedule__warmup_steps=0,
            augment__crop_size=[33, 33],
            eval__every_steps=options.steps // 10,
            log__every_steps=1,
        )
        words = command("train", DEMO, "--output", root / "run", "--nproc", 1, *changes)
        with (root / "errors").open("w") as errors:
            run = subprocess.Popen(words, stdout=subprocess.DEVNULL, stderr=errors)
        yield from _watch(run, root / "run", options.steps)
        if run.wait() != 0:
            raise SystemExit((root / "errors").read_text())


def _watch(run: subprocess.Popen, directory: Path, steps: int) -> Iterator[str]:
    """The memory of `run` and its children at every tenth of its `steps`, by its log."""
    due = steps // 10
    while run.poll() is None:
        time.sleep(0.2)
        step = len(logged(directory, "train/loss"))
        if step >= due and run.poll() is None:
            rank, *others = [_resident(pid) for pid in descendants(run.pid)] or [0]
            if rank == 0:  # the run has just ended
                return
            yield f"{step:9,} {rank / _MIB:9.0f} {(rank + sum(others)) / _MIB:7.0f}"
            due = (step // (steps // 10) + 1) * (steps // 10)


def _resident(pid: int) -> int:
    """Bytes of memory of a process, that which it shares with others in part."""
    try:
        lines = Path(f"/proc/{pid}/smaps_rollup").read_text().splitlines()
    except OSError:  # it has just ended
        return 0
    (pss,) = [line.split()[1] for line in lines if line.startswith("Pss:")]
    return int(pss) * 1024


SUBJECTS: dict[str, tuple[str, Callable[[argparse.Namespace], Iterator[str]]]] = {
    "list": ("    pairs   seconds     MiB", _of_lists),
    "ranks": ("    ranks   ms/step MiB/rank   (8 crops of 128, one thread a rank)", _of_ranks),
    "crop": ("     crop   ms/step     MiB  ns per pixel (2 crops, one thread)", _of_crops),
    "classes": ("  classes   ms/step     MiB   (2 crops of 256, one thread)", _of_classes),
    "workers": ("  workers samples/s   (PNG of 1024x512)", _of_workers),
    "steps": ("     step  MiB rank MiB all processes", _of_steps),
}


if __name__ == "__main__":
    sys.exit(main())
