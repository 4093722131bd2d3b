"""Which weights an exported file or predictions came from, for whoever finds only those."""

from pathlib import Path
from typing import Any

from segtrain.checkpoint.trained import LoadedModel
from segtrain.files import manifest


def origins(loaded: LoadedModel) -> list[dict[str, Any]]:
    """Of each checkpoint its name in its run, its step and the SHA-256 of the file.

    Not where the run lies: a file that is handed on must not tell of a machine.
    """
    steps = [member.step for member in loaded.members or [loaded]]
    return [
        {"checkpoint": _name(file), "step": step, "sha256": manifest.sha256_of(file)}
        for file, step in zip(loaded.files, steps, strict=False)  # none of a model made in memory
    ]


def _name(file: Path) -> str:
    """Of a checkpoint in a run with the name of the run."""
    return "/".join(file.parts[-3:] if file.parent.name == "checkpoints" else file.parts[-1:])
