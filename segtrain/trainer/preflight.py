"""Before training: what is checked before device time is spent, and the lines that are logged."""

import os
from pathlib import Path

import torch
from torch import nn

from segtrain import __version__, kernels
from segtrain.config import Config, TrainConfig
from segtrain.data.check.checks import quick_check
from segtrain.data.read.classes import ClassFile
from segtrain.data.read.dataset import SegDataset
from segtrain.data.read.image import ImageForm
from segtrain.data.sample.loader import bytes_in_flight, training_workers
from segtrain.data.sample.photometric import extra_transforms
from segtrain.data.sample.stream import ClassUniform
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import (
    Layout,
    batch_findings,
    even,
    images_together,
    split_of,
)
from segtrain.distributed.machine import SHARED_MEMORY, free_shared_memory, semaphore_problem
from segtrain.errors import ConfigError, MemoryLimitError
from segtrain.models.memory import training_finding, window_finding
from segtrain.models.norms import describe_norm, kept_norms
from segtrain.models.precision import precision_on
from segtrain.run.directory import flat
from segtrain.task.tasks import task_of
from segtrain.text import printable
from segtrain.trainer.leak import leak_warning
from segtrain.training.graph import EAGER_STEPS, GraphPlan
from segtrain.training.optim.schedule import describe_rates
from segtrain.training.ways import way_of

# What may differ between machines: where things lie, and how fast they are read.
_OF_A_MACHINE = ("data.root", "data.classes", "data.pack", "data.num_workers", "plugins")


def check_alike(config: Config) -> None:
    """Refuses ranks that were started with another config, or segtrain, than rank 0 (collective).

    Each would train its copy of the weights its own way, without a word.
    """
    mine = {key: x for key, x in flat(config).items() if key not in _OF_A_MACHINE}
    mine["segtrain"] = __version__
    first = dist.run_on_rank0(lambda: mine)
    differing = [
        f"{key}: {printable(first.get(key))} on rank 0, {printable(x)} on rank {dist.rank()}"
        for key, x in mine.items()
        if x != first.get(key)
    ]
    # Gathered, so that rank 0, which differs from nobody, fails too.
    if lines := next(filter(None, dist.all_gather_object(differing)), None):
        raise ConfigError("\n  ".join(["the ranks were started with different configs", *lines]))


def check_experiment(
    config: Config, train_set: SegDataset, eval_set: SegDataset, *, device: torch.device
) -> list[str]:
    """Refuses an experiment that would fail later; returns what is odd about the data (collective).

    Raises:
        ConfigError: the config does not fit the ranks, the classes or this machine.
        DataError: images and labels do not fit together.
    """
    num_classes = train_set.classes.num_classes
    # 1. What is the same on all ranks.
    findings = batch_findings(config, dist.world_size())
    if (way := config.train.parallel) != "sync" and device.type != "cpu":
        findings.append(f"train.parallel: {way} runs on CPUs only: use --device cpu, or sync")
    numbers = {}
    for i, term in enumerate(config.loss.terms):
        key = "loss" if i == 0 else f"loss.also[{i - 1}]"
        numbers[f"{key}.class_weights"] = term.class_weights
        numbers[f"{key}.positive_weights"] = term.positive_weights
    if len(config.eval.thresholds or ()) != 1:
        numbers["eval.thresholds"] = config.eval.thresholds
    findings += [
        f"{key}: {len(values)} numbers for the {num_classes} classes of {config.data.classes}"
        for key, values in numbers.items()
        if values is not None and len(values) != num_classes
    ]
    findings += config.eval.unknown_classes(train_set.classes.names)
    if findings:
        raise ConfigError("\n".join(findings))
    task_of(config.task).check_best(config.eval)
    # 2. Each machine has its own memory.
    here = (
        _device_memory_finding(config, num_classes, device),
        _shared_memory_finding(config, train_set.form, train_set.label_bytes),
    )
    everywhere = dist.all_gather_object(here)
    if finding := next((memory for memory, _ in everywhere if memory is not None), None):
        raise MemoryLimitError(finding)
    if finding := next((shared for _, shared in everywhere if shared is not None), None):
        raise ConfigError(finding)
    # 3. Files and augmentations; rank 0 reads the files for all.
    extra_transforms(config.augment, train_set.form)
    warnings = dist.run_on_rank0(
        lambda: [*quick_check(train_set, eval_set), *leak_warning(train_set, eval_set)]
    )
    return warnings + _split_warnings(config.train, dist.world_size())


def _split_warnings(train: TrainConfig, ranks: int) -> list[str]:
    split, warnings = split_of(train, ranks), []
    if not isinstance(train.split, str) and split != train.split:
        there = f"there are {ranks}: they divide" if ranks > 1 else "there is one, which computes"
        warnings.append(
            f"train.split: {list(train.split)} is for {len(train.split)} ranks, and {there} each "
            f"microbatch{' evenly' if ranks > 1 else ''}"
        )
    layout = Layout.of(train, split)
    # The last microbatch is the smallest.
    learners = range(train.num_servers, ranks)
    idle = 0 if train.shares else sum(not any(layout.sizes(-1, rank)) for rank in learners)
    if idle:
        option = "batch_size" if split == even(ranks) else "split"
        warnings.append(
            f"train.{option}: {idle} of {ranks} ranks have no image of a microbatch and wait for "
            "the others; the result is the same on fewer"
        )
    return warnings


