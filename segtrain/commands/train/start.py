"""`segtrain train`: the config and the run that its arguments mean, then the start of the ranks."""

import argparse
import os
import shlex
from pathlib import Path
from typing import NamedTuple

from segtrain.commands.config import show_warnings
from segtrain.config import load_config, recipes
from segtrain.errors import ConfigError
from segtrain.run import directory as run_directory
from segtrain.text import say

_CHECKPOINT = ".pt"


class Target(NamedTuple):
    """The config to train, the directory of the run, and where the config is, if unexpected."""

    config: Path
    directory: Path
    note: str = ""


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code; `args.output` becomes the run directory."""
    is_first = "RANK" not in os.environ  # what is said here is said once, not by every rank
    target = train_target(args.config, resume=args.resume, output=args.output)
    args.output = target.directory
    if target.note and is_first:
        say(target.note)
    is_own = target.config == target.directory / run_directory.CONFIG
    if args.resume and is_own and run_directory.has_lost_config(target.directory):
        from segtrain.checkpoint.manager import restore_config

        for line in restore_config(target.directory):
            say(line)
    config = load_config(target.config, args.set)
    if is_first:
        show_warnings(config)
    from segtrain.commands import launch

    return launch.train(args, config)


def train_target(text: str, *, resume: bool, output: Path | None) -> Target:
    """What `segtrain train TEXT` works on.

    `text` is a config or, with `resume`, the directory of a run or the config.yaml in it.

    Raises:
        ConfigError: there is no such config; or `text` means a run, but `resume` is missing or
            `output` is another directory, so it is not clear what is wanted.
    """
    run = _run_of(text)
    if run is None:
        found = recipes.find(text)
        return Target(found.path, output or Path("runs") / found.path.stem, found.note)
    config = run / run_directory.CONFIG
    elsewhere = output is not None and os.path.realpath(output) != os.path.realpath(run)
    if elsewhere and Path(text).name == run_directory.CONFIG:  # another run with the same config
        return Target(config, output)
    # A checkpoint is refused: training resumes from the newest, whichever is named.
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
    """The run whose directory, config.yaml or checkpoint `text` names; None if it names none."""
    path = Path(text)
    if path.name == run_directory.CONFIG:
        path = path.parent
    elif text.endswith(_CHECKPOINT):
        path = path.parent.parent
    try:
        return path if run_directory.is_run(path) else None
    except (OSError, ValueError):  # no name that a file can have
        return None
