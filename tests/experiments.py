"""A small data set, a small experiment on it and what it leaves, for tests that train."""

import hashlib
import json
import multiprocessing
import os
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import cv2
import numpy as np
import torch
import yaml

from segtrain import plugins

COLORS = np.array([(90, 60, 70), (70, 140, 60), (60, 90, 200), (200, 190, 90)], dtype=np.uint8)


def write_data(
    root: Path, num_images: int = 8, size: tuple[int, int] = (56, 72), *, num_val: int = 3
) -> None:
    """Noisy coloured shapes with 4 classes and some ignored: {images,labels}/<split>/."""
    rng = np.random.default_rng(0)
    (root / "classes.yaml").write_text("classes: [ground, plant, water, sand]\nignore_ids: [255]\n")
    for split in ("train", "val"):
        for kind in ("images", "labels"):
            (root / kind / split).mkdir(parents=True)
        for i in range(num_images if split == "train" else num_val):
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
        "model": {"backbone": "resnet18", "head_channels": 16, "aux_channels": 16},
        "train": {"steps": 20, "batch_size": 5, "precision": "float64"},
        "optim": {"lr": 0.02},
        "log": {"every_steps": 1, "charts": False},  # which take a second
        "eval": {"every_steps": None},
    }
    for section, values in sections.items():
        options.setdefault(section, {}).update(values)
    # Half a ResNet shows the same, and saving and hashing whole ones took half of a test's time.
    is_resnet = options["model"]["backbone"].startswith("resnet")
    depth = {"num_stages": 2, "output_stride": 8} if is_resnet else {"output_stride": 16}
    options["model"] = depth | options["model"]
    return options


def sections(**options: Any) -> dict[str, dict[str, Any]]:
    """Options of train, optim and schedule by their names alone, as the sections of a Config.

    `optimizer` and `schedule` are the kinds.
    """
    from segtrain.config import OptimConfig, ScheduleConfig

    found: dict[str, dict[str, Any]] = {"train": {}, "optim": {}, "schedule": {}}
    kinds = {"optimizer": "optim", "schedule": "schedule"}
    for name, value in options.items():
        if name in kinds:
            found[kinds[name]]["kind"] = value
        elif name in OptimConfig.model_fields:
            found["optim"][name] = value
        elif name in ScheduleConfig.model_fields:
            found["schedule"][name] = value
        else:
            found["train"][name] = value
    return found


def unread(**sections: Any) -> Any:
    """A Config with these sections, whose data set nobody opens."""
    from segtrain.config import Config

    data = {"layout": "folders", "root": "none", "classes": "camvid"}
    return Config.model_validate({"data": data, **sections})


def settings(**options: Any) -> Any:
    """A Config with these `sections`, of a model that starts from weights."""
    return unread(model={"pretrained": "DEFAULT"}, **sections(**options))


def write_config(path: Path, options: dict[str, Any]) -> Path:
    path.write_text(yaml.safe_dump(options))
    return path


def train(config: Path, directory: Path, resume: bool = False, **options: Any) -> int:
    """The whole `segtrain train` of one rank, without the launcher."""
    from segtrain.config import load_config
    from segtrain.trainer.loop import run
    from segtrain.trainer.setup import TrainRequest

    # A process of a fork server would have one of its own for the loader's workers.
    multiprocessing.set_start_method(None, force=True)
    cpu = torch.device("cpu")
    return run(TrainRequest(load_config(config), directory, cpu, resume=resume, **options))


def losses(directory: Path, tag: str = "train/loss") -> list[float]:
    """The losses of every step that a run logged."""
    lines = [json.loads(line) for line in (directory / "metrics.jsonl").read_text().splitlines()]
    return [line[tag] for line in lines if tag in line]


def small(root: Path, /, **sections: dict[str, Any]) -> dict[str, Any]:
    """Few weights; augmentation, dropout and an average of the weights."""
    train = {"precision": "float32"} | sections.pop("train", {})
    optim = {"ema_decay": 0.9} | sections.pop("optim", {})
    sizes = {"augment": {"crop_size": [33, 41]}}
    return experiment(root, **sizes | sections, train=train, optim=optim)


def stopped_after(
    step: int,
    config: Path,
    directory: Path,
    resume: bool = False,
    number: int = signal.SIGTERM,
    rank: int = 0,
) -> int:
    """As `train`; after `step` updates a signal reaches `rank`."""
    _signal_after(step, number, rank)
    return train(config, directory, resume)


