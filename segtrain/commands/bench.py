"""`segtrain bench`: where the time of a training step goes, and what limits it."""

import argparse
import json
import time
from collections.abc import Iterator
from contextlib import ExitStack
from itertools import islice
from pathlib import Path
from tempfile import TemporaryDirectory

import torch

from segtrain.commands.bench_report import Report, limit_of, lines_of
from segtrain.commands.data_check import output_errors
from segtrain.commands.train import batches
from segtrain.commands.train.auto_workers import MEASURED_STEPS
from segtrain.commands.train.class_uniform import class_uniform_sampling
from segtrain.commands.train.stages import (
    Training,
    build_state,
    make_repeatable,
    open_data,
    train_stream,
)
from segtrain.config import Config, load_config, recipes
from segtrain.data.loader import worker_failures
from segtrain.distributed import collectives as dist
from segtrain.distributed.malloc import keep_freed_memory
from segtrain.distributed.process_group import device_for, process_group
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.files import check_utf8, reserve_output, write_output
from segtrain.models.precision import float32_products
from segtrain.text import printable_lines, say
from segtrain.training.clock import PARTS, PartClock, synchronize
from segtrain.training.cost import busy_share, matmul_peak, peak_bytes, training_flops
from segtrain.training.engine import StepResult, train_steps
from segtrain.training.spans import watched
from segtrain.training.step_sync import StepSync

_WARMUP = 5  # steps: libraries choose kernels, the allocator gets its memory
_PROFILED = 3  # steps in a trace
_SAMPLES = 8  # timed alone, after one that is not


def run_bench(args: argparse.Namespace) -> int:
    """Measures as the command line says and returns the exit code (collective).

    args: config, set, steps, device, json, profile.

    Raises:
        ConfigError, DataError: the experiment cannot be trained.
    """
    device = device_for(args.device)
    config = _config(args)
    if device.type == "cpu":
        keep_freed_memory()
    group = process_group(device, timeout_s=config.train.timeout_s)
    with group, float32_products(config.train), ExitStack() as stack:
        for option, file in (("--json", args.json), ("--profile", args.profile)):
            if file is not None and dist.is_main():
                with output_errors(file, option):
                    stack.enter_context(reserve_output(file))
        if args.profile is not None:
            check_utf8(args.profile)
        make_repeatable(config, device)
        with worker_failures():
            report = _measure(config, device, args.steps, args.profile, stack)
        if dist.is_main():
            print("\n".join(printable_lines("\n".join(lines_of(report)))))
            if args.json is not None:
                with output_errors(args.json):
                    fields = report._asdict() | {"limit": limit_of(report)}
                    write_output(args.json, json.dumps(fields, indent=2) + "\n")
    return EXIT_OK


def _config(args: argparse.Namespace) -> Config:
    """The experiment, long enough to be measured."""
    config = load_config(recipes.find(args.config).path, args.set)
    if config.train.parallel != "sync":
        raise ConfigError(
            f"train.parallel: {config.train.parallel}: its processes do not share steps; bench "
            "measures train.parallel sync"
        )
    steps = max(config.train.steps, _warmup(config) + 2 * args.steps + _PROFILED)
    train = config.train.model_copy(update={"steps": steps})
    return config.model_copy(update={"train": train})


def _warmup(config: Config) -> int:
    """Steps before those that count."""
    return _WARMUP + (MEASURED_STEPS if config.data.num_workers == "auto" else 0)


def _measure(
    config: Config, device: torch.device, num_steps: int, profile: Path | None, stack: ExitStack
) -> Report:
    """Trains a few steps with the data, model and loader of a run (collective)."""
    notes: list[str] = []
    train_set, _ = open_data(config, device, None, notes)
    state = build_state(config, device, None, train_set, notes)
    folder = Path(stack.enter_context(TemporaryDirectory()))
    this = Training(
        config=config,
        device=device,
        train_set=train_set,
        state=state,
        step_sync=StepSync(lambda: False, overflow_allowed=config.train.precision == "float16"),
        class_uniform=class_uniform_sampling(config, train_set, folder, device, keep=False),
    )
    if dist.is_main() and notes:
        say("\n".join(notes))
    chosen: list[str] = []
    steps = train_steps(
        state,
        batches.with_chosen_workers(this, config.train.steps, chosen.append),
        config,
        device=device,
        indices=batches.indices(this),
        step_sync=this.step_sync,
    )
    _take(steps, _warmup(config), device)
    if dist.is_main() and chosen:
        say(chosen[0])
    # 1. The time that counts: nobody listens.
    step_s, data_s = _take(steps, num_steps, device)
    # 2. Its parts: on a device, the clock waits for it at every border.
    clock = PartClock(device)
    with watched(clock), clock.of_collectives():
        parted_s, waited_s = _take(steps, num_steps, device)
    parts = {name: clock.seconds[name] / num_steps for name in PARTS}
    parts = {"data": waited_s, **parts}
    parts["other"] = max(0.0, parted_s - sum(parts.values()))
    # 3. What the device does meanwhile.
    busy = busy_share(lambda: _take(steps, _PROFILED, device), device, _own(profile))

    ranks = dist.world_size()
    peak = matmul_peak(device, config.train)
    sam = 1 / config.train.sam_every if config.train.sam_rho is not None else 0.0
    flops = training_flops(config, train_set.classes.num_classes) * (1 + sam)
    everywhere = dist.all_gather_object([step_s, data_s, parted_s, parts, peak, peak_bytes(device)])
    slowest = max(everywhere, key=lambda values: values[0])
    return Report(
        device=_device_name(device),
        ranks=ranks,
        precision=config.train.precision,
        batch_size=config.train.batch_size,
        crop_size=config.augment.crop_size,
        steps=num_steps,
        step_s=slowest[0],
        data_s=max(values[1] for values in everywhere),
        parted_step_s=slowest[2],
        parts_s=slowest[3],
        sample_s=_seconds_of_a_sample(this),
        workers=batches.num_workers(this),
        flops_of_image=flops,
        peak_flops=sum(values[4] for values in everywhere),
        peak_bytes=max(values[5] for values in everywhere),
        device_busy=busy,
    )


def _take(steps: Iterator[StepResult], number: int, device: torch.device) -> tuple[float, float]:
    """Seconds of a step, and of its wait for the loader: means over `number` steps (collective)."""
    dist.barrier()
    synchronize(device)
    began = time.perf_counter()
    waited = sum(result.data_s for result in islice(steps, number))
    synchronize(device)
    return (time.perf_counter() - began) / number, waited / number


def _own(profile: Path | None) -> Path | None:
    """Where this rank writes its trace."""
    if profile is None or dist.world_size() == 1:
        return profile
    name, dot, endings = profile.name.partition(".")
    return profile.with_name(f"{name}_{dist.rank()}{dot}{endings}")


def _seconds_of_a_sample(this: Training) -> float:
    """What one sample takes in this process: reading, decoding, augmenting."""
    stream = train_stream(this)
    first = this.config.train.steps
    stream[first, 0]
    began = time.perf_counter()
    for i in range(_SAMPLES):
        step, position = divmod(i + 1, this.config.train.batch_size)
        stream[first + step, position]
    return (time.perf_counter() - began) / _SAMPLES


def _device_name(device: torch.device) -> str:
    return torch.cuda.get_device_name(device) if device.type == "cuda" else "cpu"
