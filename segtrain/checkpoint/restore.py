"""Restoring a training: weights, optimizer and loss scale, checked before it goes on."""

import shlex
from pathlib import Path
from typing import Any

from torch import nn

from segtrain.checkpoint.format import LAST, Checkpoint, parse_experiment
from segtrain.checkpoint.weights import check_fit, load_weights
from segtrain.config import Config
from segtrain.data.read.classes import ClassFile
from segtrain.errors import CheckpointError
from segtrain.run.directory import config_differences
from segtrain.text import MAX_NAME, printable
from segtrain.training.state import TrainState


def restore(state: TrainState, checkpoint: Checkpoint, path: Path) -> None:
    """Sets `state` to what it was when `checkpoint` was saved; called on every rank.

    CheckpointError if it does not hold what this state needs, or is damaged.
    """
    if checkpoint.optimizer is None or checkpoint.scaler is None:
        raise CheckpointError(f"{path}: holds no training state; go on with {LAST}")
    load_weights(state.model, checkpoint.model, path)
    if state.average is not None:
        if checkpoint.average is None:
            raise CheckpointError(f"{path}: holds no average of the weights (optim.ema_decay)")
        load_weights(state.average.model, checkpoint.average, path)
    try:
        state.restore(checkpoint)
    except CheckpointError as error:
        raise CheckpointError(f"{path}: {error}") from None
    # A stranger's file has anything where a dict, a list, a number or a tensor is expected.
    except (LookupError, TypeError, ValueError, AttributeError, RuntimeError) as error:
        problem = printable(str(error) or type(error).__name__, 2 * MAX_NAME)
        what = "the state of training is damaged, or belongs to another model"
        raise CheckpointError(f"{path}: {what}: {problem}") from error


def check_changes(
    model: nn.Module, checkpoint: Checkpoint, path: Path, config: Config, classes: ClassFile
) -> None:
    """CheckpointError if options or classes have changed so that the run needs another state."""
    before, known = parse_experiment(checkpoint, path)
    guilty = ["optim.kind:"]
    if checkpoint.average is None:
        guilty.append("optim.ema_decay:")
    if checkpoint.best is not None:  # another score may have been best at another step
        guilty.append("eval.best:")
    if _pruning(before) != _pruning(config):
        guilty.append("optim.layers:")
    elif config.optim.prunes and "held" not in (checkpoint.start or {}):
        raise CheckpointError(f"{path}: damaged: no masks of the weights that stay 0")
    try:
        check_fit(model, checkpoint.model, path)
    except CheckpointError:
        # Which of these options has changed the shapes is not known here.
        guilty += ["data.classes:", "model.", "norm."]
    changes = config_differences(before, config)
    if known.num_classes != classes.num_classes:
        numbers = f"{known.num_classes} classes there, {classes.num_classes} now"
        changes.append(f"data.classes: {numbers}")
    changes = [line for line in changes if line.startswith(tuple(guilty))]
    if changes:
        listed = "\n  ".join(changes)
        run = shlex.quote(str(path.parent.parent))
        raise CheckpointError(
            f"{path}: does not hold the state that these changes need\n  {listed}\n"
            "to go on with the run: undo them\n"
            "to start a new run with its weights: --output DIR --set train.init_from="
            f"{run} instead of --resume"
        )


def _pruning(config: Config) -> list[tuple[Any, ...]]:
    """What of the rules for layers decides which weights stay 0."""
    rules = config.optim.layers
    return [(rule.names, rule.keep_zeros, rule.zero) for rule in rules if rule.prunes]
