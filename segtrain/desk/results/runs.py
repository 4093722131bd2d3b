"""What a run directory tells: config, curves, environment, time, memory, size."""

import json
import math
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from enum import StrEnum
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from segtrain.checkpoint.format import BEST, LAST
from segtrain.config import Config, EvalConfig, load_config
from segtrain.config.strict_yaml import foreign_yaml
from segtrain.errors import EXIT_NON_FINITE, CheckpointError, ConfigError
from segtrain.files import open_regular, os_errors_as, parse_json, read_bytes, walk
from segtrain.files.manifest import read_entries
from segtrain.run import directory as run_directory
from segtrain.run.environment import ENVIRONMENT
from segtrain.text import printable


@dataclass(frozen=True, repr=False)
class Run:
    """A run, as its files say.

    curves: of each tag of metrics.jsonl the steps and values, without missing ones.
    environment: environment.json; empty if it is missing or damaged.
    predictions: the folder of label maps of any program, of which `config` says the data alone;
        empty: this is a run.
    """

    directory: Path
    config: Config
    curves: Mapping[str, tuple[list[int], list[float]]]
    environment: Mapping[str, Any]
    predictions: str = ""

    def __repr__(self) -> str:
        """In one line: a notebook shows what a cell returns, and curves are long."""
        best, by = "", self.config.eval.best_name
        if self.best is not None:
            best = f", best {printable(by)} {self.best[1]:.4f} at step {self.best[0]}"
        return f"Run({str(self.directory)!r}, step {self.step} of {self.config.train.steps}{best})"

    @property
    def name(self) -> str:
        """That of the directory."""
        return self.directory.resolve().name

    @property
    def step(self) -> int:
        """The last step that was logged."""
        return max((steps[-1] for steps, _ in self.curves.values()), default=0)

    @property
    def best(self) -> tuple[int, float] | None:
        """Step and score (eval.best) of the best evaluation; None before the first one."""
        steps, values = self.curves.get(self.config.eval.best_tag, ([], []))
        return max(zip(steps, values, strict=True), key=lambda point: point[1], default=None)

    @property
    def training_s(self) -> float:
        """Seconds of all steps so far; evaluations and checkpoints are not in them."""
        return _training_s(zip(*self.curves.get("time/step_s", ([], [])), strict=True))

    @property
    def memory_gib(self) -> float | None:
        """The most memory of rank 0, of its GPU if it has one; None if it was not logged."""
        return max(self.curves.get("mem/peak_gib", ([], []))[1], default=None)

    def disk_bytes(self) -> int:
        """What all files of the directory take."""
        return disk_bytes(self.directory)


class State(StrEnum):
    """What a run does, or how it has ended."""

    TRAINING = "training"
    EVALUATING = "evaluating"
    STUCK = "stuck"
    COMPLETE = "complete"
    CLEARED = "complete and cleared"
    STOPPED = "stopped"  # by a signal or --until: it can go on
    KILLED = "killed"
    DIVERGED = "diverged"  # loss, gradient or weights were not finite
    FAILED = "failed"
    UNREADABLE = "cannot be read"


@dataclass(frozen=True)
class Summary:
    """What a list of runs shows of one.

    state: of a killed run STOPPED; of one in use TRAINING, whatever it does.
    why: the message of the error of a run that diverged, failed or cannot be read.
    step: the last one logged, or, of a stopped run, saved, where --resume goes on.
    steps: train.steps; None: its config does not say.
    best: (step, score) of the best evaluation. best_by: the score that chooses it, in words.
    training_s: as `Run.training_s`.
    """

    directory: Path
    state: State
    why: str = ""
    step: int = 0
    steps: int | None = None
    best: tuple[int, float] | None = None
    best_by: str = "mIoU"
    training_s: float = 0.0
    num_bytes: int = 0


def find_runs(folders: Iterable[Path]) -> list[Path]:
    """The directories of the runs in `folders`, to any depth, each once, sorted within each folder.

    Raises:
        ConfigError: a folder is missing, or cannot be read.
    """
    directories: dict[Path, None] = {}
    with os_errors_as(ConfigError):
        for folder in folders:
            below = (here for here, _ in walk(folder, hidden=False) if run_directory.is_run(here))
            directories |= dict.fromkeys(sorted(below))
    return list(directories)


def summarize(directory: Path) -> Summary:
    """What the small files of a run tell in a few milliseconds; nothing is written."""
    try:
        metrics = b""
        with suppress(FileNotFoundError):  # no step is done yet
            metrics = read_bytes(directory / run_directory.METRICS)
        num_bytes, (steps, by) = disk_bytes(directory), options_of(directory)
        folder = directory / run_directory.CHECKPOINTS
        entries = read_entries(folder)
    except (OSError, CheckpointError) as error:
        return Summary(directory, State.UNREADABLE, printable(error))
    lines = metrics.splitlines()
    tags = b"time/step_s", by.best_tag.encode()
    seconds, evaluations = (list(points_of(lines, tag)) for tag in tags)
    # With a NaN, `max` would depend on the order.
    scores = [point for point in evaluations if not math.isnan(point[1])]
    step = max((step for step, _ in (*seconds, *evaluations)), default=0)
    evaluated = max((step for step, _ in evaluations), default=0)
    why = ""
    if run_directory.is_locked(directory):
        state = State.TRAINING
    # The last step alone does not tell: a run may be killed before its last evaluation.
    elif evaluated and evaluated == steps:
        state = State.CLEARED if entries.keys() == {BEST} else State.COMPLETE
    else:
        state, why = _ending(directory)
        saved = [name for name in entries.keys() - {BEST} if (folder / name).exists()]
        if entries or not (folder / LAST).exists():  # else a copy without its manifest
            step = max((entry.step for name in saved for entry in entries[name]), default=0)
    return Summary(
        directory,
        state,
        why,
        step,
        steps,
        max(scores, key=lambda point: point[1], default=None),
        by.best_name,
        _training_s(seconds),
        num_bytes,
    )


