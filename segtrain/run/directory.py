"""The directory of a run: what it holds, and whether a run may use it."""

import errno
import fcntl
import os
import shlex
import socket
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any, Self

from segtrain import files
from segtrain.config import Config, config_to_yaml, load_config
from segtrain.config.loading import yaml_value
from segtrain.data.read.protect import check_run_directory
from segtrain.errors import ConfigError
from segtrain.files.manifest import MANIFEST
from segtrain.run.environment import ENVIRONMENT, environment_json
from segtrain.text import MAX_NAME, printable

LOCK = ".lock"
_UNWRITABLE = "cannot be written (--output names another)"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no locks


class RunLock:
    """A context in which no other run can use `directory`, which is made if need be.

    The kernel releases the lock when the process ends. Some file systems have no locks.
    """

    def __init__(self, directory: Path) -> None:
        self._directory, self._path = directory, directory / LOCK

    def __enter__(self) -> Self:
        """Locks the directory; ConfigError if another run uses it or it cannot be written."""
        # If there is a lock file already, a killed run made the directory.
        self._made = not self._directory.exists() or self._path.exists()
        with files.os_errors_as(ConfigError, self._directory, _UNWRITABLE):
            self._directory.mkdir(parents=True, exist_ok=True)
        with files.os_errors_as(ConfigError, self._path, _UNWRITABLE):
            try:
                self._handle = _locked(self._path)
            except BlockingIOError:
                use = f"in use by {_holder(self._path)}"
                repair = "wait for it to end, or choose another directory by --output"
                raise ConfigError(f"{self._directory}: {use}; {repair}") from None
        return self

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the directory was deleted meanwhile, or is not empty
            # Another run may have begun in a directory of the same name.
            if files.is_same_file(self._handle, self._path):
                self._path.unlink()
                if self._made:
                    self._directory.rmdir()
        os.close(self._handle)


def _locked(path: Path) -> int:
    """A handle of the lock file at `path`; BlockingIOError if another process has locked it."""
    # A link would put the lock elsewhere.
    handle = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW, 0o644)
    with ExitStack() as on_error:
        on_error.callback(os.close, handle)
        _lock(handle, fcntl.LOCK_EX)
        # Between open and lock, another run may have ended and removed the file.
        if files.is_same_file(handle, path):
            os.truncate(handle, 0)
            with suppress(OSError):  # a full disk; the name is only for people
                os.write(handle, f"{_this_process()}\n".encode())
            on_error.pop_all()
            return handle
    return _locked(path)


def _lock(handle: int, kind: int) -> bool:
    """Locks an open file without waiting; False where the file system has no locks."""
    try:
        fcntl.flock(handle, kind | fcntl.LOCK_NB)
    except OSError as error:
        if error.errno not in _NO_LOCKS:
            raise
        return False
    return True


def use_by_others(directory: Path) -> str | None:
    """Which other process uses `directory`, and what to do; None if there is none."""
    path = directory / LOCK
    try:
        with files.open_regular(path) as file:
            if _lock(file.fileno(), fcntl.LOCK_SH):
                return None
        # Without locks, nothing tells whether the process has ended.
        remedy = f"if it has ended, delete {path}"
    except BlockingIOError:
        remedy = "wait for it to end"
    except OSError:
        return None
    holder = _holder(path)
    return None if holder == _this_process() else f"in use by {holder}; {remedy}"


def _holder(path: Path) -> str:
    """What the process that holds the lock wrote into the file."""
    with suppress(OSError):
        if text := files.read_bytes(path)[:200].decode(errors="replace").strip():
            return printable(text)
    return "another run"


def _this_process() -> str:
    return f"process {os.getpid()} on {socket.gethostname()}"


CONFIG, METRICS, LOG = "config.yaml", "metrics.jsonl", "train.log"
RECEIPTS = "receipts.jsonl"
CHECKPOINTS = "checkpoints"
CENTROIDS = "centroids.json"

# A resumed run may change these: the model at the end stays the same, but for rounding in a
# compiled step. Data and class file may move, because `dataset_guard` compares their contents.
_HARMLESS = (
    *("data.root", "data.classes", "data.pack", "data.num_workers", "data.prefetch"),
    # Where a run ends does not change the steps before.
    *("train.compile", "train.timeout_s", "train.max_hours", "train.patience"),
    *("log.", "checkpoint."),
)

# The options by which people compare runs.
_TRAIN_OPTIONS = ("train.batch_size", "optim.lr", "train.steps")
MAIN_OPTIONS = ("model.arch", "model.backbone", "seed", *_TRAIN_OPTIONS)


def check_directory(
    directory: Path, config: Config, *, resume: bool, accept_changes: bool = False
) -> list[str]:
    """Refuses a directory that this run must not write into.

    A new run may replace a run that has saved no checkpoint; with `resume` too. Returns the
    differences from the config of the resumed run, one line per option; only `accept_changes` lets
    it go on with any.

    Raises:
        ConfigError: it holds a run with checkpoints or a live one, or data is read from there; with
            `resume`, the config of the run that has saved them differs.
    """
    files.check_utf8(directory)
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
    """Whether config.yaml is missing and a checkpoint can restore it."""
    return not (directory / CONFIG).exists() and any((directory / CHECKPOINTS).glob("*.pt"))


def flat(config: Config) -> dict[str, Any]:
    """Every option by its full name, such as `optim.lr`."""
    options = config.model_dump(mode="json")
    for section in [key for key, value in options.items() if isinstance(value, dict)]:
        options |= {f"{section}.{key}": value for key, value in options.pop(section).items()}
    return options


def write_description(directory: Path, config: Config, devices: list[str]) -> None:
    """Writes config.yaml (complete) and environment.json; ConfigError if it cannot.

    devices: the device name of every rank.
    """
    with files.os_errors_as(ConfigError, directory, _UNWRITABLE):
        directory.mkdir(parents=True, exist_ok=True)
        files.write_atomic(directory / ENVIRONMENT, environment_json(devices))
        # Last: the directory counts as a run once it has a config.
        write_config(directory, config)


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml, complete, into `directory`; raises OSError."""
    files.write_atomic(directory / CONFIG, config_to_yaml(config))


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

    def shown(value: object) -> str:
        return printable(yaml_value(value), 2 * MAX_NAME)

    return [
        f"{key}: {shown(before[key])} there, {shown(after[key])} now"
        for key in sorted(after)
        if before[key] != after[key] and not key.startswith(_HARMLESS)
    ]
