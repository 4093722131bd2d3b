"""Does `segtrain compare A B --steps` name what was planted, and accuse nothing that is harmless?

    python tools/steps_trial.py runs/steps

Trains a small model on drawn scenes again and again, each time with one thing changed, and prints
the verdict of each pair as a row of a table. Exits with 1 if one is wrong.
"""

import argparse
import importlib
import multiprocessing
import os
import re
import shutil
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import cv2
import torch

from segtrain import cli
from segtrain.commands import compare  # noqa: F401  once for all processes
from segtrain.commands.train import loop  # noqa: F401

CONFIG = """\
data: {{layout: cityscapes, root: "{root}", classes: "{root}/classes.yaml", num_workers: 0}}
augment: {{crop_size: [48, 96], scale_range: [0.8, 1.6], color_prob: 0.5}}
model: {{arch: pspnet, backbone: resnet18, num_stages: 2, output_stride: 8, head_channels: 16}}
loss: {{kind: ohem, ohem_threshold: 0.02, ohem_min_kept: 2000}}
train: {{steps: 12, batch_size: 6, shares: 3, precision: float32}}
optim: {{lr: 0.02, weight_decay: 0.0001, ema_decay: 0.9}}
eval: {{every_steps: null}}
log: {{every_steps: 1, charts: false}}
"""
EQUAL = "the runs are equal "
IMAGE, LABEL = "leftImg8bit/train/*/*.png", "gtFine/train/*/*_labelIds.png"


def write(path: Path, pixels: Any) -> None:
    """Without compression, so that other pixels do not change the size of the file."""
    cv2.imwrite(str(path), pixels, [cv2.IMWRITE_PNG_COMPRESSION, 0])


def repainted(pattern: str, root: Path) -> None:
    """Another value of one pixel of the first such file."""
    path = sorted(root.glob(pattern))[0]
    pixels = cv2.imread(str(path), cv2.IMREAD_UNCHANGED)
    pixels[70, 60] = 7 if pixels[70, 60].max() != 7 else 8  # a road, a sidewalk
    write(path, pixels)


def moved(move: Callable[[Path, Path], Any], root: Path) -> None:
    """The first image and its label as the last ones."""
    for path in (sorted(root.glob(pattern))[0] for pattern in (IMAGE, LABEL)):
        move(path, path.with_name("zz" + path.name))


def rewritten(name: str, old: str, new: str, root: Path) -> None:
    """Another text in a file."""
    text = re.sub(old, new, (root / name).read_text())
    (root / name).write_text(text)


def wrapped(module: str, name: str, change: Callable[[Any], Any]) -> Callable[[], None]:
    """A patch that puts another function into the place of one."""

    def patch() -> None:
        place = importlib.import_module(module)
        setattr(place, name, change(getattr(place, name)))

    return patch


def one_bit(model: torch.nn.Module) -> torch.nn.Module:
    """The model with another last bit of one weight."""
    next(model.parameters()).data.view(-1)[:1].view(torch.int32).bitwise_xor_(1)
    return model


STEP = "segtrain.training.step"
AREA = {"interpolation": cv2.INTER_AREA}
RESIZED = wrapped("cv2", "resize", lambda f: lambda *a, **o: f(*a, **o | AREA))
BIT = wrapped(
    "segtrain.commands.train.setup", "build_model", lambda f: lambda *a, **o: one_bit(f(*a, **o))
)
RATE = wrapped(STEP, "set_learning_rate", lambda f: lambda optimizer, lr: f(optimizer, lr * 1.0001))
LOSS = wrapped(
    "torch.nn.functional", "cross_entropy", lambda f: lambda *a, **o: f(*a, **o) * 1.00001
)
KILLED = wrapped(
    STEP, "update", lambda f: lambda state, *a: os._exit(9) if state.step == 6 else f(state, *a)
)
AVX2 = partial(os.environ.update, ATEN_CPU_CAPABILITY="avx2", ONEDNN_MAX_CPU_ISA="AVX2")
ONE_THREAD = partial(torch.set_num_threads, 1)
OPENCV = partial(rewritten, "environment.json", '(?<=opencv-python-headless": ").*?(?=")', "4.5")
ORDER = partial(
    rewritten, "classes.yaml", "(?s)(  - {name: road.*?\n)(  - {name: sidew.*?\n)", r"\2\1"
)
PIXEL, TWO_RANKS = partial(repainted, IMAGE), ["--nproc", "2"]
CUT = {"patch": KILLED, "set": "checkpoint.every_steps=4", "resume": []}
PLAIN = "train.shares=null"
# Each with what the verdict begins with, and what is changed: options by --set, others, the data
# before the run, the code, the run afterwards; and how it is resumed.
CASES: dict[str, tuple[str, dict[str, Any]]] = {
    "pixel of a label": ("data: .*labels hold", {"data": partial(repainted, LABEL)}),
    "pixel of an image": ("pixels: ", {"data": PIXEL}),
    "one image more": ("data: split train: 8 images", {"data": partial(moved, shutil.copy)}),
    "order of files": ("data: split train: names", {"data": partial(moved, Path.rename)}),
    "order of classes": ("data: class file", {"data": ORDER}),
    "interpolation": ("pixels: ", {"patch": RESIZED}),
    "and another OpenCV": ("versions: opencv", {"patch": RESIZED, "after": OPENCV}),
    "bit of a starting weight": ("starting weights: ", {"patch": BIT}),
    "rate in the code": ("the update after step 1,", {"patch": RATE}),
    "loss in the code": ("the code of model, loss", {"patch": LOSS}),
    "AVX2": ("only rounding: bits of a small step", {"patch": AVX2, "options": TWO_RANKS}),
    "plain: threads": ("only rounding", {"set": PLAIN, "patch": ONE_THREAD}),
    "plain: two ranks": ("only rounding: dev", {"set": PLAIN, "options": TWO_RANKS}),
    "plain: pixel of an image": ("more than rounding", {"set": PLAIN, "data": PIXEL}),
    "another directory": (EQUAL, {}),
    "two ranks": (EQUAL, {"options": TWO_RANKS}),
    "three ranks": (EQUAL, {"options": ["--nproc", "3"]}),
    "threads": (EQUAL, {"patch": ONE_THREAD}),
    "killed, resumed": (EQUAL, CUT),
    "killed, resumed on two ranks": (EQUAL, CUT | {"resume": TWO_RANKS}),
    "--until, --resume": (EQUAL, {"options": ["--until", "5"], "resume": []}),
    "data elsewhere": (EQUAL, {"data": lambda root: None}),
    "touched files": (EQUAL, {"data": lambda root: [x.touch() for x in root.rglob("*.png")]}),
    "a pack": (EQUAL, {"set": "data.pack={where}/pack"}),
    "a version without effect": (EQUAL, {"after": OPENCV}),
    "plain: another directory": (EQUAL, {"set": PLAIN}),
    "plain: workers": (EQUAL, {"set": f"{PLAIN} data.num_workers=2"}),
    "plain: killed, resumed": (EQUAL, CUT | {"set": f"{PLAIN} {CUT['set']}"}),
}
BLAMED = """
seed=1 optim.lr=0.0200001 optim.weight_decay=0.0001001 optim.momentum=0.90001 model.dropout=0.11
augment.flip_prob=0.3 loss.ohem_min_kept=2001 train.precision=bfloat16 train.batch_size=5
optim.ema_decay=0.3 schedule.warmup_steps=2
"""
HARMLESS = """
data.num_workers=1|data.num_workers=2 data.prefetch=3|train.timeout_s=300|log.every_steps=5
log.charts=true|log.sample_losses=false|train.max_hours=9|train.patience=3 eval.every_steps=6
checkpoint.every_steps=3|checkpoint.keep_every_steps=5|eval.every_steps=6|eval.flip=true
"""
CASES |= {text: (f"config: {text.split('=')[0]}: ", {"set": text}) for text in BLAMED.split()}
CASES |= {text: (EQUAL, {"set": text}) for text in re.split(r"\||\n", HARMLESS.strip())}


