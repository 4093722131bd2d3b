"""The directory of a run: what it holds, and whether a run may use it."""

import os
import shlex
from pathlib import Path
from typing import Any

from segtrain import files
from segtrain.config import Config, config_to_yaml, load_config
from segtrain.config.loading import yaml_value
from segtrain.data.protect import check_run_directory
from segtrain.errors import ConfigError
from segtrain.files.manifest import MANIFEST
from segtrain.run.claim import cannot_write, use_by_others
from segtrain.run.environment import ENVIRONMENT, environment_json
from segtrain.text import MAX_NAME, printable

CONFIG, METRICS, LOG = "config.yaml", "metrics.jsonl", "train.log"
RECEIPTS = "receipts.jsonl"
CHECKPOINTS = "checkpoints"
CENTROIDS = "centroids.json"

# A resumed run may change these: the model at the end stays the same, but for rounding in a
# compiled step. Data and class file may move, because `same_data` compares their contents.
_HARMLESS = (
    *("data.root", "data.classes", "data.pack", "data.num_workers", "data.prefetch"),
    # Where a run ends does not change the steps before.
    *("train.compile", "train.timeout_s", "train.max_hours", "train.patience"),
    *("log.", "checkpoint."),
)

# The options by which people compare runs.
_TRAIN_OPTIONS = ("train.batch_size", "train.lr", "train.steps")
MAIN_OPTIONS = ("model.arch", "model.backbone", "seed", *_TRAIN_OPTIONS)


def check_directory(
    directory: Path, config: Config, *, resume: bool, accept_changes: bool = False
) -> list[str]:
    """Refuses a directory that this run must not write into.

    A new run may replace a run that has saved no checkpoint; with `resume` too. Returns the
    differences from the config of the resumed run, one line per option; only `accept_changes` lets
    it go on with any.

    Raises:
        ConfigError: it holds a run with checkpoints or a live one, is no directory, or data is read
            from there; with `resume`, the config of the run that has saved them differs.
    """
    _check_usable(directory)
    if not (resume and has_saved(directory)):
        _check_new(directory, config)
        return []
    if has_lost_config(directory):
        return []  # `recovery.restore_config` writes it again
    try:
        differences = config_differences(load_config(directory / CONFIG), config)
    except ConfigError as error:
        repair = "if this file is damaged, move it away: --resume restores it from the checkpoint"
        raise ConfigError(f"{error}\n  {repair}") from None
    if differences and not accept_changes:
        listed = "\n  ".join(differences)
        raise ConfigError(
            f"{directory}: the run was started with another config\n  {listed}\n"
            f"to go on as it was started: segtrain train {shlex.quote(str(directory))} --resume\n"
            "if the changes are meant: add --accept-changes\n"
            "to start a new run: --output DIR instead of --resume"
        )
    return differences


def is_run(directory: Path) -> bool:
    """Whether a run was started in `directory`; config.yaml alone may be anybody's."""
    if not ((directory / ENVIRONMENT).exists() or (directory / CHECKPOINTS / MANIFEST).exists()):
        return False
    return (directory / CONFIG).is_file() or has_lost_config(directory)


def has_saved(directory: Path) -> bool:
    """Whether the run in `directory` ever saved a checkpoint, even if it is gone now."""
    checkpoints = directory / CHECKPOINTS
    if (checkpoints / MANIFEST).exists() or any(checkpoints.glob("*.pt")):
        return True
    return has_evaluated(directory)


def has_evaluated(directory: Path) -> bool:
    """Whether the run in `directory` had an evaluation, before which it saves a checkpoint."""
    metrics = directory / METRICS
    return metrics.is_file() and b'"eval/mIoU"' in metrics.read_bytes()


def has_lost_config(directory: Path) -> bool:
    """Whether config.yaml is missing or empty and a checkpoint can restore it.

    After a loss of power a file may be there without its content.
    """
    path = directory / CONFIG
    saved = any((directory / CHECKPOINTS).glob("*.pt"))
    return saved and (not path.exists() or _is_blank(path))


def flat(config: Config) -> dict[str, Any]:
    """Every option by its full name, such as `train.lr`."""
    return _flat(config.model_dump(mode="json"))


def write_description(directory: Path, config: Config, devices: list[str]) -> None:
    """Writes config.yaml (complete) and environment.json; ConfigError if it cannot.

    devices: the device name of every rank.
    """
    try:
        directory.mkdir(parents=True, exist_ok=True)
        files.write_atomic(directory / ENVIRONMENT, environment_json(devices))
        # Last: the directory counts as a run once it has a config.
        write_config(directory, config)
    except OSError as error:
        raise ConfigError(cannot_write(directory, error)) from None


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml, complete, into `directory`; raises OSError."""
    files.write_atomic(directory / CONFIG, config_to_yaml(config))


def _check_usable(directory: Path) -> None:
    """Refuses a place that cannot be written, and folders or pipes in the place of files."""
    files.check_utf8(directory)
    above = next(path for path in (directory, *directory.absolute().parents) if path.exists())
    if not above.is_dir():
        raise ConfigError(f"{above}: a file stands where the run directory should be")
    if not os.access(above, os.W_OK):
        raise ConfigError(f"{above}: may not be written; choose another directory by --output")
    for name, kind in ((CONFIG, "a file"), (ENVIRONMENT, "a file"), (CHECKPOINTS, "a folder")):
        path = directory / name
        # A file can replace a link to nothing, a folder cannot.
        there = path.exists() if kind == "a file" else os.path.lexists(path)
        if there and (found := files.kind_of(path)) != kind:
            raise ConfigError(f"{path}: expected {kind}, found {found}; move it away")


def _check_new(directory: Path, config: Config) -> None:
    """Refuses a directory with anything that a new run would overwrite."""
    check_run_directory(directory, config.data)
    if has_saved(directory):
        problem = "holds a run already; go on with it by --resume, move it away"
    elif not (directory / CONFIG).exists():
        return
    elif is_run(directory):
        problem = use_by_others(directory)
    else:
        problem = f"holds a {CONFIG} that no run has written; move it away"
    if problem:
        raise ConfigError(f"{directory}: {problem}, or choose another directory by --output")


def config_differences(old: Config, new: Config) -> list[str]:
    """A line for each option that differs."""
    before, after = flat(old), flat(new)

    def shown(options: dict[str, Any], key: str) -> str:
        return printable(yaml_value(options.get(key)), 2 * MAX_NAME)

    return [
        f"{key}: {shown(before, key)} there, {shown(after, key)} now"
        for key in sorted(before.keys() | after.keys())
        if before.get(key) != after.get(key) and not key.startswith(_HARMLESS)
    ]


def _flat(tree: dict[str, Any], prefix: str = "") -> dict[str, Any]:
    options = {}
    for key, value in tree.items():
        inner = isinstance(value, dict)
        options |= _flat(value, f"{prefix}{key}.") if inner else {prefix + key: value}
    return options


def _is_blank(config: Path) -> bool:
    try:
        return not files.read_bytes(config).strip(b"\0 \t\r\n")
    except OSError as error:
        raise ConfigError(f"{config}: cannot be read: {error.strerror}") from None
