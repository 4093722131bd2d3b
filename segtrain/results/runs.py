"""What a run directory tells: config, curves, environment, time, memory, size."""

import json
import os
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic_core import PydanticUndefined

from segtrain.config import Config, load_config
from segtrain.errors import ConfigError
from segtrain.files import os_errors_as, parse_json, read_bytes
from segtrain.run import directory as run_directory
from segtrain.run.environment import ENVIRONMENT
from segtrain.text import printable


@dataclass(frozen=True)
class Run:
    """A run, as its files say.

    curves: of each tag of metrics.jsonl the steps and values, without missing ones.
    environment: environment.json; empty if it is missing or damaged.
    """

    directory: Path
    config: Config
    curves: Mapping[str, tuple[list[int], list[float]]]
    environment: Mapping[str, Any]

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
        """Step and mIoU of the best evaluation; None before the first one."""
        steps, values = self.curves.get("eval/mIoU", ([], []))
        return max(zip(steps, values, strict=True), key=lambda one: one[1], default=None)

    @property
    def training_s(self) -> float:
        """Seconds of all steps so far; evaluations and checkpoints are not in them."""
        total, before = 0.0, 0
        for step, seconds in zip(*self.curves.get("time/step_s", ([], [])), strict=True):
            total += (step - before) * seconds
            before = step
        return total

    @property
    def memory_gib(self) -> float | None:
        """The most memory of rank 0, of its GPU if it has one; None if it was not logged."""
        return max(self.curves.get("mem/peak_gib", ([], []))[1], default=None)

    def disk_bytes(self) -> int:
        """What all files of the directory take."""
        files = (path for path in self.directory.rglob("*") if path.is_file())
        return sum(os.lstat(path).st_size for path in files)


def read_run(directory: Path) -> Run:
    """The run in `directory`.

    Raises:
        ConfigError: there is no run.
    """
    if not run_directory.is_run(directory):
        raise ConfigError(f"{directory}: expected the directory of a run")
    config = load_config(directory / run_directory.CONFIG)
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
        for key, option in options.items():
            default[f"{section}.{key}"] = option.get_default(call_default_factory=True)
    missing = object()
    return {
        key: value
        for key, value in run_directory.flat(config).items()
        if default.get(key, missing) is PydanticUndefined or _plain(default.get(key)) != value
    }


def differing(configs: Sequence[Config]) -> dict[str, list[Any]]:
    """The options in which `configs` differ, with the value of each."""
    options = [run_directory.flat(config) for config in configs]
    keys = sorted({key for one in options for key in one})
    found = {key: [one.get(key) for one in options] for key in keys}
    return {key: values for key, values in found.items() if any(v != values[0] for v in values)}


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
            steps, found = curves.setdefault(tag, ([], []))
            steps.append(step)
            found.append(value)
    return curves
