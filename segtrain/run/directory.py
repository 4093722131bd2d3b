"""The directory of a run: what it holds, and when it may be used."""

import json
import os
import platform
import shlex
import subprocess
import sys
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from segtrain import __version__, files
from segtrain.config import Config, config_to_yaml, load_config
from segtrain.config.loading import yaml_value
from segtrain.data.protect import check_run_directory
from segtrain.errors import CheckpointError, ConfigError
from segtrain.files.manifest import MANIFEST
from segtrain.run.claim import cannot_write, use_by_others
from segtrain.run.versions import LIBRARIES, library_version
from segtrain.text import MAX_NAME, printable

CONFIG, ENVIRONMENT, METRICS, LOG = "config.yaml", "environment.json", "metrics.jsonl", "train.log"
CHECKPOINTS = "checkpoints"

# Far more than environment.json ever holds.
_MAX_BYTES = 1 << 20

# What may change between the parts of a run without changing the model it ends with, but for
# rounding in a compiled step. Where data and class file lie does not matter: `same_data` compares
# what they hold.
_HARMLESS = (
    *("data.root", "data.classes", "data.num_workers", "data.prefetch"),
    *("train.compile", "train.timeout_s", "log.", "checkpoint."),
)


def check_directory(
    directory: Path, config: Config, *, resume: bool, accept_changes: bool = False
) -> list[str]:
    """Refuses a directory that this run must not write into.

    A run there that has saved no checkpoint is nothing to lose: a new one may take its place.

    Args:
        accept_changes: with `resume`, go on with a config that differs.

    Returns:
        what differs, a line for each option.

    Raises:
        ConfigError: it holds a run with checkpoints or one at work, is no directory, or lies where
            data is read; with `resume`, its config differs.
        CheckpointError: with `resume`, there is nothing to go on from.
    """
    above = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(f"{above}: a file stands where the run directory should be")
    if not os.access(above, os.W_OK):
        raise ConfigError(f"{above}: may not be written; choose another directory by --output")
    _check_kinds(directory)
    if not resume:
        check_run_directory(directory, config.data)
        if (directory / CONFIG).exists():
            _check_unsaved(directory)
        saved_here = _checkpoints(directory)
        if saved_here:
            raise ConfigError(
                f"{saved_here[0]}: stands where this run would write, and no {CONFIG} tells whose "
                "it is; go on from it by --resume, move it away, or choose another directory by "
                "--output"
            )
        return []
    if has_lost_config(directory):
        return []  # `recovery.restore_config` looks what it was
    path = directory / CONFIG
    if not path.exists():
        raise CheckpointError(f"{directory}: no run to resume; to start one, leave out --resume")
    if _is_blank(path):
        raise CheckpointError(
            f"{path}: empty, and there is no checkpoint to tell what it said; nothing is lost: "
            "delete the directory and start the run again, without --resume"
        )
    before = _own_config(path)
    differences = _differences(before, config)
    if differences and not accept_changes:
        raise ConfigError(_refused_changes(directory, differences, before))
    return list(differences.values())


def is_run(directory: Path) -> bool:
    """Whether a run has been started in `directory`; a config.yaml alone may be anybody's."""
    marks = (directory / ENVIRONMENT, directory / CHECKPOINTS / MANIFEST)
    started = any(mark.exists() for mark in marks)
    return started and ((directory / CONFIG).is_file() or has_lost_config(directory))


def has_saved(directory: Path) -> bool:
    """Whether the run in `directory` has saved a checkpoint, even one that is gone now."""
    checkpoints = directory / CHECKPOINTS
    return (checkpoints / MANIFEST).exists() or any(checkpoints.glob("*.pt"))


def _check_unsaved(directory: Path) -> None:
    """Refuses a run that has saved something; a run that has not may be begun anew."""
    if has_saved(directory):
        gone, delete = "", ""
        if not any((directory / CHECKPOINTS).glob("*.pt")):
            gone, delete = ", whose checkpoints are not there", "delete it, "
        raise ConfigError(
            f"{directory}: holds a run already{gone}; go on with it by --resume, {delete}or choose "
            "another directory by --output"
        )
    if not is_run(directory):
        raise ConfigError(
            f"{directory}: holds a {CONFIG} that no run has written and that would be replaced; "
            "choose another directory by --output"
        )
    if problem := use_by_others(directory):
        raise ConfigError(f"{directory}: {problem}, or choose another directory by --output")


