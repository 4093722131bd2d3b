"""`segtrain bench`: where the time of a training step goes, and what limits it."""

import argparse
import json
import os
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, ExitStack, nullcontext
from itertools import islice
from pathlib import Path
from typing import NamedTuple

import torch

from segtrain.commands.config import find_config
from segtrain.config import Config, load_config
from segtrain.data.sample.loader import worker_failures
from segtrain.distributed import collectives as dist
from segtrain.distributed.machine import (
    MEMORY_MARGIN,
    descendants,
    keep_freed_memory,
    resident_bytes,
)
from segtrain.distributed.process_group import device_for, process_group
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.files import check_output, check_utf8, os_errors_as, write_output
from segtrain.models.memory import memory_failures, training_failure
from segtrain.models.precision import float32_products, precision_on
from segtrain.text import printable, say
from segtrain.trainer.evaluation import evaluate_largest
from segtrain.trainer.setup import Prepared, device_name, make_repeatable, prepare
from segtrain.trainer.training import Training, host_watch
from segtrain.training.graph import EAGER_STEPS, GraphStep
from segtrain.training.measure import (
    PARTS,
    PartClock,
    busy_share,
    matmul_peak,
    peak_bytes,
    synchronize,
    training_flops,
)
from segtrain.training.step_sync import StepSync

# From here on a part of the step is worth a remedy.
_MUCH_DATA, _MUCH_COMMUNICATION, _MUCH_ARITHMETIC, _LITTLE_BUSY = 0.05, 0.15, 0.5, 0.85


class StepFigures(NamedTuple):
    """The figures of a training step, over all ranks; JSON can hold them."""

    device: str
    ranks: int
    precision: str
    batch_size: int
    crop_size: tuple[int, int]
    steps: int  # measured, twice
    step_s: float
    data_s: float  # of these, waiting for the loader
    parted_step_s: float  # a step while its parts were timed
    parts_s: dict[str, float]
    eager_step_s: float | None  # of a step that is not replayed; None: none is (train.graph)
    workers: int  # of the loader, for each rank
    loader_images_per_s: float  # that it could make for all ranks
    flops_of_image: float  # forward and backward, convolutions and matrix products
    peak_flops: float  # a second, of all ranks together, in matrix products
    peak_bytes: int  # of the rank with the most
    device_busy: float | None  # the part of the time with kernels; None on a CPU

    @property
    def images_per_s(self) -> float:
        """Images that all ranks train on in a second."""
        return self.batch_size / self.step_s

    @property
    def flops(self) -> float:
        """Operations a second of all ranks."""
        return self.images_per_s * self.flops_of_image


class Footprint(NamedTuple):
    """Time and memory of a training step, over all ranks of this machine; JSON can hold them."""

    step_s: float
    device_bytes: int | None  # of the rank with the most; None on a CPU
    host_bytes: int  # resident in all ranks and loader workers together


def lines_of(report: StepFigures) -> Iterator[str]:
    """The report for people."""
    height, width = report.crop_size
    yield (
        f"device     {report.ranks} x {report.device}, {report.precision}, batch "
        f"{report.batch_size} of {height}x{width}, {report.workers} loader workers a rank"
    )
    rate = f"{report.images_per_s:.1f} images/s, mean of {report.steps} steps"
    yield f"step       {_ms(report.step_s)}, {rate}"
    if report.eager_step_s is not None:
        gain = report.eager_step_s / report.step_s
        yield f"graph      {gain:.2f} times as fast as without, {_ms(report.eager_step_s)}"
    yield f"loader     could make {report.loader_images_per_s:.1f} images/s"
    yield f"parts      of steps in which they were timed, {_ms(report.parted_step_s)} each"
    for name, seconds in report.parts_s.items():
        yield f"  {name:<15}{_ms(seconds):>9} {seconds / report.parted_step_s:>6.1%}"
    yield (
        f"arithmetic {report.flops_of_image / 1e9:.1f} GFLOP an image, {report.flops / 1e12:.3f} "
        f"TFLOP/s: {report.flops / report.peak_flops:.0%} of the {report.peak_flops / 1e12:.3f} of "
        "large matrix products"
    )
    yield f"memory     {report.peak_bytes / 2**30:.2f} GiB at most in a process"
    if report.device_busy is not None:
        yield f"kernels    run {report.device_busy:.0%} of the time"
    yield f"limit      {limit_of(report)}"