def train_member(arguments: list[str], stop_after: int | None = None) -> int:
    """`segtrain ARGUMENTS` in this rank; SIGTERM reaches it after some step."""
    from segtrain import cli

    multiprocessing.set_start_method(None, force=True)
    _signal_after(stop_after, signal.SIGTERM, 0)
    return cli.main(arguments)


def _signal_after(step: int | None, number: int, rank: int) -> None:
    from segtrain.distributed import collectives as dist

    def act(result: Any) -> None:
        if result.step == step and dist.rank() == rank:
            os.kill(os.getpid(), number)

    after_each_step(act)


def after_each_step(act: Callable[[Any], object]) -> None:
    """Calls `act` with the StepResult of each step of this process, before others see it."""
    from segtrain.training.step import TrainStep

    whole = TrainStep.done

    def done(self: Any, *args: Any) -> Any:
        result = whole(self, *args)
        act(result)
        return result

    TrainStep.done = done


def signalled_in_evaluation(
    step: int, where: str, config: Path, directory: Path, resume: bool, number: int, rank: int
) -> tuple[int, int]:
    """As `train`; `rank` gets a signal at its second image of the evaluation after `step`.

    where: "predict_labels"; or "batches", for those of norm.precise_batches instead of images.
    Returns also how many of them this rank has begun. From the signal on, each takes 0.3 s.
    """
    from segtrain.distributed import collectives as dist
    from segtrain.distributed import liveness
    from segtrain.inference import predictor
    from segtrain.trainer.training import Training

    begun = []

    def begin() -> None:
        if liveness.describe() != f"in evaluation, after step {step}":
            return
        begun.append(time.monotonic())
        if len(begun) == 2 and dist.rank() == rank:
            os.kill(os.getpid(), number)
        time.sleep(0.3)

    predict_labels, loader = predictor.predict_labels, Training.loader

    def predict_slowly(*args: Any, **kwargs: Any) -> Any:
        begin()
        return predict_labels(*args, **kwargs)

    def batches_slowly(*args: Any) -> Iterator[Any]:
        for batch in loader(*args):
            begin()
            yield batch

    if where == "batches":
        Training.loader = batches_slowly
    else:
        predictor.predict_labels = predict_slowly
    return train(config, directory, resume), len(begun)


def killed_in_evaluation(config: Path, directory: Path) -> str | None:
    """As `train` without resuming; ends before its first evaluation, and returns "killed"."""
    from segtrain.trainer import loop

    def die(_: Any) -> None:
        raise KeyboardInterrupt

    loop.evaluate = die
    try:
        train(config, directory)
    except KeyboardInterrupt:
        return "killed"
    return None


def refusal(function: Callable[..., Any], *args: Any) -> tuple[str, int, str] | None:
    """The error of `function` in words: its kind, its exit code and what it says."""
    from segtrain.errors import UserError

    try:
        function(*args)
    except UserError as error:
        return type(error).__name__, error.exit_code, str(error)
    return None


def last(directory: Path) -> Any:
    """The record that a run would go on from."""
    from segtrain.checkpoint.format import load

    return load(directory / "checkpoints" / "last.pt")


def assert_same_state(one: Any, other: Any) -> None:
    """That two records hold the same step and the same bits."""
    assert one.step == other.step
    for field in ("model", "average", "optimizer"):
        a, b = _tensors(getattr(one, field)), _tensors(getattr(other, field))
        assert len(a) > 50
        assert a.keys() == b.keys()
        assert [key for key in a if not torch.equal(a[key], b[key])] == []


def bits(record: Any) -> dict[str, str]:
    """The SHA-256 of all that train.shares keeps equal in a Checkpoint, by name."""
    names = ("step", "model", "average", "optimizer", "scaler", "best", "shares")
    digests = {name: hashlib.sha256() for name in names}
    for name, digest in digests.items():
        _feed(digest, getattr(record, name))
    return {name: digest.hexdigest() for name, digest in digests.items()}


def logged(directory: Path) -> dict[str, list[float]]:
    """The curves of a run that must not depend on the number of ranks."""
    tags = ("train/loss", "train/aux_loss", "train/grad_norm", "eval/mIoU")
    return {tag: losses(directory, tag) for tag in tags}