def _refused_changes(directory: Path, differences: Mapping[str, str], before: Config) -> str:
    """What differs, and the commands that work."""
    values = flat(before)
    old = [f"--set {shlex.quote(f'{key}={yaml_value(values[key])}')}" for key in differences]
    lines = [
        f"{directory}: the run was started with another config",
        *(f"  {line}" for line in differences.values()),
        f"to go on as it was started: segtrain train {shlex.quote(str(directory))} --resume",
        f"or with this config, but those options as they were: add {' '.join(old)}",
        "if the changes are meant: add --accept-changes",
        "to start a new run: --output DIR instead of --resume",
    ]
    if not has_saved(directory):
        lines[-1:] = ["it has saved no checkpoint: without --resume it is begun anew as you ask"]
    return "\n".join(lines)


def _check_kinds(directory: Path) -> None:
    """Refuses what can be neither read nor replaced; links to nothing are replaced."""
    for name, is_right, expected in (
        (CONFIG, Path.is_file, "a file"),
        (ENVIRONMENT, Path.is_file, "a file"),
        (CHECKPOINTS, Path.is_dir, "a folder"),
    ):
        path = directory / name
        there = os.path.lexists(path) if name == CHECKPOINTS else path.exists()
        if there and not is_right(path):
            found = files.kind_of(path)
            raise ConfigError(f"{path}: expected {expected}, found {found}; move it away")


def has_lost_config(directory: Path) -> bool:
    """Whether config.yaml is missing or empty beside checkpoints, which know what it said.

    After a loss of power a file may be there without its content.
    """
    path = directory / CONFIG
    return bool(_checkpoints(directory)) and (not path.exists() or _is_blank(path))


def _is_blank(config: Path) -> bool:
    try:
        return not files.read_bytes(config).strip(b"\0 \t\r\n")
    except OSError as error:
        raise ConfigError(f"{config}: cannot be read: {error.strerror}") from None


def _checkpoints(directory: Path) -> list[Path]:
    """Those that every run writes, as far as they are there."""
    paths = [directory / CHECKPOINTS / name for name in ("last.pt", "previous.pt", "best.pt")]
    return [path for path in paths if os.path.lexists(path)]


def _own_config(path: Path) -> Config:
    try:
        return load_config(path)
    except ConfigError as error:
        raise ConfigError(
            f"{error}\n  if this file of the run is damaged, move it away: --resume writes it anew "
            "from the checkpoint"
        ) from None


def _differences(old: Config, new: Config) -> dict[str, str]:
    """The options that differ, each with a line that tells how."""
    before, after = flat(old), flat(new)

    def shown(value: Any) -> str:
        return printable(yaml_value(value), 2 * MAX_NAME)

    return {
        key: f"{key}: {shown(before.get(key))} there, {shown(after.get(key))} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(_HARMLESS)
    }


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
        text = json.dumps(environment(devices), indent=2) + "\n"
        files.write_atomic(directory / ENVIRONMENT, text)
        # Last: the directory counts as a run once its config stands there.
        write_config(directory, config)
    except OSError as error:
        raise ConfigError(cannot_write(directory, error)) from None


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml, complete, into `directory`.

    Raises:
        OSError: it cannot be written.
    """
    files.write_atomic(directory / CONFIG, config_to_yaml(config))


def other_versions(directory: Path) -> list[str]:
    """How the libraries differ from those that environment.json tells of, a line for each."""
    try:
        recorded = json.loads(files.read_bytes(directory / ENVIRONMENT, _MAX_BYTES))
        before = {name: recorded[name] for name in ("segtrain", "python")} | recorded["libraries"]
    except (OSError, ValueError, KeyError, TypeError):
        return []  # it is for people to read; nothing hangs on it
    current = environment([])
    now = {name: current[name] for name in ("segtrain", "python")} | current["libraries"]
    return [
        f"{name} {printable(before[name] or 'none', MAX_NAME)} there, {now[name] or 'none'} now"
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
    """The commit of the working directory; None outside of git.

    Whether files differ from it is not asked: git would run what a repository's own configuration
    names, and the repository may have come with an unpacked data set.
    """
    try:
        done = subprocess.run(
            ["git", "-c", "core.fsmonitor=false", "rev-parse", "--short=12", "HEAD"],
            capture_output=True,
            text=True,
            timeout=10,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    return done.stdout.strip()
