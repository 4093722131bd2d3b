"""`data.class_uniform`: where the classes are, and whether that is what the checkpoint knew."""

from collections.abc import Callable
from pathlib import Path

import torch

from segtrain.checkpoint.same_data import Resumed
from segtrain.config import Config
from segtrain.data.centroids import Centroids, measure_centroids
from segtrain.data.class_uniform import ClassUniform
from segtrain.data.classes import ClassFile
from segtrain.data.dataset import SegDataset
from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.run import directory as run_directory
from segtrain.run.console import say
from segtrain.text import printable


def class_uniform_sampling(
    config: Config,
    train_set: SegDataset,
    directory: Path,
    device: torch.device,
    *,
    keep: Callable[[Centroids], bool],
) -> ClassUniform | None:
    """What `data.class_uniform` asks for; None without it. Says what it does (collective).

    directory: of the run, which keeps the centroids; keep: whether these may be written there.

    Raises:
        DataError: a label cannot be read, or none shows a class.
    """
    data = config.data
    if not data.class_uniform:
        return None
    if dist.is_main():
        say(f"looking for the classes in {len(train_set)} labels (data.class_uniform)")
    path = directory / run_directory.CENTROIDS
    centroids = measure_centroids(
        train_set, data.class_uniform_tile_px, path, device=device, keep=keep
    )
    return ClassUniform(centroids, fraction=data.class_uniform, steps=data.class_uniform_steps)


def class_uniform_lines(sampling: ClassUniform, classes: ClassFile) -> list[str]:
    """Lines for the log: how many centroids there are, and which classes have none."""
    by_class = sampling.centroids.by_class
    numbers = [len(rows) for rows in by_class.values()]
    until = "" if sampling.steps is None else f" up to step {sampling.steps}"
    lines = [
        f"sampling   {100 * sampling.fraction:g}% class-uniform{until}: {len(numbers)} classes "
        f"with {min(numbers):,} to {max(numbers):,} centroids each, {sum(numbers):,} in all"
    ]
    absent = [name for i, name in enumerate(classes.names) if i not in by_class]
    if absent:
        lines.append(
            "warning: data.class_uniform: no training label shows "
            f"{printable(', '.join(absent))}: such a class is left out"
        )
    return lines


def centroid_changes(
    sampling: ClassUniform | None, resumed: Resumed | None, *, accept_changes: bool
) -> list[str]:
    """How the centroids differ from those of the checkpoint, for the log.

    Raises:
        ConfigError: they do, and `accept_changes` is not set.
    """
    before = None if resumed is None else resumed.checkpoint.centroids
    if sampling is None or before in (None, sampling.centroids.sha256()):
        return []
    what = "the centroids of the classes (data.class_uniform) are not those of the checkpoint"
    if not accept_changes:
        raise ConfigError(
            f"{resumed.path}: {what}: a label, the class file or data.class_uniform_tile_px has "
            "changed, or another version of segtrain measures them otherwise; give the run what it "
            "was started with, start a new run by --output, or, if the change is meant, add "
            "--accept-changes"
        )
    return [f"changed    {what}"]
