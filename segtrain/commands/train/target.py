"""What CONFIG, --resume and --output of `segtrain train` mean together: which file, which run."""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

from segtrain.config import recipes
from segtrain.errors import ConfigError
from segtrain.run import directory as run_directory

_CHECKPOINT = ".pt"


class Target(NamedTuple):
    """The config to train, the directory of the run, and a note on the config's place or ""."""

    config: Path
    directory: Path
    note: str = ""

    @property
    def is_own(self) -> bool:
        """Whether the config is the one that the run itself wrote."""
        return self.config == self.directory / run_directory.CONFIG


def train_target(text: str, *, resume: bool, output: Path | None) -> Target:
    """What `segtrain train TEXT` works on.

    `text` is a config, or, to go on with a run, its directory or the config.yaml in it.

    Raises:
        ConfigError: there is no such config; or `text` means a run, and without `resume`, or with
            another directory in `output`, it is not clear what is wanted.
    """
    run = _run_of(text)
    if run is None:
        found = recipes.find(text)
        return Target(found.path, output or Path("runs") / found.path.stem, found.note)
    config = run / run_directory.CONFIG
    elsewhere = output is not None and os.path.realpath(output) != os.path.realpath(run)
    if elsewhere and Path(text).name == run_directory.CONFIG:  # another run with the same config
        return Target(config, output)
    # A checkpoint is refused: training goes on from the newest, whichever is named.
    if resume and not elsewhere and not text.endswith(_CHECKPOINT):
        return Target(config, run)
    new = output if elsewhere else Path("runs") / f"{run.resolve().name}_2"
    kind = "a checkpoint" if text.endswith(_CHECKPOINT) else "a run"
    raise ConfigError(
        f"{text}: expected a config, found {kind}\n"
        f"to go on with the run: segtrain train {shlex.quote(str(run))} --resume\n"
        "to start a new run with its config: "
        f"segtrain train {shlex.quote(str(config))} --output {shlex.quote(str(new))}"
    )


def _run_of(text: str) -> Path | None:
    """The run whose directory, config.yaml or checkpoint `text` is; None if it is of no run."""
    path = Path(text)
    if path.name == run_directory.CONFIG:
        path = path.parent
    elif text.endswith(_CHECKPOINT):
        path = path.parent.parent
    try:
        return path if run_directory.is_run(path) else None
    except (OSError, ValueError):  # no name that a file can have
        return None
