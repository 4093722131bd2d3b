"""The directory of a run: what it holds, and whether a run may use it."""

import errno
import fcntl
import json
import os
import shlex
import socket
import time
from collections.abc import Sequence
from contextlib import suppress
from glob import escape
from pathlib import Path
from typing import Any, Self

from segtrain import files
from segtrain.config import Config, config_to_yaml, load_config
from segtrain.config.loading import yaml_value
from segtrain.config.plugin_names import all_plugins
from segtrain.data.read.protect import check_run_directory
from segtrain.errors import ConfigError, ExecutionError
from segtrain.files.manifest import MANIFEST
from segtrain.run.environment import ENVIRONMENT, environment_json
from segtrain.text import MAX_NAME, first_of, printable

LOCK = ".lock"
_UNWRITABLE = "cannot be written (--output names another)"
_NO_LOCKS = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)  # the file system has no locks


class RunLock:
    """A context in which no other run can use `directory`, which is made if need be.

    The kernel releases the lock when the process ends. Some file systems have no locks. It is on
    the file that was there then: `check` whether another run has made the directory anew.
    elsewhere: what else to do where another run uses it. patience_s: for how long to wait for that.
    """

    def __init__(
        self,
        directory: Path,
        *,
        elsewhere: str = ", or choose another directory by --output",
        patience_s: float = 0.0,
    ) -> None:
        self._directory, self._path, self._elsewhere = directory, directory / LOCK, elsewhere
        self._until = time.monotonic() + patience_s

    def __enter__(self) -> Self:
        """Locks the directory; ConfigError if another run uses it or it cannot be written."""
        # If there is a lock file already, a killed run made the directory.
        # Whoever made the directory removes it at the end, if nothing was put there.
        self._made = not self._directory.exists() or self._path.exists()
        self._lock()
        # A run that ended just now may have removed the file before it was locked here.
        while not files.is_same_file(self._handle, self._path):
            os.close(self._handle)
            self._lock()
        with suppress(OSError):  # a full disk; the name is only for people
            name = f"process {os.getpid()} on {socket.gethostname()}\n"
            os.write(self._handle, name.encode())
        return self

    def check(self) -> None:
        """Raises ExecutionError if another run has begun in a new directory of the same name."""
        if os.path.lexists(self._path) and not files.is_same_file(self._handle, self._path):
            what = "was deleted during the run and made anew by another run"
            raise ExecutionError(f"{self._directory}: {what}; this one stops and saves no more")

    def _lock(self) -> None:
        with files.os_errors_as(ConfigError, self._directory, _UNWRITABLE):
            self._directory.mkdir(parents=True, exist_ok=True)
        with files.os_errors_as(ConfigError, self._path, _UNWRITABLE):
            # A link would put the lock elsewhere.
            flags = os.O_RDWR | os.O_CREAT | os.O_CLOEXEC | os.O_NOFOLLOW
            self._handle = os.open(self._path, flags, 0o644)
            try:
                fcntl.flock(self._handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                holder = os.read(self._handle, 200).decode(errors="replace").strip()
                os.close(self._handle)
                if time.monotonic() < self._until:
                    time.sleep(0.5)
                    self._lock()
                    return
                holder = printable(holder or "another run")
                what = f"in use by {holder}; wait for it to end{self._elsewhere}"
                raise ConfigError(f"{self._directory}: {what}") from None
            except OSError as error:
                if error.errno not in _NO_LOCKS:
                    raise
            os.truncate(self._handle, 0)  # not for a pipe

    def __exit__(self, *_: object) -> None:
        with suppress(OSError):  # the directory was deleted meanwhile, or is not empty
            # Another run may have begun in a directory of the same name. Removed while the lock is
            # held: a run that locks the file now finds that it is gone, and makes another.
            if files.is_same_file(self._handle, self._path):
                self._path.unlink()
                if self._made:
                    self._directory.rmdir()
        os.close(self._handle)


def is_locked(directory: Path) -> bool:
    """Whether a run uses `directory` now, as far as the file system has locks; writes nothing."""
    try:
        handle = os.open(directory / LOCK, os.O_RDONLY | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_SH | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    except OSError:
        return False
    finally:
        os.close(handle)
    return False


CONFIG, METRICS, LOG = "config.yaml", "metrics.jsonl", "train.log"
RECEIPTS = "receipts.jsonl"
ENDING = "ending.json"  # of a run that an error has ended: exit code and message
CHECKPOINTS = "checkpoints"
CENTROIDS = "centroids.json"
EVALUATION, REPORT, RESULTS = "evaluation.npz", "report.html", "results.csv"
SUSPECTS = "suspects.html"
ORIGIN = ".origin.json"  # of a run at an address: that, and hashes of manifests put there

# A resumed run may change these: the model at the end stays the same, but for rounding in a
# compiled step. Data and class file may move, because `dataset_guard` compares their contents.
# With train.shares, whose bits they would change, those of _ROUNDING are not among them.
_ROUNDING = ("model.recompute", "train.virtual_ranks")
HARMLESS = (
    *("data.root", "data.classes", "data.pack", "data.num_workers"),
    *("train.compile", "train.graph", "train.timeout_s", "train.split"),
    # Not where code of the user's own lies: its hash counts.
    *("log.", "checkpoint.", "plugins", "eval.metrics", "eval.without"),
)


def check_directory(directory: Path, config: Config, *, resume: bool) -> None:
    """Refuses a directory that this run must not write into.

    A new run may replace a run that has saved no checkpoint; with `resume` too.

    Raises:
        ConfigError: it holds a run with checkpoints, or data is read from there.
    """
    files.check_utf8(directory)
    if not (resume and has_saved(directory)):
        _check_new(directory, config)


def check_config(
    directory: Path,
    saved: Config,
    config: Config,
    *,
    accept_changes: bool,
    others: Sequence[str] = (),
) -> list[str]:
    """How `config` differs from that of the checkpoint to go on from, a line for each option.

    What the checkpoint says counts, because config.yaml may have been edited since. others: lines
    of what else the result depends on.

    Raises:
        ConfigError: it differs, and `accept_changes` is not set.
    """
    differences = [*config_differences(saved, config), *others]
    if differences and not accept_changes:
        listed, run = "\n  ".join(differences), word_for(directory)
        raise ConfigError(
            f"{directory}: the run was started with another config\n  {listed}\n"
            f"to go on as it was started: segtrain train {run} --resume (if its {CONFIG} has been "
            "edited, undo that first)\n"
            "if the changes are meant: add --accept-changes\n"
            "to start a new run: --output DIR instead of --resume"
        )
    return differences


def edits(directory: Path, config: Config) -> list[str]:
    """How config.yaml differs from `config`, which the run goes on with; it may be gone.

    ConfigError if it cannot be read.
    """
    if not (directory / CONFIG).exists():
        return ["it was missing"]
    return config_differences(load_config(directory / CONFIG, imports=False), config)


def is_run(directory: Path) -> bool:
    """Whether a run was started in `directory`; config.yaml alone may be anybody's."""
    return (directory / ENVIRONMENT).exists() or (directory / CHECKPOINTS / MANIFEST).exists()


def run_of(path: Path) -> Path | None:
    """The run whose directory, config.yaml or checkpoint `path` is; None: of none."""
    if path.name == CONFIG:
        path = path.parent
    elif path.suffix == ".pt":
        path = path.parent.parent
    return path if is_run(path) else None


def origin_of(directory: Path) -> dict[str, Any]:
    """The address at which the run is kept, and hashes of its manifests; empty: here alone."""
    with suppress(FileNotFoundError, NotADirectoryError):
        return json.loads(files.read_bytes(directory / ORIGIN))
    return {}


def word_for(directory: Path) -> str:
    """The run as a command to paste names it: by its address, if it is kept at one."""
    return shlex.quote(printable(origin_of(directory).get("url", directory)))


def named_run(path: Path) -> Path:
    """The run that a command line names by its directory or by the config.yaml in it.

    Raises:
        ConfigError: it names something else; says what, and what to give instead.
    """
    run = run_of(path)
    if run is None or path.suffix == ".pt":
        raise ConfigError(no_run(path))
    return run


def no_run(path: Path) -> str:
    """What to say of `path`, where a run is expected."""
    run = run_of(path)
    if run is not None:  # of which a command would read the best checkpoint
        return f"{path}: expected a run, found a checkpoint; instead of it give {run}"
    if not (path / CONFIG).is_file():
        return f"{path}: expected the directory of a run"
    name, folders = path.resolve().name, dict.fromkeys((path / "runs", Path("runs")))
    runs = [near for f in folders for near in sorted(f.glob(f"{escape(name)}*")) if is_run(near)]
    what = f"{path}: expected a run, found an experiment, which has no weights"
    if runs:
        return f"{what}; instead of it give {first_of(map(str, runs))}"
    return f"{what}; segtrain train {shlex.quote(str(path))} writes the run runs/{name}"


def has_saved(directory: Path) -> bool:
    """Whether the run in `directory` ever saved a checkpoint, even if it is gone now."""
    checkpoints = directory / CHECKPOINTS
    if (checkpoints / MANIFEST).exists() or any(checkpoints.glob("*.pt")):
        return True
    return has_evaluated(directory)


OF_EVALUATIONS = "eval/mIoU", "eval/score"
"""Tags of which each evaluation has one; the latter if its task has no classes."""


def has_evaluated(directory: Path) -> bool:
    """Whether the run in `directory` had an evaluation, before which it saves a checkpoint."""
    metrics = directory / METRICS
    content = metrics.read_bytes() if metrics.is_file() else b""
    return any(b'"%s"' % tag.encode() in content for tag in OF_EVALUATIONS)


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
        # First: a config.yaml without it does not count as a run's.
        records = [plugin.record() for plugin in all_plugins(config)]
        files.write_atomic(directory / ENVIRONMENT, environment_json(devices, records))
        write_config(directory, config)


def write_config(directory: Path, config: Config) -> None:
    """Writes config.yaml, complete, into `directory`; raises OSError."""
    files.write_atomic(directory / CONFIG, config_to_yaml(config))


def _check_new(directory: Path, config: Config) -> None:
    """Refuses a directory with anything that a new run would overwrite."""
    check_run_directory(directory, config.data)
    if has_saved(directory):
        problem = "holds a run already; go on with it by --resume, move it away"
    elif (directory / CONFIG).exists() and not is_run(directory):
        problem = f"holds a {CONFIG} that no run has written; move it away"
    else:
        return
    raise ConfigError(f"{directory}: {problem}, or choose another directory by --output")


def config_differences(old: Config, new: Config) -> list[str]:
    """A line for each option that differs."""
    before, after = flat(old), flat(new)
    harmless = HARMLESS if new.train.shares else HARMLESS + _ROUNDING

    def shown(value: object) -> str:
        return printable(yaml_value(value), 2 * MAX_NAME)

    return [
        f"{key}: {shown(before[key])} there, {shown(after[key])} now"
        for key in sorted(after)
        if before[key] != after[key] and not key.startswith(harmless)
    ]
