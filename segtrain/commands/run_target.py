"""Which config, and which run, `segtrain train TEXT` means."""

import os
import shlex
from pathlib import Path
from typing import NamedTuple

from segtrain.commands.config import find_config
from segtrain.errors import ConfigError
from segtrain.run import directory as run_directory

CHECKPOINT = ".pt"


class Target(NamedTuple):
    """The config to train, the directory of the run, and where the config is, if unexpected."""

    config: Path
    directory: Path
    note: str = ""


def resolve_run(text: str, *, resume: bool, output: Path | None) -> Target:
    """What `segtrain train TEXT` works on.

    `text` is a config or, with `resume`, the directory of a run or the config.yaml in it.

    Raises:
        ConfigError: there is no such config; or `text` means a run, but `resume` is missing or
            `output` is another directory, so it is not clear what is wanted.
    """
    run = run_directory.run_of(Path(text))
    if run is None:
        return _of_config(text, output)
    config = run / run_directory.CONFIG
    elsewhere = output is not None and os.path.realpath(output) != os.path.realpath(run)
    if elsewhere and Path(text).name == run_directory.CONFIG:  # another run with the same config
        return Target(config, output)
    # A checkpoint is refused: training resumes from the newest, whichever is named.
    if not resume or elsewhere or text.endswith(CHECKPOINT):
        new = output if elsewhere else Path("runs") / f"{run.resolve().name}_2"
        raise _no_config(text, run, new)
    if not config.exists():
        again = f"segtrain train CONFIG --output {shlex.quote(str(run))} --resume"
        raise ConfigError(f"{config}: missing; to go on with a config of your own: {again}")
    return Target(config, run)


def _of_config(text: str, output: Path | None) -> Target:
    """A config, whose run has its name unless `output` is given."""
    named = find_config(text)
    name = named.path.stem
    if named.path.name == run_directory.CONFIG:  # of `segtrain init`: the folder has the name
        name = named.path.parent.name or name
    return Target(named.path, output or Path("runs") / name, named.note)


def _no_config(text: str, run: Path, new: Path) -> ConfigError:
    """`text` means a run, and it is not clear what is wanted of it. new: where another could be."""
    kind = "a checkpoint" if text.endswith(CHECKPOINT) else "a run"
    config = run / run_directory.CONFIG
    return ConfigError(
        f"{text}: expected a config, found {kind}\n"
        f"to go on with the run: segtrain train {run_directory.word_for(run)} --resume\n"
        f"to train it longer: segtrain train {run_directory.word_for(run)} --finish STEPS\n"
        "to start a new run with its config: "
        f"segtrain train {shlex.quote(str(config))} --output {shlex.quote(str(new))}"
    )
