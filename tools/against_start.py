"""Start-up seconds of the contenders of bench_against.py: from the command to its first step.

All train PSPNet-R18 on the same small images in files, in batches of two, with two loader workers.
segtrain and mmsegmentation are started by their own commands; torchvision's loop and smp's, which
are no commands, by a script with the same parts (`python against_start.py NAME FOLDER`).
"""

import json
import os
import subprocess
import sys
import time
from pathlib import Path
from tempfile import TemporaryDirectory

SEGTRAIN, TORCHVISION, SMP, MMSEG = "segtrain", "torchvision", "smp", "mmseg"
CASE = {MMSEG: "pspnet_r18 of mmseg", SMP: "pspnet_r18 of smp"}
CROP, BATCH, WORKERS, NUM_CLASSES = (96, 128), 2, 2, 19
_TIMEOUT_S = 300
_FIRST = "first step"


def first_step_s(contender: str, root: Path) -> float:
    """Seconds from the command of a contender to the end of its first training step."""
    with TemporaryDirectory() as folder:
        command = _command(contender, root, Path(folder))
        metrics = Path(folder) / "run" / "metrics.jsonl"
        began = time.perf_counter()
        with subprocess.Popen(
            command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, cwd=folder
        ) as process:
            try:
                if contender == SEGTRAIN:
                    _wait_for(metrics, process)
                else:
                    lines = []
                    for line in process.stdout:
                        lines.append(line)
                        if line.startswith(_FIRST):
                            break
                    else:
                        raise RuntimeError(f"{contender}: no step:\n{''.join(lines[-20:])}")
                return time.perf_counter() - began
            finally:
                process.terminate()
                process.communicate()


def help_s(contender: str) -> float | None:
    """Seconds of its command with --help; None: it has no command."""
    command = _help_command(contender)
    if command is None:
        return None
    began = time.perf_counter()
    subprocess.run(command, check=True, capture_output=True)
    return time.perf_counter() - began


def _help_command(contender: str) -> list[str] | None:
    if contender == SEGTRAIN:
        return [sys.executable, "-m", "segtrain", "--help"]
    if contender == MMSEG:
        return [sys.executable, "-W", "ignore", str(_mmseg_tool()), "--help"]
    return None


def _mmseg_tool() -> Path:
    import importlib.util

    package = importlib.util.find_spec("mmseg").submodule_search_locations[0]
    return Path(package) / ".mim" / "tools" / "train.py"


def _wait_for(metrics: Path, process: subprocess.Popen) -> None:
    """Until the file of a run holds the line of its first step."""
    deadline = time.perf_counter() + _TIMEOUT_S
    while not (metrics.exists() and "train/loss" in metrics.read_text()):
        if process.poll() is not None:
            raise RuntimeError(f"segtrain ended early:\n{process.stdout.read()[-2000:]}")
        if time.perf_counter() > deadline:
            raise RuntimeError(f"no step within {_TIMEOUT_S} s")
        time.sleep(0.005)


def _command(contender: str, root: Path, folder: Path) -> list[str]:
    if contender != SEGTRAIN:
        return [sys.executable, "-W", "ignore", str(Path(__file__).resolve()), contender, str(root)]
    options = {
        "data": {
            "layout": "folders",
            "root": str(root),
            "classes": str(root / "classes.yaml"),
            "num_workers": WORKERS,
        },
        "augment": {"crop_size": CROP},
        "model": {"backbone": "resnet18", "head_channels": 128, "aux_channels": 64},
        "train": {"batch_size": BATCH, "steps": 1000},
        "log": {"every_steps": 1},
    }
    # JSON is YAML, too.
    (folder / "config.yaml").write_text(json.dumps(options))
    command = [sys.executable, "-m", "segtrain", "train", str(folder / "config.yaml")]
    return [*command, "--nproc", "1", "--output", str(folder / "run")]


