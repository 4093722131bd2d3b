"""Errors that a user can repair, each with the exit code of the command that meets it.

A message names the place (file and line, key, rank), what was expected, what was found and, where
it is known, the repair. It starts in lower case, has no full stop and is shown without a traceback.
"""

from collections.abc import Mapping

EXIT_OK = 0
EXIT_INTERNAL = 1
EXIT_CONFIG = 2
EXIT_DATA = 3
EXIT_CHECKPOINT = 4
EXIT_NON_FINITE = 5
EXIT_SYSTEM = 6
EXIT_MEMORY = 7
EXIT_INTERRUPTED = 130
EXIT_PIPE = 141
EXIT_TERMINATED = 143


class UserError(Exception):
    """A mistake outside the program; `str(error)` may hold several lines, one finding each."""

    exit_code = EXIT_INTERNAL


class ConfigError(UserError):
    """The command line, the experiment file or the class file is wrong."""

    exit_code = EXIT_CONFIG


class MemoryLimitError(ConfigError):
    """The experiment does not fit into the memory of this machine."""

    exit_code = EXIT_MEMORY


class DataError(UserError):
    """Images, labels or list files are wrong."""

    exit_code = EXIT_DATA


class CheckpointError(UserError):
    """A checkpoint is missing, damaged, foreign or does not fit the model."""

    exit_code = EXIT_CHECKPOINT


class NonFiniteError(UserError):
    """The loss is NaN or infinite; training stopped before the result could be saved."""

    exit_code = EXIT_NON_FINITE


class ExecutionError(UserError):
    """A rank, a loader worker, the system or a server failed, or access was refused."""

    exit_code = EXIT_SYSTEM


class LostRanksError(ExecutionError):
    """Other ranks cannot be reached any more: the cause lies with one of them."""


def refuse_unused(given: Mapping[str, object], names: str, source: str) -> None:
    """ConfigError: an option of these names is given, and has no effect on data of this `source`.

    given: values by name; None: the command line does not say.
    """
    if unused := [f"--{name}" for name in names.split() if given[name] is not None]:
        raise ConfigError(f"{', '.join(unused)}: no effect on {source}")
