"""The directory of a run: what it holds, and when it may be used."""

import json
import os
import platform
import subprocess
import sys
from pathlib import Path
from typing import Any

from segtrain import __version__
from segtrain.claim import cannot_write
from segtrain.config import Config, config_to_yaml, load_config
from segtrain.errors import CheckpointError, ConfigError
from segtrain.versions import LIBRARIES, library_version

CONFIG, ENVIRONMENT, METRICS, LOG = "config.yaml", "environment.json", "metrics.jsonl", "train.log"
CHECKPOINTS = "checkpoints"

# What may change between the parts of a run without changing the model it ends with, but for
# rounding in a compiled step.
_HARMLESS = (
    *("data.root", "data.num_workers", "data.prefetch", "train.compile", "train.timeout_s"),
    *("log.", "checkpoint."),
)


def check_directory(
    directory: Path, config: Config, *, resume: bool, accept_changes: bool = False
) -> list[str]:
    """Refuses a directory that this run must not write into.

    Args:
        accept_changes: with `resume`, go on with a config that differs.

    Returns:
        what differs, a line for each option.

    Raises:
        ConfigError: it holds a run already, or is no directory; with `resume`, its config differs.
        CheckpointError: with `resume`, there is nothing to go on from.
    """
    above = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(f"{above}: a file stands where the run directory should be")
    if not os.access(above, os.W_OK):
        raise ConfigError(f"{above}: may not be written; choose another directory by --output")
    if not resume:
        if (directory / CONFIG).exists():
            saved = any((directory / CHECKPOINTS).glob("*.pt"))
            nothing = "" if saved else ", which has saved nothing yet"
            delete = "" if saved else "delete it, "
            raise ConfigError(
                f"{directory}: holds a run already{nothing}; go on with it by --resume, {delete}or "
                "choose another directory by --output"
            )
        return []
    if not (directory / CONFIG).is_file():
        raise CheckpointError(f"{directory}: no run to resume; to start one, leave out --resume")
    differences = _differences(load_config(directory / CONFIG), config)
    if differences and not accept_changes:
        listed = "\n  ".join(differences)
        raise ConfigError(
            f"{directory}: the run was started with another config\n  {listed}\n"
            "  give it the config it was started with, start a new run by --output, or, if the "
            "changes are meant, add --accept-changes"
        )
    return differences


def _differences(old: Config, new: Config) -> list[str]:
    before, after = flat(old), flat(new)
    return [
        f"{key}: {before.get(key)} there, {after.get(key)} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(_HARMLESS)
    ]


# What people compare runs by.
MAIN_OPTIONS = (
    "model.arch",
    "model.backbone",
    "seed",
    "train.batch_size",
    "train.lr",
    "train.steps",
)


def flat(config: Config) -> dict[str, Any]:
    """Every option by its whole name, `train.lr`."""
    return _flat(config.model_dump(mode="json"), "")


def _flat(tree: dict[str, Any], prefix: str) -> dict[str, Any]:
    options = {}
    for key, value in tree.items():
        if isinstance(value, dict):
            options.update(_flat(value, f"{prefix}{key}."))
        else:
            options[prefix + key] = value
    return options


def write_description(directory: Path, config: Config, devices: list[str]) -> None:
    """Writes config.yaml (complete) and environment.json into `directory`.

    Args:
        devices: the device of every rank.

    Raises:
        ConfigError: the directory cannot be made or written.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        _write(directory / ENVIRONMENT, json.dumps(environment(devices), indent=2) + "\n")
        # Last: the directory counts as a run once its config stands there.
        _write(directory / CONFIG, config_to_yaml(config))
    except OSError as error:
        raise ConfigError(cannot_write(directory, error)) from None


def _write(path: Path, text: str) -> None:
    """Whole or not at all: half a config would be another one."""
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.write_text(text, encoding="utf-8")
    temporary.replace(path)


def other_versions(directory: Path) -> list[str]:
    """How the libraries differ from those that environment.json tells of, a line for each."""
    try:
        recorded = json.loads((directory / ENVIRONMENT).read_text(encoding="utf-8"))
        before = {name: recorded[name] for name in ("segtrain", "python")} | recorded["libraries"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # it is for people to read; nothing hangs on it
    current = environment([])
    now = {name: current[name] for name in ("segtrain", "python")} | current["libraries"]
    return [
        f"{name} {before[name] or 'none'} there, {now[name] or 'none'} now"
        for name in now
        if name in before and before[name] != now[name]
    ]


def environment(devices: list[str]) -> dict[str, Any]:
    """Versions, devices, command and git revision, as plain data."""
    return {
        "segtrain": __version__,
        "python": platform.python_version(),
        "platform": platform.platform(),
        "libraries": {name: library_version(name) for name in LIBRARIES},
        "devices": devices,
        "git": git_revision(),
        "command": sys.argv,
    }


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
