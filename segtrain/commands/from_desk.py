"""What `segtrain train` has done at the desk: the only names of the desk in the core.

Each is imported when it is asked for. Where the desk was deleted, a folder, --finish and --fit end
with a line that says what is missing; a run ends without its page.
"""

import argparse
import os
from pathlib import Path
from typing import Any

from segtrain.commands.run_target import Target
from segtrain.config import Config
from segtrain.run import directory as run_directory


def named_config(text: str, *, may_write: bool) -> str:
    """`text`; if it is a folder, and no run, the config that `segtrain init` has written for it.

    may_write: if there is none, it is written now.

    Raises:
        ConfigError, DataError: what `segtrain init` cannot decide or read.
    """
    if not os.path.isdir(text) or run_directory.run_of(Path(text)) is not None:
        return text
    folder = Path(text)
    if folder.name in ("", ".."):  # `.` and `..` do not end with the name for the run
        folder = folder.resolve()
    if (made := folder / run_directory.CONFIG).exists():
        return str(made)
    from segtrain.desk.commands.init import config_of

    return str(config_of(folder, may_write=may_write))


def branch(args: argparse.Namespace, *, resume: bool, alone: bool) -> Target:
    """The run of --finish, made if it is not there; see `finish.branch`."""
    from segtrain.desk.commands import finish

    return finish.branch(args, resume=resume, alone=alone)


def fitted(args: argparse.Namespace, source: Path, config: Config, num_ranks: int) -> list[str]:
    """The options of --fit, tried now; see `fit.fitted`."""
    from segtrain.desk.commands import fit

    return fit.fitted(args, source, config, num_ranks)


def kept_fit(directory: Path) -> list[str]:
    """The options of --fit that a run was started with; see `fit.kept`."""
    from segtrain.desk.commands import fit

    return fit.kept(directory)


def write_page(directory: Path, device: Any) -> None:
    """Writes the page about a run, which is complete without it, whatever goes wrong."""
    from segtrain.run import console

    try:
        from segtrain.desk.results.report import evaluated, write_report

        runs = [evaluated(directory, device)]
        console.say(f"report     {write_report(directory, runs, device)}")
    except ModuleNotFoundError as error:
        console.say(f"warning: no report: {error.name} is not installed")
    # Training has ended well by now: a chart that fails must not make it look otherwise.
    except Exception as error:
        again = f"segtrain report {run_directory.word_for(directory)}"
        console.say(f"warning: no report ({type(error).__name__}: {error}); try {again}")
