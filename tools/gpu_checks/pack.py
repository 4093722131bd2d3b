"""How long a step waits for data, from PNG files and from a pack."""

import json
from pathlib import Path
from typing import Any

import torch

from gpu_checks.commands import DEMO, draw_scenes, options, segtrain
from gpu_checks.findings import Findings

_MOST_WAIT = 0.02  # of a step, from a pack


def check(findings: Findings, device: torch.device, folder: Path) -> None:
    """`segtrain bench` of PSPNet-R50 on 1024x2048 scenes, crops of 512x1024, bfloat16, batch 8."""
    is_cuda = device.type == "cuda"
    if is_cuda:
        size, crop, scenes, steps = (1024, 2048), [512, 1024], 32, 30
        model = {"backbone": "resnet50", "output_stride": 8, "head_channels": 512}
        train = {"batch_size": 8, "precision": "bfloat16"}
    else:
        size, crop, scenes, steps = (128, 256), [64, 128], 8, 5
        model = {"backbone": "resnet18", "head_channels": 16}
        train = {"batch_size": 2, "precision": "float32"}
    data, pack = draw_scenes(folder, scenes, 2, size), folder / "pack"
    settings = {"data__root": str(data), "data__num_workers": 8 if is_cuda else 1}
    settings |= {"augment__crop_size": crop, "augment__scale_range": [0.5, 2.0]}
    settings |= {f"model__{key}": value for key, value in model.items()}
    settings |= {f"train__{key}": value for key, value in train.items()}
    segtrain("data", "pack", DEMO, "--output", pack, *options(**settings))
    for name, added in (("files", {}), ("a pack", {"data__pack": str(pack)})):
        file = folder / "bench.json"
        where = ["--device", device.type, "--nproc", 1, "--steps", steps, "--json", file]
        segtrain("bench", DEMO, *where, *options(**settings, **added))
        _report(findings, name, json.loads(file.read_text()), is_cuda=is_cuda)
    if not is_cuda:
        findings.needs_cuda("crops of 512x1024, with pinned memory")


def _report(findings: Findings, name: str, bench: dict[str, Any], *, is_cuda: bool) -> None:
    share = bench["data_s"] / bench["step_s"]
    what, found = f"from {name}: wait for data, of a step", f"{share:.1%}"
    found += f" of {1e3 * bench['step_s']:.0f} ms; a sample takes {1e3 * bench['sample_s']:.1f} ms"
    if is_cuda and name == "a pack":
        is_good, wanted = share <= _MOST_WAIT, f"at most {_MOST_WAIT:.0%}"
        findings.judged(what, is_good, found, wanted, **bench)
    else:
        findings.measured(what, found, **bench)
    parts = ", ".join(f"{key} {1e3 * s:.1f}" for key, s in bench["parts_s"].items())
    findings.measured(f"from {name}: parts of a step, ms", parts)
    findings.measured(f"from {name}: what limits it", bench["limit"])