def trained_bits(config: Path, directory: Path) -> dict[str, Any]:
    """Trains, and returns the `bits` of what this rank holds at the end; rank 0: the curves too.

    Nothing is saved, which would take most of the time of a short run.
    """
    from segtrain.checkpoint.manager import CheckpointManager
    from segtrain.distributed import collectives as dist
    from segtrain.trainer import loop, save

    whole, found = loop.train, {}

    def train_and_keep(run: Any) -> None:
        whole(run)
        found.update(bits(save.checkpoint_of(run)))

    loop.train = train_and_keep
    CheckpointManager.save_last = CheckpointManager.save_best = lambda *_: None
    assert train(config, directory) == 0
    return found | (logged(directory) if dist.is_main() else {})


def _feed(digest: Any, value: Any) -> None:
    if isinstance(value, torch.Tensor):
        digest.update(f"{value.dtype} {tuple(value.shape)}".encode())
        digest.update(value.contiguous().numpy().tobytes())
    elif isinstance(value, dict):
        for key, part in value.items():
            digest.update(repr(key).encode())
            _feed(digest, part)
    elif isinstance(value, list | tuple):
        for part in value:
            _feed(digest, part)
    else:
        digest.update(repr(value).encode())


def _tensors(value: Any, name: str = "") -> dict[str, torch.Tensor]:
    """All tensors in nested containers by their place."""
    if isinstance(value, torch.Tensor):
        return {name: value}
    if not isinstance(value, (dict, list, tuple)):
        return {}
    items = value.items() if isinstance(value, dict) else enumerate(value)
    parts = [_tensors(part, f"{name}/{key}") for key, part in items]
    return {key: tensor for part in parts for key, tensor in part.items()}


def curve(directory: Path, tag: str) -> list[tuple[int, float]]:
    """The steps and values of a curve in TensorBoard's files."""
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    read = EventAccumulator(str(directory), size_guidance={"scalars": 0})
    read.Reload()
    return [(event.step, event.value) for event in read.Scalars(tag)]


def on_meta(build):
    """What `build` makes, without memory."""
    with torch.device("meta"):
        return build()


def lively(build, *, seed=1, dtype=torch.float32):
    """What `build` makes, as `enliven` leaves it.

    Drawing weights here spares the initialization of large models, most of the tests' time.
    """
    return enliven(on_meta(build).to_empty(device="cpu").to(dtype), seed=seed)


def enliven(module, *, seed=1):
    """`module` with weights and statistics that no two layers share, in eval mode."""
    generator = torch.Generator().manual_seed(seed)
    for layer in module.modules():
        if isinstance(layer, torch.nn.BatchNorm2d):
            layer.running_mean.uniform_(-0.2, 0.2, generator=generator)
            layer.running_var.uniform_(0.5, 1.5, generator=generator)
            layer.num_batches_tracked.fill_(3)
            torch.nn.init.uniform_(layer.weight, 0.5, 1.5, generator=generator)
            torch.nn.init.uniform_(layer.bias, -0.2, 0.2, generator=generator)
        elif isinstance(layer, torch.nn.Conv2d | torch.nn.Linear):
            torch.nn.init.kaiming_uniform_(layer.weight, generator=generator)
            if layer.bias is not None:
                torch.nn.init.uniform_(layer.bias, -0.2, 0.2, generator=generator)
    return module.eval()


def fill(disk: Path, room: int = 0) -> None:
    """Leaves `room` bytes free on a small disk."""
    (disk / "other").write_bytes(bytes(shutil.disk_usage(disk).free - room))


def flip_bit(path, place=0.5):
    """Damages a file; `place` is a byte, or a share of them."""
    content = bytearray(path.read_bytes())
    content[place if isinstance(place, int) else int(place * len(content))] ^= 4
    path.write_bytes(content)


def segtrain(*words):
    """The exit code of a command, in this process."""
    from segtrain import cli

    return cli.main([str(word) for word in words])


def contents(directory):
    """The bytes of all files below it, by their path there."""
    files = (path for path in directory.rglob("*") if path.is_file())
    return {str(path.relative_to(directory)): path.read_bytes() for path in files}


@contextmanager
def forgetting():
    """What is imported meanwhile is forgotten at the end, as by a process; so is the folder."""
    tables = plugins._plugins, plugins._absent, plugins._loaded, plugins._paths
    before, folder = [dict(table) for table in tables], Path.cwd()
    yield
    os.chdir(folder)
    for table, entries in zip(tables, before, strict=True):
        table.clear(), table.update(entries)
    for name in [name for name in sys.modules if name.startswith("segtrain_extras")]:
        del sys.modules[name]