def _train_mmseg(root: Path) -> None:
    """What its tools/train.py does: a Runner from a config."""
    from against_mmseg import load_mmseg, pspnet_r18
    from mmengine.config import Config
    from mmengine.hooks import Hook
    from mmengine.runner import Runner

    load_mmseg()

    class Tell(Hook):
        def after_train_iter(self, *_: object, **__: object) -> None:
            print(_FIRST, flush=True)

    pipeline = [
        {"type": "LoadImageFromFile"},
        {"type": "LoadAnnotations"},
        {
            "type": "RandomResize",
            "scale": CROP[::-1],
            "ratio_range": (0.5, 2.0),
            "keep_ratio": True,
        },
        {"type": "RandomCrop", "crop_size": CROP, "cat_max_ratio": 0.75},
        {"type": "RandomFlip", "prob": 0.5},
        {"type": "PackSegInputs"},
    ]
    dataset = {
        "type": "BaseSegDataset",
        "data_root": str(root),
        "img_suffix": ".png",
        "seg_map_suffix": ".png",
        "metainfo": {"classes": [f"class{i}" for i in range(NUM_CLASSES)]},
        "data_prefix": {"img_path": "images/train", "seg_map_path": "labels/train"},
        "pipeline": pipeline,
    }
    model = pspnet_r18(NUM_CLASSES)
    model["data_preprocessor"]["size"] = CROP
    options = {
        "default_scope": "mmseg",
        "work_dir": os.getcwd(),
        "model": model,
        "train_dataloader": {
            "batch_size": BATCH,
            "num_workers": WORKERS,
            "persistent_workers": True,
            "sampler": {"type": "InfiniteSampler", "shuffle": True},
            "dataset": dataset,
        },
        "optim_wrapper": {
            "type": "OptimWrapper",
            "optimizer": {"type": "SGD", "lr": 0.01, "momentum": 0.9, "weight_decay": 5e-4},
        },
        "train_cfg": {"type": "IterBasedTrainLoop", "max_iters": 1000, "val_interval": 1000},
        "log_processor": {"by_epoch": False},
    }
    runner = Runner.from_cfg(Config(options))
    runner.register_hook(Tell())
    runner.train()


def _train_plain(contender: str, root: Path) -> None:
    """torchvision's loop, and smp's, on a data set of files."""
    import torch
    import torch.nn.functional as F
    from against_models import CASES, build
    from PIL import Image
    from torch.utils.data import DataLoader, Dataset
    from torchvision.transforms import v2
    from torchvision.tv_tensors import Mask

    case = CASES[CASE[SMP if contender == SMP else MMSEG]]
    change = v2.Compose([v2.RandomHorizontalFlip(0.5), v2.RandomCrop(CROP, pad_if_needed=True)])

    class Files(Dataset):
        def __init__(self) -> None:
            self.paths = sorted((root / "images/train").iterdir())

        def __len__(self) -> int:
            return len(self.paths)

        def __getitem__(self, index: int) -> tuple[torch.Tensor, torch.Tensor]:
            path = self.paths[index]
            image = v2.functional.pil_to_tensor(Image.open(path))
            label = v2.functional.pil_to_tensor(Image.open(root / "labels/train" / path.name))
            image, label = change(image, Mask(label))
            return image / 255, label[0].long()

    model = build(contender, case).train()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
    loader = DataLoader(Files(), batch_size=BATCH, shuffle=True, num_workers=WORKERS)
    for images, labels in loader:
        outputs = model(images)
        outputs = outputs["out"] if isinstance(outputs, dict) else outputs
        loss = F.cross_entropy(outputs, labels, ignore_index=255)
        optimizer.zero_grad()
        loss.backward()
        optimizer.step()
        print(_FIRST, flush=True)


if __name__ == "__main__":
    name, folder = sys.argv[1:]
    _train_mmseg(Path(folder)) if name == MMSEG else _train_plain(name, Path(folder))
