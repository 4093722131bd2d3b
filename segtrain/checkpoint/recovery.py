"""Restoring a run's lost config.yaml from its checkpoints."""

from pathlib import Path

from segtrain.checkpoint.experiment import parse_experiment
from segtrain.checkpoint.format import load
from segtrain.checkpoint.loading import check_sizes
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.run import directory as run_directory


def restore_config(directory: Path) -> list[str]:
    """Writes config.yaml of the run again if it is missing or empty; returns a log line then.

    CheckpointError if no checkpoint can be loaded, ExecutionError if the file cannot be written.
    """
    if not run_directory.has_lost_config(directory):
        return []
    lost = directory / run_directory.CONFIG
    path, _ = CheckpointManager(directory / run_directory.CHECKPOINTS, keep_limit=1).newest()
    if path is None:
        raise CheckpointError(f"{lost}: missing, and so are the checkpoints; start a new run")
    checkpoint = load(path)
    config, classes = parse_experiment(checkpoint, path)
    check_sizes(checkpoint, config, classes, path)
    try:
        run_directory.write_config(directory, config)
    except OSError as error:
        raise ExecutionError(f"{lost}: cannot be written: {error.strerror}") from error
    what = f"restored from {path.name}, step {checkpoint.step}"
    return [f"warning: {lost} was missing or empty: {what}"]
