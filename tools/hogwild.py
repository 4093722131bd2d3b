"""Trains an experiment with ranks that wait for each other, and with Hogwild!, and compares both.

    python tools/hogwild.py configs/demo.yaml --nproc 2 --set data.root=PATH

Both ways are `segtrain train`, with train.parallel sync and hogwild, on the same crops. The table
says what each reaches after how many images and seconds of training (evaluations are left out);
`lost`: the part of the updates of a counter beside the statistics that others have overwritten; the
distance of running statistics from those of `--precise-batches` whole batches under the same
weights: of the means in standard deviations, of the variances as |log ratio|, medians over all
channels.
"""

import argparse
import copy
import json
import os
import sys
from collections.abc import Iterator
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import NamedTuple

import torch
from commands import segtrain, settings
from torch import nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.checkpoint.format import load
from segtrain.checkpoint.manager import kept_checkpoints
from segtrain.commands.train.setup import build_state, make_repeatable
from segtrain.config import Config, load_config
from segtrain.data import open_dataset
from segtrain.data.sample.loader import TrainLoader
from segtrain.data.sample.stream import TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.errors import ConfigError, UserError
from segtrain.models.blocks import Normalize
from segtrain.models.precision import autocast, autocast_dtype, dtype_of
from segtrain.norm import precise_statistics
from segtrain.run import directory as run_directory
from segtrain.types import Batch

CPU = torch.device("cpu")
WAYS = ("sync", "hogwild")


class Row(NamedTuple):
    """One evaluation of one way."""

    way: str
    images: int
    seconds: float
    mean_iou: float
    lost: float
    mean_error: float
    var_error: float


def history(run: Path) -> dict[int, tuple[float, float]]:
    """Of each evaluation, by step: seconds of training until then, and mIoU."""
    seconds, before, found = 0.0, 0, {}
    for line in (run / run_directory.METRICS).read_text().splitlines():
        values = json.loads(line)
        step = values["step"]
        if "time/step_s" in values:  # a mean over the steps since the line before
            seconds += values["time/step_s"] * (step - before)
            before = step
        if "eval/mIoU" in values:
            found[step] = seconds, values["eval/mIoU"]
    return found


def batches(config: Config, start: int, stop: int) -> Iterator[Batch]:
    """The whole batches of steps `start` to `stop` - 1."""
    train_set = open_dataset(config.data, config.data.train_split)
    transform = TrainTransform(
        config.augment, form=train_set.form, short_side_px=config.data.short_side_px
    )
    size = config.train.batch_size
    return TrainLoader(
        TrainStream(train_set, transform, stream_seed=config.seed, batch_size=size),
        indices=[range(size)],
        start_step=start,
        steps=stop,
        num_workers=0,
        prefetch=1,
        pin_memory=False,
        timeout_s=config.train.timeout_s,
    )


def statistics_error(model: nn.Module, config: Config, num_batches: int) -> tuple[float, float]:
    """The distances of running means and variances from precise ones, medians over channels."""
    precise = copy.deepcopy(model)
    normalize = Normalize(config.data.mean, config.data.std).to(dtype=dtype_of(config.train))

    def forward(batch: Batch) -> None:
        with autocast(autocast_dtype(config.train), CPU):
            precise(normalize(batch.images))

    first = config.train.steps
    precise_statistics(precise, batches(config, first, first + num_batches), forward)
    pairs = [
        (layer, other)
        for layer, other in zip(model.modules(), precise.modules(), strict=True)
        # An auxiliary head does not run.
        if isinstance(layer, _BatchNorm) and not torch.equal(layer.running_var, other.running_var)
    ]
    means = [(a.running_mean - b.running_mean).abs() / b.running_var.sqrt() for a, b in pairs]
    variances = [(a.running_var / b.running_var).log().abs() for a, b in pairs]
    return torch.cat(means).median().item(), torch.cat(variances).median().item()


def rows(way: str, run: Path, nproc: int, precise_batches: int) -> Iterator[Row]:
    """What `run` came to, at each of its evaluations."""
    config = load_config(str(run / run_directory.CONFIG))
    make_repeatable(config, CPU)
    train_set = open_dataset(config.data, config.data.train_split)
    model = build_state(config, CPU, None, train_set, []).model
    checkpoints = dict(kept_checkpoints(run / run_directory.CHECKPOINTS))
    for step, (seconds, mean_iou) in history(run).items():
        model.load_state_dict(load(checkpoints[step]).model)
        updates = step * nproc if way == "hogwild" else step
        counter = next(m.num_batches_tracked for m in model.modules() if isinstance(m, _BatchNorm))
        yield Row(
            way,
            step * config.train.batch_size,
            seconds,
            mean_iou,
            1 - counter.item() / updates,
            *statistics_error(model, config, precise_batches),
        )


def compare(
    config: str, sets: list[str], nproc: int, evaluations: int, precise_batches: int
) -> list[Row]:
    """Trains both ways, one after the other."""
    steps = load_config(config, sets).train.steps
    if steps % evaluations:
        raise ConfigError(f"--evaluations: {evaluations} does not divide train.steps, {steps}")
    every = steps // evaluations
    sets = [
        *sets,
        f"eval.every_steps={every}",
        f"log.every_steps={every}",
        f"checkpoint.keep_every_steps={every}",
        f"checkpoint.keep_limit={evaluations}",
    ]
    found = []
    with TemporaryDirectory() as directory:
        for way in WAYS:
            run = Path(directory, way)
            options = settings(*sets, f"train.parallel={way}")
            segtrain("train", config, "--nproc", nproc, "--output", run, *options)
            found += rows(way, run, nproc, precise_batches)
    return found


def table(rows: list[Row]) -> Iterator[str]:
    """Lines for people."""
    yield "way      images  seconds  mIoU    lost    means   variances"
    for row in rows:
        yield (
            f"{row.way:<8} {row.images:<7} {row.seconds:<8.1f} {row.mean_iou:<7.4f} "
            f"{row.lost:<7.4f} {row.mean_error:<7.4f} {row.var_error:.4f}"
        )


def main(argv: list[str] | None = None) -> int:
    """Runs the comparison and returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("config", help="experiment file")
    parser.add_argument("--set", action="append", default=[], metavar="KEY=VALUE")
    parser.add_argument("--nproc", type=int, default=2, help="processes of either way")
    parser.add_argument("--evaluations", type=int, default=5, help="a divisor of train.steps")
    parser.add_argument("--precise-batches", type=int, default=8, help="for precise statistics")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args(argv)
    os.environ["CUDA_VISIBLE_DEVICES"] = ""
    try:
        found = compare(args.config, args.set, args.nproc, args.evaluations, args.precise_batches)
    except UserError as error:
        print(f"hogwild: {error}", file=sys.stderr)
        return error.exit_code
    for line in table(found):
        print(line)
    if args.json:
        args.json.write_text(json.dumps([row._asdict() for row in found], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
