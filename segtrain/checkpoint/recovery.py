"""What a run directory has lost and its checkpoints still know."""

from pathlib import Path

from segtrain.checkpoint.contents import check_sizes, load, parse_experiment
from segtrain.checkpoint.manager import CheckpointManager
from segtrain.errors import CheckpointError, ExecutionError
from segtrain.run import directory as run_directory


def restore_config(directory: Path) -> list[str]:
    """Writes config.yaml of the run anew, if it is missing or empty; returns a line about that.

    Raises:
        CheckpointError: no checkpoint can be loaded, or it is of another version of segtrain.
        ExecutionError: the file cannot be written.
    """
    if not run_directory.has_lost_config(directory):
        return []
    lost = directory / run_directory.CONFIG
    path, _ = CheckpointManager(directory / run_directory.CHECKPOINTS, keep_limit=1).newest()
    if path is None:
        raise CheckpointError(
            f"{lost}: missing or empty, and there is no checkpoint to go on from; begin a new run "
            "by --output"
        )
    record = load(path)
    config, classes = parse_experiment(record, path)
    check_sizes(record, config, classes, path)
    try:
        run_directory.write_config(directory, config)
    except OSError as error:
        raise ExecutionError(f"{lost}: cannot be written: {error.strerror}") from error
    return [f"warning: {lost} was missing or empty: restored from {path.name}, step {record.step}"]
