"""Times the start of a training: python tools/first_step.py [--rounds 6].

Seconds from the command to the end of the first step, on one process of the CPU: `segtrain train`
beside the shortest loop that anybody would write of torchvision's parts, in turns. Both train
DeepLabV3 on ResNet-50 from random weights, on two crops of the same noisy pictures.
"""

import argparse
import json
import os
import shutil
import subprocess
import sys
import tempfile
import time
from pathlib import Path

import cv2
import numpy as np
from rounds import estimate, ratios, turn

_LOOP = """
import sys
from pathlib import Path
import torch
from PIL import Image
from torch.utils.data import DataLoader, Dataset
from torchvision.models.segmentation import deeplabv3_resnet50
from torchvision.transforms import v2
from torchvision.tv_tensors import Mask

data, done = map(Path, sys.argv[1:])
change = v2.Compose([v2.RandomHorizontalFlip(), v2.RandomCrop((96, 128))])

class Pairs(Dataset):
    def __init__(self): self.files = sorted((data / "images/train").iterdir())
    def __len__(self): return len(self.files)
    def __getitem__(self, index):
        file = self.files[index]
        image, label = map(Image.open, (file, data / "labels/train" / file.name))
        to_tensor = v2.functional.pil_to_tensor
        image, label = change(to_tensor(image), Mask(to_tensor(label)))
        return image / 255, label[0].long()

model = deeplabv3_resnet50(weights=None, weights_backbone=None, num_classes=19).train()
optimizer = torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9)
for images, labels in DataLoader(Pairs(), batch_size=2, shuffle=True, num_workers=2):
    loss = torch.nn.functional.cross_entropy(model(images)["out"], labels, ignore_index=255)
    optimizer.zero_grad()
    loss.backward()
    optimizer.step()
    done.write_text("train/loss")
"""


def main() -> None:
    """Prints seconds of both, and the median of their ratio with its interval."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("--rounds", type=int, default=6)
    num_rounds = parser.parse_args().rounds
    with tempfile.TemporaryDirectory() as folder:
        data, run = Path(folder, "data"), Path(folder, "run")
        _draw(data)
        config = {
            "data": {
                "root": str(data),
                "layout": "folders",
                "classes": str(data / "classes.yaml"),
                "num_workers": 2,
            },
            "augment": {"crop_size": [96, 128]},
            "model": {"arch": "deeplabv3", "backbone": "resnet50", "pretrained": None},
            "train": {"batch_size": 2, "steps": 1000},
            "log": {"every_steps": 1},
        }
        Path(folder, "config.yaml").write_text(json.dumps(config))
        train = ["-m", "segtrain", "train", f"{folder}/config.yaml", "--device", "cpu"]
        train += ["--nproc", "1", "--output", str(run)]
        loop = ["-W", "ignore", "-c", _LOOP, str(data), f"{folder}/done"]
        commands = {"torchvision": (loop, Path(folder, "done"))}
        commands["segtrain"] = (train, run / "metrics.jsonl")
        seconds = {name: [] for name in commands}
        for index in range(-1, num_rounds):  # the first round reads the libraries from the disk
            for name in turn(list(commands), index):
                took = _first_step_s(*commands[name])
                if index >= 0:
                    seconds[name].append(took)
    for name, values in seconds.items():
        print(f"{name:<12} {estimate(values)} s")
    print("ratio        " + str(estimate(ratios(seconds["segtrain"], seconds["torchvision"]))))


def _draw(data: Path) -> None:
    rng = np.random.default_rng(0)
    data.mkdir()
    names = [f"class {k}" for k in range(19)]
    (data / "classes.yaml").write_text(json.dumps({"classes": names}))
    for split, number in (("train", 16), ("val", 2)):
        for kind, top, channels in (("images", 256, (3,)), ("labels", 19, ())):
            (data / kind / split).mkdir(parents=True)
            for i in range(number):
                pixels = rng.integers(0, top, (120, 160, *channels), dtype=np.uint8)
                cv2.imwrite(str(data / kind / split / f"{i}.png"), pixels)


def _first_step_s(arguments: list[str], file: Path) -> float:
    """Seconds until `file` holds a loss; the process is ended then."""
    if file.parent.name == "run":
        shutil.rmtree(file.parent, ignore_errors=True)
    file.unlink(missing_ok=True)
    began = time.perf_counter()
    command = [sys.executable, *arguments]
    with (
        tempfile.TemporaryFile() as said,  # the loop's loaders complain when it is ended
        subprocess.Popen(command, stdout=said, stderr=said) as process,
    ):
        while not (file.exists() and "train/loss" in file.read_text()):
            if process.poll() is not None:
                said.seek(0)
                sys.exit(said.read().decode())
            time.sleep(0.005)
        took = time.perf_counter() - began
        process.terminate()
    return took


if __name__ == "__main__":
    os.environ["NO_ALBUMENTATIONS_UPDATE"] = "1"
    main()