def _device_memory_finding(config: Config, num_classes: int, device: torch.device) -> str | None:
    train = config.train
    is_cpu, ranks = device.type == "cpu", dist.world_size()
    # Ranks on a CPU have one memory, whoever has which image.
    split = even(ranks) if is_cpu else split_of(train, ranks)
    parts = Layout.of(train, split).sizes(0, 0 if is_cpu else dist.rank())
    at_a_time = max(parts) if train.virtual_ranks > 1 else sum(parts)
    ranks = dist.local_world_size() if is_cpu else 1
    return training_finding(config, num_classes, at_a_time, device, ranks) or window_finding(
        config, num_classes, device, ranks
    )


def _shared_memory_finding(config: Config, form: ImageForm, label_bytes: int) -> str | None:
    """Why loader workers cannot share memory; one that finds no space dies by SIGBUS."""
    workers, free = training_workers(config), free_shared_memory()
    if workers and (problem := semaphore_problem()):
        return f"{problem}; loader workers need one: make it writable, or set data.num_workers: 0"
    needed = dist.local_world_size() * bytes_in_flight(config, form, workers, label_bytes)
    if workers == 0 or free is None or needed <= free:
        return None
    return (
        f"{SHARED_MEMORY}: the loader's batches take up to {needed / 1e6:.1f} MB and "
        f"{free / 1e6:.1f} MB are free; use fewer data.num_workers, or give the "
        "container more shared memory (docker run --shm-size)"
    )


def device_lines(config: Config, graphs: GraphPlan, device: torch.device) -> list[str]:
    """Whether steps are replayed, and which kernels compute, where one would expect it."""
    own = kernels.why_not(device)
    if own is None and config.train.compile:
        own = "train.compile makes its own"
    if own is None and config.train.precision == "float64":
        own = "they compute in float32"
    replayed = f"from step {EAGER_STEPS + 1} of a shape on, a step is one CUDA graph"
    if graphs.trial is not None:
        replayed += "; the first is compared with the step itself, since this stack is new"
    lines = {
        "graph": (graphs.why_not, replayed),
        "kernels": (own, "segtrain's for cross entropy, batch norm with its ReLU, and resizing"),
    }
    return [
        f"{name:10} {f'none: {reason}' if reason else line}"
        for name, (reason, line) in lines.items()
        if reason != ""
    ]


def start_lines(
    config: Config,
    directory: Path,
    model: nn.Module,
    train_set: SegDataset,
    eval_set: SegDataset,
    devices: list[str],
    step: int,
) -> list[str]:
    """The experiment in at most 15 lines, for the log; `step`: updates done already."""
    train, ranks = config.train, len(devices)
    machines = int(os.environ.get("GROUP_WORLD_SIZE", "1"))  # of torchrun
    places = f" on {machines} machines" if machines > 1 else ""
    precision = precision_on(train, next(model.parameters()).device)
    own = way_of(train).config_of_update(config, ranks)
    backbone = getattr(model, "backbone", model)  # a layer alone has none
    weights = f"backbone {config.model.pretrained or 'random'}, rest random, seed {config.seed}"
    if step:
        weights = "from the checkpoint"
    elif train.init_from is not None:
        weights = f"of {train.init_from}"
    height, width = config.augment.crop_size
    batch = f"{train.batch_size} images of {height}x{width}"
    if train.accumulate_steps > 1:
        batch += f" in {train.accumulate_steps} microbatches"
    if not isinstance(train.split, str) and ranks > 1:
        divided = Layout.of(train, split_of(train, ranks)).images
        batch += f", {' + '.join(map(str, divided))} of a microbatch to the ranks"
    epochs = train.steps * train.batch_size / len(train_set.pairs)
    parameters = sum(p.numel() for p in model.parameters())
    return [
        f"segtrain {__version__}  torch {torch.__version__}",
        f"devices    {ranks} x {devices[0]}{places}, {precision}"
        + (", compiled: the first step takes minutes" if train.compile else ""),
        f"batch      {batch}",
        f"norm       {_norm_words(config, ranks)}{kept_norms(backbone)}",
        f"data       {len(train_set.pairs)} training and {len(eval_set.pairs)} evaluation images, "
        f"{train_set.classes.num_classes} classes",
        f"model      {config.model.arch} on {config.model.backbone}, output stride "
        f"{config.model.output_stride}, {parameters / 1e6:.1f} M parameters",
        f"weights    {weights}",
        f"lr         {describe_rates(own, step)}, {config.schedule.kind}, {config.optim.kind}",
        f"steps      {train.steps}, {epochs:.1f} epochs"
        + (f", going on after step {step}" if step else ""),
        f"run        {directory}",
        f"curves     tensorboard --logdir {directory}",
    ]


def class_uniform_lines(sampling: ClassUniform, classes: ClassFile) -> list[str]:
    """Lines for the log: how many centroids there are, and which classes have none."""
    by_class = sampling.centroids.by_class
    lines = [
        f"sampling   {100 * sampling.fraction:g}% class-uniform: {len(by_class)} classes "
        f"with {sum(map(len, by_class.values())):,} centroids"
    ]
    if absent := [name for i, name in enumerate(classes.names) if i not in by_class]:
        names = printable(", ".join(absent))
        said = f"no training label shows {names}: such a class is left out"
        lines.append(f"warning: data.class_uniform: {said}")
    return lines


def _norm_words(config: Config, ranks: int) -> str:
    if not config.norm.is_batch_norm:
        return describe_norm(config.norm)
    alone = config.train.is_asynchronous
    kind = "batch norm, each process alone" if alone else describe_norm(config.norm)
    images = images_together(config, ranks)
    return f"{kind}; statistics over {images} images"
