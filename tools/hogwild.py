"""Trains an experiment twice on the same images: ranks that wait for each other, and Hogwild!.

Hogwild! (Niu et al., arXiv:1106.5730): processes of one machine share the weights and the running
statistics of batch norm in memory. Each computes gradients of its own part of every batch and
updates the weights at once, without a lock and without waiting. Updates overwrite each other, and a
gradient belongs to weights that have changed since. So nothing is promised of the result: not the
same for another number of processes, nor from one run to the next.

    python tools/hogwild.py configs/demo.yaml --processes 2 --set data.root=PATH

Both ways see the same crops. A process of Hogwild! has 1 / processes of a batch and does as many
updates, each with 1 / processes of the learning rate. Momentum and batch statistics are its own.
Every process has one thread and reads its images itself.
The table says what both reach after how many images and seconds; `lost`: the part of the updates of
a counter beside the statistics that others have overwritten; the distance of running statistics
from those of `--precise-batches` whole batches under the same weights: of the means in standard
deviations, of the variances as |log ratio|, medians over all channels.
"""

import argparse
import copy
import json
import os
import socket
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any, NamedTuple

import torch
import torch.multiprocessing as multiprocessing
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.commands.train.stages import build_state, make_repeatable
from segtrain.config import Config, load_config
from segtrain.data import open_dataset
from segtrain.data.loader import TrainStream, indices_of_rank, train_loader
from segtrain.data.transforms import TrainTransform
from segtrain.distributed.process_group import process_group
from segtrain.errors import ConfigError, ExecutionError, UserError
from segtrain.evaluation.dataset import evaluate_dataset
from segtrain.evaluation.settings import InferenceSettings
from segtrain.models.normalize import Normalize
from segtrain.models.precision import autocast, autocast_dtype, dtype_of
from segtrain.norm import precise_statistics
from segtrain.training.engine import train_steps
from segtrain.training.state import TrainState
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch

CPU = torch.device("cpu")
WAYS = ("ranks", "hogwild")
Memory = dict[torch.dtype, Tensor]  # a vector for each type of numbers


class Task(NamedTuple):
    """What a process trains, and where it leaves snapshots."""

    way: str  # of WAYS
    config: Config
    processes: int
    snapshots: tuple[int, ...]  # steps of process 0 after which it takes one
    directory: Path
    port: int  # where ranks meet


class Row(NamedTuple):
    """A snapshot and its scores."""

    way: str
    images: int
    seconds: float
    mean_iou: float
    lost: float
    mean_error: float
    var_error: float


def check(config: Config, processes: int) -> None:
    """Raises ConfigError for what cannot be compared, or not be promised without waiting."""
    train, norm = config.train, config.norm
    refused = {
        "train.shares": train.shares is not None,
        "train.virtual_ranks": train.virtual_ranks > 1,
        "train.accumulate_steps": train.accumulate_steps > 1,
        "train.compile": train.compile,
        "train.deterministic": train.deterministic,
        "train.ema_decay": train.ema_decay is not None,
        "train.sam_rho": train.sam_rho is not None,
        "train.precision: float16": train.precision == "float16",
        "norm.kind: other than sync over the world": (norm.kind, norm.extent) != ("sync", "world"),
    }
    findings = [f"{key}: cannot go with Hogwild!" for key, found in refused.items() if found]
    if train.batch_size < 2 * processes:
        findings.append(
            f"train.batch_size: {train.batch_size} leaves less than 2 images to some of "
            f"{processes} processes, and batch norm needs two"
        )
    if findings:
        raise ConfigError("\n".join(findings))


def new_state(config: Config) -> TrainState:
    """The state before the first step, the same in every process (collective)."""
    make_repeatable(config, CPU)
    train_set = open_dataset(config.data, config.data.train_split)
    return build_state(config, CPU, None, train_set, [])


def allocate(model: nn.Module) -> Memory:
    """Memory that processes can share, with the weights and statistics of `model`, now its own."""
    sizes: Counter[torch.dtype] = Counter()
    for tensor in (*model.parameters(), *model.buffers()):
        sizes[tensor.dtype] += _aligned(tensor)
    memory = {dtype: torch.zeros(n, dtype=dtype).share_memory_() for dtype, n in sizes.items()}
    use(model, memory, fill=True)
    return memory


