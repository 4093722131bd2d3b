"""What a file of another program becomes: the model, and where each of its tensors goes."""

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

from torch import Tensor

from segtrain.errors import CheckpointError

State = Mapping[str, Tensor]
Options = dict[str, Any]
"""Values by `section.key`, such as model.output_stride."""
Renames = tuple[tuple[str, str], ...]


class Rotation(NamedTuple):
    """The first `count` channels of dimension `dim` go to the end: another order of branches."""

    dim: int
    count: int


@dataclass(frozen=True)
class Plan:
    """How the tensors of one file become a model.

    found: what keys and shapes decide.
    stated: what a config inside the file says; it comes before `assumed`.
    assumed: what the file cannot say, by the defaults of its program.
    renames: (beginning of our key, beginning of theirs); the first that fits counts.
    rotations: by the beginning of our key.
    left_out: (beginning of their key, why it has no place here).
    drops_zero: the labels' id 0 is ignored, and class i has id i + 1.
    notes: further lines for the report; warnings: those that may change predictions.
    """

    source: str
    num_classes: int
    found: Options
    renames: Renames
    stated: Options = field(default_factory=dict)
    assumed: Options = field(default_factory=dict)
    rotations: Mapping[str, Rotation] = field(default_factory=dict)
    left_out: Renames = ()
    class_names: tuple[str, ...] = ()
    palette: tuple[tuple[int, int, int], ...] = ()
    drops_zero: bool = False
    notes: tuple[str, ...] = ()
    warnings: tuple[str, ...] = ()

    def options(self) -> Options:
        """All options; what keys decide cannot be stated or assumed otherwise."""
        return {**self.assumed, **self.stated, **self.found}

    def their_key(self, key: str) -> str | None:
        """The key in the file of our `key`; None if the plan has no place for it."""
        for ours, theirs in self.renames:
            if key.startswith(ours):
                return theirs + key.removeprefix(ours)
        return None

    def without_aux_head(self) -> "Plan":
        """The same model without its auxiliary head, whose keys are left out."""
        found = {k: v for k, v in self.found.items() if not k.startswith("model.aux_")}
        found["model.aux_head"] = False
        why = "--set model.aux_head=false"
        keys = tuple((theirs, why) for ours, theirs in self.renames if ours.startswith("aux_head."))
        return replace(self, found=found, left_out=(*self.left_out, *keys))

    def rotation(self, key: str) -> Rotation | None:
        """How the channels of our `key` are put in order; None: they are."""
        return next((r for ours, r in self.rotations.items() if key.startswith(ours)), None)


def size(state: State, key: str, dim: int = 0) -> int:
    """A dimension of a tensor that decides a width of the model.

    Raises:
        CheckpointError: it is missing, or has no such dimension.
    """
    if key not in state:
        raise CheckpointError(
            f"missing: {key}, whose shape decides the model; the file is not whole, --ignore took "
            "it, or this is another model"
        )
    shape = tuple(state[key].shape)
    if dim >= len(shape) or shape[dim] == 0:
        raise CheckpointError(f"{key}: expected a convolution's weight, found the shape {shape}")
    return shape[dim]


def count_children(state: State, prefix: str) -> int:
    """How many different names stand after `prefix`, up to the next dot."""
    return len(
        {key.removeprefix(prefix).partition(".")[0] for key in state if key.startswith(prefix)}
    )
