"""The directory of a run: what it holds, and when it may be used."""

import json
import platform
import subprocess
import sys
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from segtrain import __version__
from segtrain.config import Config, config_to_yaml, load_config
from segtrain.errors import CheckpointError, ConfigError

CONFIG, ENVIRONMENT, METRICS, LOG = "config.yaml", "environment.json", "metrics.jsonl", "train.log"
CHECKPOINTS = "checkpoints"

_LIBRARIES = ("torch", "torchvision", "albumentations", "opencv-python-headless", "numpy", "pillow")

# What may change between the parts of a run without changing the model it ends with.
_HARMLESS = ("data.root", "data.num_workers", "data.prefetch", "log.", "checkpoint.")


def check_directory(directory: Path, config: Config, *, resume: bool) -> None:
    """Refuses a directory that this run must not write into.

    Raises:
        ConfigError: it holds a run already, or is no directory; with `resume`, its config differs.
        CheckpointError: with `resume`, there is nothing to go on from.
    """
    if directory.exists() and not directory.is_dir():
        raise ConfigError(f"{directory}: a file stands where the run directory should be")
    if not resume:
        if (directory / CONFIG).exists():
            raise ConfigError(
                f"{directory}: holds a run already; go on with it by --resume, or choose another "
                "directory by --output"
            )
        return
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory}: no run to resume")
    differences = _differences(load_config(directory / CONFIG), config)
    if differences:
        listed = "\n  ".join(differences)
        raise ConfigError(
            f"{directory}: the run was started with another config\n  {listed}\n"
            "  give it the config it was started with, or start a new run by --output"
        )


def _differences(old: Config, new: Config) -> list[str]:
    before, after = _flat(old.model_dump(mode="json")), _flat(new.model_dump(mode="json"))
    return [
        f"{key}: {before.get(key)} there, {after.get(key)} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(_HARMLESS)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    flat = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            flat.update(_flat(value, f"{prefix}{key}."))
        else:
            flat[prefix + key] = value
    return flat


def write_description(directory: Path, config: Config, devices: list[str]) -> None:
    """Writes config.yaml (complete) and environment.json into `directory`.

    Args:
        devices: the device of every rank.
    """
    directory.mkdir(parents=True, exist_ok=True)
    (directory / ENVIRONMENT).write_text(json.dumps(environment(devices), indent=2) + "\n")
    # Last: the directory counts as a run once its config stands there.
    (directory / CONFIG).write_text(config_to_yaml(config))


def environment(devices: list[str]) -> dict[str, Any]:
    """Versions, devices, command and git revision, as plain data."""
    return {
        "segtrain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: _version(name) for name in _LIBRARIES},
        "devices": devices,
        "git": git_revision(),
        "command": sys.argv,
    }


def _version(package: str) -> str | None:
    try:
        return version(package)
    except PackageNotFoundError:
        return None


def git_revision() -> str | None:
    """The commit of the working directory, with "+changes" if files differ; None outside of git."""
    try:
        done = subprocess.run(
            ["git", "describe", "--always", "--abbrev=12", "--dirty=+changes"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
