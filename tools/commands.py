"""`segtrain` commands for the tools: how one is run, and what a run has logged."""

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
DEMO = ROOT / "configs/demo.yaml"


def command(*arguments: object) -> list[str]:
    """The words that start `segtrain ARGUMENTS` with this Python."""
    return [sys.executable, "-m", "segtrain", *map(str, arguments)]


def segtrain(*arguments: object, quiet: bool = False) -> None:
    """Runs one command; CalledProcessError if it fails."""
    subprocess.run(command(*arguments), check=True, capture_output=quiet)


def settings(*pairs: str, **values: object) -> list[str]:
    """--set for each "section.key=value"; a keyword's dot is written as two underscores."""
    pairs += tuple(f"{key.replace('__', '.')}={_as_text(value)}" for key, value in values.items())
    return [word for pair in pairs for word in ("--set", pair)]


def logged(run: Path, tag: str) -> list[float]:
    """The values of a curve of a run, in order, which may still be growing."""
    path = run / "metrics.jsonl"
    lines = path.read_text().splitlines(keepends=True) if path.exists() else []
    values = [json.loads(line) for line in lines if line.endswith("\n")]
    return [value[tag] for value in values if tag in value]


def draw_scenes(root: Path, num_train: int, num_val: int, size: tuple[int, int]) -> Path:
    """A new data set of synthetic street scenes of height and width `size`; returns `root`."""
    numbers = ["--num-train", num_train, "--num-val", num_val, "--size", *size]
    segtrain("data", "synth", root, *numbers, quiet=True)
    return root


def _as_text(value: object) -> str:
    return str(value) if isinstance(value, str | Path) else json.dumps(value)