def read_run(directory: Path) -> Run:
    """The run in `directory`.

    Raises:
        ConfigError: there is no run.
    """
    if not run_directory.is_run(directory):
        raise ConfigError(run_directory.no_run(directory))
    # To look at a run must not make the code of its plugins run.
    config = load_config(directory / run_directory.CONFIG, imports=False)
    environment: Any = {}
    with suppress(OSError, ValueError):  # only people read it
        environment = parse_json(read_bytes(directory / ENVIRONMENT, 1 << 20))
    return Run(
        directory,
        config,
        _curves(directory / run_directory.METRICS),
        environment if isinstance(environment, dict) else {},
    )


def departures(config: Config) -> dict[str, Any]:
    """The options that differ from their defaults, or have none, by their full names."""
    default: dict[str, Any] = {}
    for section, field in Config.model_fields.items():
        options = getattr(field.annotation, "model_fields", {})
        default |= {} if options else {section: field.get_default(call_default_factory=True)}
        for key, option in options.items():
            default[f"{section}.{key}"] = option.get_default(call_default_factory=True)
    missing = object()
    return {
        key: value
        for key, value in run_directory.flat(config).items()
        if default.get(key, missing) is PydanticUndefined or _plain(default.get(key)) != value
    }


def differing_recipes(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """As `differing`, without what does not change a model, such as where the data are."""
    options = differing(configs)
    return {key: v for key, v in options.items() if not key.startswith(run_directory.HARMLESS)}


def differing(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """The options in which `configs` differ, with the value of each."""
    options = [run_directory.flat(config) for config in configs]
    keys = sorted({key for flattened in options for key in flattened})
    by_key = {key: [flattened.get(key) for flattened in options] for key in keys}
    return {key: values for key, values in by_key.items() if any(v != values[0] for v in values)}


def disk_bytes(directory: Path) -> int:
    """What all files in `directory` and below it take."""
    files = (path for path in directory.rglob("*") if path.is_file())
    # A link counts as itself: what it leads to may lie elsewhere, and be counted there.
    return sum(os.lstat(path).st_size for path in files)


def options_of(directory: Path) -> tuple[int | None, EvalConfig]:
    """train.steps, and an EvalConfig with eval.best and eval.every_steps.

    A config of another version, which `load_config` would refuse, says them too.
    """
    steps, by = None, EvalConfig()
    try:
        config = foreign_yaml(read_bytes(directory / run_directory.CONFIG, 1 << 20).decode())
        steps = config["train"]["steps"]
        known = {key: config["eval"][key] for key in ("best", "every_steps")}
        by = EvalConfig.model_validate(known, strict=False)
    except (OSError, KeyError, TypeError, ValueError):
        pass
    return steps if isinstance(steps, int) else None, by


def points_of(lines: Iterable[bytes], tag: bytes) -> Iterator[tuple[int, float]]:
    """(step, value) of each line of metrics.jsonl with `tag`; NaN for null.

    Nothing else of a line is parsed, which is five times as fast for tens of thousands of them.
    """
    mark = b'"%s": ' % tag
    for line in lines:
        before, has_tag, after = line.partition(mark)
        if has_tag and line.endswith(b"}"):  # not cut short
            with suppress(ValueError):  # a stranger's line
                # The log writes the step as the first key of each line.
                step = before.removeprefix(b'{"step": ').partition(b",")[0]
                value = after.partition(b",")[0].rstrip(b"}")
                yield int(step), math.nan if value == b"null" else float(value)


def _ending(directory: Path) -> tuple[State, str]:
    """How a run ended that is not complete, and the message of the error."""
    with suppress(OSError, ValueError, KeyError, TypeError):
        ending = parse_json(read_bytes(directory / run_directory.ENDING, 1 << 20))
        diverged = ending["exit_code"] == EXIT_NON_FINITE
        return State.DIVERGED if diverged else State.FAILED, printable(ending["message"])
    return State.STOPPED, ""


def _training_s(step_s: Iterable[tuple[int, float]]) -> float:
    """Seconds of all steps; step_s: a step, and the mean seconds since the one before."""
    total, before = 0.0, 0
    for step, seconds in step_s:
        total += (step - before) * seconds
        before = step
    return total


def tail(path: Path, num_bytes: int) -> list[bytes]:
    """The whole lines in the last bytes of a file; none if it cannot be read."""
    with suppress(OSError), open_regular(path) as file:
        start = max(0, os.fstat(file.fileno()).st_size - num_bytes)
        file.seek(start)
        # A number that is cut would be another one.
        return file.read().splitlines()[1 if start else 0 :]
    return []


def _plain(value: Any) -> Any:
    """A default as it stands in JSON: tuples are lists there."""
    return json.loads(json.dumps(value, default=str))


def _curves(path: Path) -> dict[str, tuple[list[int], list[float]]]:
    curves: dict[str, tuple[list[int], list[float]]] = {}
    if not path.exists():
        return curves
    with os_errors_as(ConfigError, path):
        lines = read_bytes(path).decode(errors="replace").splitlines()
    for line in lines:
        try:
            values = parse_json(line)
            step = values.pop("step")
            points = [(printable(tag), float(x)) for tag, x in values.items() if x is not None]
        except (ValueError, KeyError, TypeError, AttributeError):
            continue  # a last line cut short
        for tag, value in points:
            steps, logged = curves.setdefault(tag, ([], []))
            steps.append(step)
            logged.append(value)
    return curves
