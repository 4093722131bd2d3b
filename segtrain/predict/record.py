"""What a folder of predictions says of the commands that wrote into it, and of their weights."""

import json
from contextlib import suppress
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from segtrain import __version__
from segtrain.checkpoint.origin import origins
from segtrain.checkpoint.trained import LoadedModel
from segtrain.errors import ConfigError, ExecutionError
from segtrain.files import os_errors_as
from segtrain.text import first_of, printable

RECORD = "predicted.jsonl"


def add_record(
    folder: Path, loaded: LoadedModel, about: dict[str, Any], *, overwrite: bool
) -> list[str]:
    """Appends a line to RECORD: when, which weights, where they lie, and `about`.

    Returns a warning if what is there was made by other weights.

    Raises:
        ConfigError: it has other classes, and shall not be overwritten.
        ExecutionError: the line cannot be written.
    """
    models = [
        origin | {"path": str(file)}
        for origin, file in zip(origins(loaded), loaded.files, strict=True)
    ]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    names, path = list(loaded.classes.names), folder / RECORD
    line = {"time": now, "segtrain": __version__, "models": models, "classes": names, **about}
    others = [one for one in _records(path) if _weights(one) != _weights(line)]
    if not overwrite and (foreign := [one for one in others if one.get("classes") != names]):
        what = f"holds predictions of {_named(foreign[-1])}, whose ids are those of other classes"
        raise ConfigError(f"--output {printable(folder)}: {what}; choose another directory")
    with os_errors_as(ExecutionError, path, "cannot be written"):
        folder.mkdir(parents=True, exist_ok=True)
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
    there = f"{printable(folder)} also holds predictions of {_named(others[-1])}" if others else ""
    return [f"warning: {there}; {RECORD} tells which inputs are whose"] if there else []


def _records(path: Path) -> list[dict[str, Any]]:
    """The lines that are there; none of a file that was written by others."""
    with suppress(OSError, ValueError, TypeError, AttributeError, KeyError):
        found = [json.loads(line) for line in path.read_bytes().splitlines()]
        if all(_weights(one) for one in found):
            return found
    return []


def _weights(record: dict[str, Any]) -> list[Any]:
    return [model["sha256"] for model in record.get("models", ())]


def _named(record: dict[str, Any]) -> str:
    models = (f"{one['checkpoint']}, step {one['step']}" for one in record["models"])
    return first_of(models, 2)