def limit_of(report: StepFigures) -> str:
    """What to change first, in words."""
    data = report.data_s / report.step_s
    communication = report.parts_s["communication"] / report.parted_step_s
    arithmetic = report.flops / report.peak_flops
    busy = 1.0 if report.device_busy is None else report.device_busy
    if data > max(_MUCH_DATA, communication):
        return (
            f"the loader: {data:.0%} of the step is spent waiting for it; more data.num_workers, "
            "a pack (segtrain data pack), or fewer changes of colour"
        )
    if communication > _MUCH_COMMUNICATION:
        return (
            f"communication: {communication:.0%} of the step where nothing overlaps; more images a "
            "rank, or a faster connection"
        )
    if arithmetic > _MUCH_ARITHMETIC:
        return (
            f"arithmetic: {arithmetic:.0%} of what large matrix products reach; lower precision, "
            "a smaller model or crop, or more devices"
        )
    cause = f"memory traffic or other programs: arithmetic is at {arithmetic:.0%} of its peak"
    if busy < _LITTLE_BUSY:
        cause = f"the host: kernels run only {busy:.0%} of the time"
    return f"{cause}; bfloat16, larger crops or batches, or train.compile"


def _ms(seconds: float) -> str:
    return f"{seconds * 1e3:.1f} ms"


_WARMUP = 5  # steps: libraries choose kernels, the allocator gets its memory
_PROFILED = 3  # steps in a trace
# Of the files that it writes, of which it replaces earlier ones; a trace may be packed by gzip.
_BEGINS = {
    "--json": ('{\n  "device": ', '{\n  "step_s": '),
    "--profile": ('{\n  "schemaVersion": ', "\x1f\x8b"),
}


def run_bench(args: argparse.Namespace) -> int:
    """Measures as the command line says and returns the exit code (collective).

    args: config, set, steps, device, json, profile, memory.

    Raises:
        ConfigError, DataError: the experiment cannot be trained.
        MemoryLimitError: it needs more memory; with --memory the JSON file says so too.
    """
    device = device_for(args.device)
    if args.memory and args.profile is not None:
        raise ConfigError("--profile: has no effect with --memory; remove one of them")
    config = _config(args)
    if device.type == "cpu":
        keep_freed_memory()
    group = process_group(device, timeout_s=config.train.timeout_s)
    enough = memory_failures(lambda: training_failure(config, device))
    with group, enough, float32_products(config.train), ExitStack() as stack:
        if args.profile is not None:
            check_utf8(args.profile)
        for option, file in (("--json", args.json), ("--profile", args.profile)):
            if file is not None and dist.is_main():
                with os_errors_as(ConfigError, f"{option} {file}", "cannot be written"):
                    check_output(file, *_BEGINS[option])
        make_repeatable(config, device)
        with worker_failures():
            if args.memory:
                footprint = _footprint(config, device, stack)
                lines, fields = footprint_lines(footprint), footprint._asdict()
            else:
                report = _measure(config, device, args.steps, args.profile, stack)
                lines, fields = lines_of(report), report._asdict() | {"limit": limit_of(report)}
        if dist.is_main():
            print("\n".join(map(printable, lines)))
            if args.json is not None:
                with os_errors_as(ConfigError, f"--json {args.json}", "cannot be written"):
                    write_output(args.json, json.dumps(fields, indent=2) + "\n")
    return EXIT_OK


def _config(args: argparse.Namespace) -> Config:
    """The experiment, long enough to be measured."""
    config = load_config(find_config(args.config).path, args.set)
    if config.train.is_asynchronous:
        way = config.train.parallel
        raise ConfigError(f"train.parallel: {way}: its processes do not share steps: use sync")
    # Steps are taken three times: those that count, those without the graph, those with timed
    # parts.
    steps = max(config.train.steps, _WARMUP + 3 * args.steps + _PROFILED)
    train = config.train.model_copy(update={"steps": steps})
    return config.model_copy(update={"train": train})


def footprint_lines(footprint: Footprint) -> Iterator[str]:
    """The footprint for people."""
    yield f"step       {_ms(footprint.step_s)}"
    if footprint.device_bytes is not None:
        yield f"device     {footprint.device_bytes / 2**30:.2f} GiB at most in a rank"
    yield f"host       {footprint.host_bytes / 2**30:.2f} GiB in all ranks and loader workers"


def _footprint(config: Config, device: torch.device, stack: ExitStack) -> Footprint:
    """Trains some steps as a run does, of which the last two count, and evaluates.

    Only the images that take most memory (collective).
    """
    if device.type == "cuda":
        free, total = torch.cuda.mem_get_info(device)
        # Only what other programs leave free can be used, and of that the margin stays free.
        torch.cuda.set_per_process_memory_fraction((1 - MEMORY_MARGIN) * free / total, device)
    this, ready = _training(config, device, stack)
    steps = _Steps(this)
    # Until a step has been recorded, which takes memory.
    steps.take(EAGER_STEPS + 1 if isinstance(this.step, GraphStep) else 1)
    step_s = steps.take(2).step_s
    # Only after the evaluation is the largest memory known.
    evaluate_largest(this, ready.eval_set)
    # The first of them is this process, whose peak is added below.
    workers = sum(map(resident_bytes, descendants(os.getpid())[1:]))
    on_device = peak_bytes(device) if device.type == "cuda" else None
    mine = step_s, on_device, peak_bytes(torch.device("cpu")) + workers
    times, devices, hosts = zip(*dist.all_gather_object(mine), strict=True)
    return Footprint(max(times), None if on_device is None else max(devices), sum(hosts))


