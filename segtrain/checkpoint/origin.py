"""Which weights made a file or a folder of predictions, for whoever finds only that."""

import json
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from segtrain import __version__
from segtrain.checkpoint.trained import LoadedModel
from segtrain.errors import ExecutionError
from segtrain.files import manifest, os_errors_as

RECORD = "predicted.jsonl"


def origins(loaded: LoadedModel) -> list[dict[str, Any]]:
    """Of each checkpoint its name in its run, its step and the SHA-256 of the file.

    Not where the run lies: a file that is handed on must not tell of a machine.
    """
    steps = [member.step for member in loaded.members or [loaded]]
    return [
        {"checkpoint": _name(file), "step": step, "sha256": manifest.sha256_of(file)}
        for file, step in zip(loaded.files, steps, strict=False)  # none of a model made in memory
    ]


def add_record(folder: Path, loaded: LoadedModel, about: dict[str, Any]) -> None:
    """Appends a line to RECORD: when, which weights, where they lie, and `about`.

    ExecutionError: it cannot be written.
    """
    models = [
        origin | {"path": str(file)}
        for origin, file in zip(origins(loaded), loaded.files, strict=True)
    ]
    now = datetime.now(UTC).isoformat(timespec="seconds")
    line = {"time": now, "segtrain": __version__, "models": models, **about}
    path = folder / RECORD
    with (
        os_errors_as(ExecutionError, path, "cannot be written"),
        path.open("a") as file,
    ):
        file.write(json.dumps(line) + "\n")


def _name(file: Path) -> str:
    """Of a checkpoint in a run with the name of the run."""
    return "/".join(file.parts[-3:] if file.parent.name == "checkpoints" else file.parts[-1:])
