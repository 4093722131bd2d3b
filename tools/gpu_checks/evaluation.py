"""eval, predict and export of one model on this device and on the CPU."""

import importlib.util
import json
from pathlib import Path

import cv2
import numpy as np
import torch

from gpu_checks.commands import DEMO, draw_scenes, options, segtrain
from gpu_checks.findings import Findings
from segtrain.metrics import ConfusionMatrix
from segtrain.run.pictures import LABELS

# Of the pixels: where two classes are almost equally likely, rounding decides.
_MOST_MOVED = 1e-4
_NUM_CLASSES = 19


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """Trains a little, then compares confusion matrices and label maps."""
    is_cuda = device.type == "cuda"
    _count(findings, device)
    size, steps = ((256, 512), 60) if is_cuda else ((64, 128), 4)
    data, run = draw_scenes(folder, 16, 8, size), folder / "run"
    settings = {"data__root": str(data), "augment__crop_size": size, "train__steps": steps}
    where = ["--device", device.type, "--nproc", 1, "--output", run]
    segtrain("train", DEMO, *where, *options(train__warmup_steps=2, **settings))

    photos = data / "leftImg8bit/val"
    for kind in sorted({"cpu", device.type}):
        file = folder / f"{kind}.json"
        segtrain("eval", run, "--device", kind, "--nproc", 1, "--json", file)
        segtrain("predict", run, photos, "--device", kind, "--output", folder / f"pred_{kind}")
    if is_cuda:
        matrices = [
            np.array(json.loads((folder / f"{kind}.json").read_text())["confusion_matrix"])
            for kind in ("cpu", "cuda")
        ]
        moved = int(abs(matrices[0] - matrices[1]).sum()) / 2
        _judge(findings, "eval: pixels that are counted elsewhere", moved, matrices[0].sum())
        _judge(findings, "predict: pixels of another class", *different_pixels(folder))
    else:
        findings.needs_cuda("eval and predict beside the CPU's")
    _export(findings, run, folder)


def _count(findings: Findings, device: torch.device) -> None:
    """Whether the device counts the same predictions as the CPU does."""
    generator = torch.Generator().manual_seed(0)
    shape = (4, 257, 129)
    labels = torch.randint(_NUM_CLASSES + 1, shape, generator=generator)
    labels[labels == _NUM_CLASSES] = 255
    predictions = torch.randint(_NUM_CLASSES, shape, generator=generator)
    counts = []
    for kind in (torch.device("cpu"), device):
        matrix = ConfusionMatrix(_NUM_CLASSES, device=kind)
        matrix.update(predictions.to(kind), labels.to(kind))
        counts.append(matrix.counts.cpu())
    equal = torch.equal(*counts)
    found = "equal" if equal else "different"
    findings.judged("confusion matrix of random predictions", equal, found, "the CPU's")


def _judge(findings: Findings, what: str, moved: float, pixels: int) -> None:
    found = f"{moved:.0f} of {pixels}"
    is_good = moved <= _MOST_MOVED * pixels
    findings.judged(what, is_good, found, f"at most {_MOST_MOVED}", moved=moved, pixels=int(pixels))


def different_pixels(folder: Path) -> tuple[int, int]:
    """How many pixels of the label maps differ between CPU and device, and of how many.

    Raises:
        RuntimeError: there are no label maps, or not the same ones.
    """
    names = [
        {path.name for path in (folder / kind / LABELS).rglob("*.png")}
        for kind in ("pred_cpu", "pred_cuda")
    ]
    if not names[0] or names[0] != names[1]:
        raise RuntimeError(f"predict wrote {len(names[0])} and {len(names[1])} label maps")
    moved = pixels = 0
    for name in names[0]:
        one, other = (
            cv2.imread(str(next((folder / kind / LABELS).rglob(name))), cv2.IMREAD_UNCHANGED)
            for kind in ("pred_cpu", "pred_cuda")
        )
        moved += int((one != other).sum())
        pixels += one.size
    return moved, pixels


def _export(findings: Findings, run: Path, folder: Path) -> None:
    """Each file is run and compared with the model by the command itself."""
    formats = {"safetensors": (), "pt2": (), "onnx": ("onnx", "onnxscript", "onnxruntime")}
    for name, packages in formats.items():
        missing = [one for one in packages if importlib.util.find_spec(one) is None]
        if missing:
            findings.not_measured(f"export to {name}", f"{', '.join(missing)} is not installed")
            continue
        found = "written and verified"
        try:
            segtrain("export", run, "--format", name, "--output", folder / f"model.{name}")
        except RuntimeError as error:
            found = f"{error}; see the output"
        is_good = found.startswith("written")
        findings.judged(f"export to {name}", is_good, found, "written and verified")