def segtrain(log: Path, *arguments: object, patch: Callable[[], Any] = lambda: None) -> str:
    """What the command prints, in a process of its own: `patch` reaches nothing else."""

    def child() -> None:
        os.environ.pop("OMP_NUM_THREADS", None)
        patch()
        file = os.open(log, os.O_CREAT | os.O_WRONLY | os.O_TRUNC)
        os.dup2(file, 1), os.dup2(file, 2)  # of its ranks, too
        sys.exit(cli.main([*map(str, arguments)]))

    # This process computes nothing, so it has no threads that a fork could break.
    process = multiprocessing.get_context("fork").Process(target=child)
    process.start()
    process.join()
    return log.read_text()


def trained(where: Path, name: str, case: dict[str, Any]) -> Path:
    """The run of a case."""
    root, run, log, config = (
        where / "data",
        where / name,
        where / f"{name}.log",
        where / f"{name}.yaml",
    )
    if "data" in case:
        root = Path(shutil.copytree(root, where / f"{name}_data"))
        case["data"](root)
    config.write_text(CONFIG.format(root=root))
    settings = case.get("set", "").format(where=where).split()
    train = (
        "train",
        config,
        "--output",
        run,
        "--device",
        "cpu",
        *(x for one in settings for x in ("--set", one)),
    )
    segtrain(log, *train, *case.get("options", ()), patch=case.get("patch", lambda: None))
    if "resume" in case:
        segtrain(log, *train, "--resume", *case["resume"])
    case.get("after", lambda run: None)(run)
    return run


def main() -> int:
    """The command line; returns the exit code."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("directory", type=Path, help="where runs are written; must be new")
    parser.add_argument("--only", default="", help="cases whose names match this expression")
    args = parser.parse_args()
    where = args.directory.resolve()
    where.mkdir(parents=True)
    root, log = where / "data", where / "log"
    sizes = "--num-train=8", "--num-val=2", "--size", 96, 192
    segtrain(log, "data", "synth", root, *sizes)
    shutil.copy(Path(__file__).parents[1] / "data/classes/cityscapes.yaml", root / "classes.yaml")
    for path in [*root.glob(IMAGE), *root.glob(LABEL)]:
        write(path, cv2.imread(str(path), cv2.IMREAD_UNCHANGED))
    bases = {text: trained(where, f"base{text}", {"set": text}) for text in ("", PLAIN)}
    segtrain(log, "data", "pack", where / "base.yaml", "--output", where / "pack")
    wrong = 0
    for i, (name, (expected, case)) in enumerate(CASES.items()):
        if re.search(args.only, name):
            base = bases[PLAIN if PLAIN in case.get("set", "") else ""]
            pair = base, trained(where, f"run_{i}", case)
            found = (
                segtrain(log, "compare", *pair, "--steps")
                .splitlines()[-1]
                .removeprefix("verdict     ")
            )
            is_right = re.match(expected, found) is not None
            wrong += not is_right
            print(f"| {name} | {'yes' if is_right else 'NO'} | {found} |", flush=True)
    return int(wrong > 0)


if __name__ == "__main__":
    sys.exit(main())