def use(model: nn.Module, memory: Memory, *, fill: bool = False) -> None:
    """Lets weights and statistics of `model` lie in `memory`; `fill`: with the values they have."""
    ends = dict.fromkeys(memory, 0)

    def place(tensor: Tensor) -> Tensor:
        start = ends[tensor.dtype]
        ends[tensor.dtype] += _aligned(tensor)
        view = memory[tensor.dtype].as_strided(tensor.size(), tensor.stride(), start)
        return view.copy_(tensor) if fill else view

    for parameter in model.parameters():
        parameter.data = place(parameter.data)
    for layer in model.modules():
        for name, buffer in layer.named_buffers(recurse=False):
            setattr(layer, name, place(buffer))


def _aligned(tensor: Tensor) -> int:
    """The place it takes: vector kernels want aligned memory."""
    return -(-tensor.numel() // 16) * 16


def batches(config: Config, rank: int, processes: int, start: int, stop: int) -> Iterator[Batch]:
    """This process's part of the batches of steps `start` to `stop` - 1, read in this process."""
    train_set = open_dataset(config.data, config.data.train_split)
    transform = TrainTransform(
        config.augment, mean=config.data.mean, short_side_px=config.data.short_side_px
    )
    size = config.train.batch_size
    return train_loader(
        TrainStream(train_set, transform, stream_seed=config.seed, batch_size=size),
        indices=indices_of_rank(size, 1, rank, processes),
        start_step=start,
        steps=stop,
        num_workers=0,
        prefetch=1,
        pin_memory=False,
        timeout_s=config.train.timeout_s,
    )


def work(task: Task, rank: int, shared: Memory | None, done: Tensor, start: Any) -> None:
    """A process of either way; `done` counts the steps of each, `start` lets all begin together."""
    config, processes = task.config, task.processes
    torch.set_num_threads(1)
    group = nullcontext()
    if shared is None:
        os.environ.update(
            RANK=str(rank),
            WORLD_SIZE=str(processes),
            LOCAL_RANK=str(rank),
            LOCAL_WORLD_SIZE=str(processes),
            MASTER_ADDR="127.0.0.1",
            MASTER_PORT=str(task.port),
        )
        group = process_group(CPU, timeout_s=config.train.timeout_s)
    with group:
        state = new_state(config)
        if shared is not None:
            use(state.model, shared)
        step_sync = StepSync(lambda: False)
        steps = train_steps(
            state,
            batches(config, rank, processes, 0, config.train.steps),
            config,
            device=CPU,
            indices=indices_of_rank(config.train.batch_size, 1, rank, processes),
            step_sync=step_sync,
        )
        start.wait()
        began = time.monotonic()
        for result in steps:
            done[rank] = result.step
            if rank == 0 and result.step in task.snapshots:
                _save_snapshot(task, state.model, done, time.monotonic() - began, result.step)
        step_sync.settle()
        torch.save(time.monotonic() - began, task.directory / f"{task.way}_seconds_{rank}.pt")
        if rank == 0 and shared is None:
            _save_snapshot(task, state.model, done, time.monotonic() - began, config.train.steps)


def _save_snapshot(task: Task, model: nn.Module, done: Tensor, seconds: float, step: int) -> None:
    """Writes the weights as they are now; with Hogwild! others change them meanwhile."""
    # Ranks keep step with each other; their counters may be one behind.
    steps = done.sum().item() if task.way == "hogwild" else step * task.processes
    content = {"model": model.state_dict(), "steps": steps, "seconds": seconds}
    torch.save(content, task.directory / f"{task.way}_{step:07d}.pt")


def with_divided_lr(config: Config, processes: int) -> Config:
    """The experiment of one of the processes, which together do so many times the updates."""
    train = config.train
    lr = {"lr": train.lr / processes, "min_lr": train.min_lr / processes}
    return config.model_copy(update={"train": train.model_copy(update=lr)})


def train(task: Task, context: Any) -> None:
    """Trains one way in processes of its own; raises ExecutionError if one of them fails."""
    done = torch.zeros(task.processes, dtype=torch.int64).share_memory_()
    shared = model = None
    if task.way == "hogwild":
        task = task._replace(config=with_divided_lr(task.config, task.processes))
        model = new_state(task.config).model
        shared = allocate(model)
    start = context.Barrier(task.processes)
    processes = [
        context.Process(target=work, args=(task, rank, shared, done, start), daemon=True)
        for rank in range(task.processes)
    ]
    for process in processes:
        process.start()
    try:
        while any(process.is_alive() for process in processes):
            time.sleep(0.02)
            if any(process.exitcode for process in processes):
                raise ExecutionError(f"{task.way}: a process failed, see above")
    finally:
        for process in processes:
            process.kill()
            process.join()
    if any(process.exitcode for process in processes):
        raise ExecutionError(f"{task.way}: a process failed, see above")
    if model is not None:
        files = (task.directory / f"hogwild_seconds_{rank}.pt" for rank in range(task.processes))
        seconds = max(torch.load(file) for file in files)
        _save_snapshot(task, model, done, seconds, task.config.train.steps)


def statistics_error(model: nn.Module, config: Config, num_batches: int) -> tuple[float, float]:
    """The distances of running means and variances from precise ones, medians over channels."""
    precise = copy.deepcopy(model)
    normalize = Normalize(config.data.mean, config.data.std).to(dtype=dtype_of(config.train))

    def forward(batch: Batch) -> None:
        with autocast(autocast_dtype(config.train), CPU):
            precise(normalize(batch.images))

    first = config.train.steps
    precise_statistics(precise, batches(config, 0, 1, first, first + num_batches), forward)
    pairs = [
        (layer, other)
        for layer, other in zip(model.modules(), precise.modules(), strict=True)
        # An auxiliary head does not run.
        if isinstance(layer, _BatchNorm) and not torch.equal(layer.running_var, other.running_var)
    ]
    means = [(a.running_mean - b.running_mean).abs() / b.running_var.sqrt() for a, b in pairs]
    variances = [(a.running_var / b.running_var).log().abs() for a, b in pairs]
    return torch.cat(means).median().item(), torch.cat(variances).median().item()


def score(task: Task, file: Path, model: nn.Module, precise_batches: int) -> Row:
    """The scores of a snapshot."""
    config, content = task.config, torch.load(file)
    model.load_state_dict(content["model"])
    dataset = open_dataset(config.data, config.data.eval_split)
    matrix = evaluate_dataset(
        model,
        dataset,
        InferenceSettings.from_config(config),
        device=CPU,
        num_classes=dataset.classes.num_classes,
    )
    steps = content["steps"]
    counter = next(m.num_batches_tracked for m in model.modules() if isinstance(m, _BatchNorm))
    updates = steps if task.way == "hogwild" else steps // task.processes
    return Row(
        task.way,
        steps * config.train.batch_size // task.processes,
        content["seconds"],
        matrix.scores().mean_iou,
        max(0.0, 1 - counter.item() / updates),
        *statistics_error(model, config, precise_batches),
    )


def compare(
    config: Config, processes: int, evaluations: int, precise_batches: int, context: Any
) -> list[Row]:
    """Trains both ways, then scores all snapshots."""
    check(config, processes)
    steps = config.train.steps
    snapshots = tuple(steps * i // evaluations for i in range(1, evaluations))
    rows = []
    with TemporaryDirectory() as directory, socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
        probe.close()
        for way in WAYS:
            task = Task(way, config, processes, snapshots, Path(directory), port)
            train(task, context)
            model = new_state(config).model
            for file in sorted(Path(directory).glob(f"{way}_{'[0-9]' * 7}.pt")):
                rows.append(score(task, file, model, precise_batches))
    return rows


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
    parser.add_argument("--processes", type=int, default=2, help="of either way")
    parser.add_argument("--evaluations", type=int, default=5, help="snapshots to score")
    parser.add_argument("--precise-batches", type=int, default=8, help="for precise statistics")
    parser.add_argument("--json", type=Path, help="write the rows to this file")
    args = parser.parse_args(argv)
    print("Hogwild! promises nothing: another run, or other processes, give another result")
    try:
        rows = compare(
            load_config(args.config, args.set),
            args.processes,
            args.evaluations,
            args.precise_batches,
            multiprocessing.get_context("spawn"),
        )
    except UserError as error:
        print(f"hogwild: {error}", file=sys.stderr)
        return error.exit_code
    for line in table(rows):
        print(line)
    if args.json:
        args.json.write_text(json.dumps([row._asdict() for row in rows], indent=2) + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