def _training(config: Config, device: torch.device, stack: ExitStack) -> tuple[Training, Prepared]:
    """What a run trains with (collective)."""
    notes: list[str] = []
    nowhere = Path(os.devnull)  # bench has no run directory that keeps the centroids
    ready = prepare(config, device, nowhere, notes, stack, hashes=False)
    # Nothing is to be saved, so no request to stop is taken.
    step_sync = StepSync(lambda: False, overflow_allowed=config.train.precision == "float16")
    training = ready.training(config, device, step_sync)
    watch = host_watch(config, device, stack)
    this = Training(**training, last_step=config.train.steps, watch=watch)
    # Ends the loader and its workers, also after an error.
    stack.callback(this.reopen)
    if dist.is_main() and notes:
        say("\n".join(notes))
    return this, ready


def _measure(
    config: Config, device: torch.device, num_steps: int, profile: Path | None, stack: ExitStack
) -> StepFigures:
    """Trains a few steps with the data, model and loader of a run (collective)."""
    this, _ = _training(config, device, stack)
    steps = _Steps(this)
    steps.take(_WARMUP)
    # 1. The time that counts: nobody listens.
    step_s, data_s, sample_s = steps.take(num_steps)
    # 2. What the device does meanwhile.
    if profile is not None and dist.world_size() > 1:  # each rank writes a trace
        name, dot, endings = profile.name.partition(".")
        profile = profile.with_name(f"{name}_{dist.rank()}{dot}{endings}")
    busy = busy_share(lambda: steps.take(_PROFILED), device, profile)
    # 3. A step as it was before it was recorded, since a graph has no parts.
    eager_s = None
    if isinstance(this.step, GraphStep):
        this.step.release()
        eager_s = steps.take(num_steps).step_s
    # 4. Its parts: on a device, the clock waits for it at every border.
    clock = PartClock(device)
    parted_s, waited_s, _ = steps.take(num_steps, clock.running())
    parts = {name: clock.seconds[name] / num_steps for name in PARTS}
    parts = {"data": waited_s, **parts}
    parts["other"] = max(0.0, parted_s - sum(parts.values()))

    peak = matmul_peak(device, config.train)
    flops = training_flops(config, this.train_set.classes.num_classes)
    loader = max(1, this.num_workers()) / sample_s
    mine = [step_s, data_s, parted_s, parts, peak, peak_bytes(device), eager_s, loader]
    everywhere = dist.all_gather_object(mine)
    # All figures of a step are those of one rank, the slowest: parts of several would not add up.
    slowest = max(everywhere, key=lambda values: values[0])
    return StepFigures(
        device=device_name(device),
        ranks=dist.world_size(),
        precision=precision_on(config.train, device),
        batch_size=config.train.batch_size,
        crop_size=config.augment.crop_size,
        steps=num_steps,
        step_s=slowest[0],
        data_s=max(values[1] for values in everywhere),
        parted_step_s=slowest[2],
        parts_s=slowest[3],
        eager_step_s=slowest[6],
        workers=this.num_workers(),
        loader_images_per_s=sum(values[7] for values in everywhere),
        flops_of_image=flops,
        peak_flops=sum(values[4] for values in everywhere),
        peak_bytes=max(values[5] for values in everywhere),
        device_busy=busy,
    )


class _Taken(NamedTuple):
    """Means over some steps, in seconds: a step, its wait for the loader, a sample in a worker."""

    step_s: float
    data_s: float
    sample_s: float


class _Steps:
    """The steps of a training, some at a time."""

    def __init__(self, run: Training) -> None:
        self._run, self._batches = run, run.batches()

    def take(
        self,
        number: int,
        watch: AbstractContextManager = nullcontext(),  # noqa: B008 - it holds no state
    ) -> _Taken:
        """Takes `number` (collective); `watch`: around them, after all ranks have come."""
        run, waited, made, images = self._run, 0.0, 0.0, 0
        # All ranks begin together, and nothing of the steps before still runs on the device.
        dist.barrier()
        synchronize(run.device)
        with watch:
            began = time.perf_counter()
            for local in islice(self._batches, number):
                with run.around():
                    left = run.step(local)
                    run.step.done(local, left)
                waited += local.data_s
                made += sum(batch.made_s for batch in local.batches)
                images += sum(len(batch.names) or 1 for batch in local.batches)
            # Steps are only queued on a CUDA device; the clock counts once they are done.
            synchronize(run.device)
            step_s = (time.perf_counter() - began) / number
            return _Taken(step_s, waited / number, made / images)
