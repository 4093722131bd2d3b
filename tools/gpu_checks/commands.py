"""`segtrain` commands on synthetic scenes, for checks of whole runs."""

import json
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

DEMO = Path(__file__).resolve().parent.parent.parent / "configs/demo.yaml"


def segtrain(*arguments: object) -> None:
    """Runs one command; its output joins that of the check.

    Raises:
        RuntimeError: it failed.
    """
    done = subprocess.run(command(*arguments))
    if done.returncode:
        raise RuntimeError(f"segtrain {arguments[0]} ended with {done.returncode}")


def command(*arguments: object) -> list[str]:
    """A command of segtrain, shown in the output."""
    words = list(map(str, arguments))
    print(f"\n$ segtrain {shlex.join(words)}", flush=True)
    return [sys.executable, "-m", "segtrain", *words]


def draw_scenes(folder: Path, num_train: int, num_val: int, size: tuple[int, int]) -> Path:
    """A new data set of street scenes; returns its root."""
    root = folder / f"scenes_{size[0]}"
    sizes = ["--num-train", num_train, "--num-val", num_val, "--size", *size]
    segtrain("data", "synth", root, *sizes)
    return root


def options(**values: Any) -> list[str]:
    """--set for options whose dots are written as two underscores."""
    words = []
    for name, value in values.items():
        text = value if isinstance(value, str) else json.dumps(value)
        words += ["--set", f"{name.replace('__', '.')}={text}"]
    return words


def logged(run: Path, tag: str) -> list[float]:
    """The values that a run logged, in order; those that are complete by now."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    return [value[tag] for value in values if tag in value]
