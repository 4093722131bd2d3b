"""The losses by name."""

from collections.abc import Callable

from segtrain.training.losses.base import Loss, LossOptions
from segtrain.training.losses.boundary import BoundaryRelaxation
from segtrain.training.losses.cross_entropy import CrossEntropy
from segtrain.training.losses.dice import Dice
from segtrain.training.losses.focal import Focal
from segtrain.training.losses.lovasz import lovasz
from segtrain.training.losses.ohem import OHEM

LOSSES: dict[str, Callable[[LossOptions], Loss]] = {
    "cross_entropy": CrossEntropy,
    "ohem": OHEM,
    "dice": Dice,
    "focal": Focal,
    "lovasz": lovasz,
    "boundary_relaxation": BoundaryRelaxation,
}
"""`loss.kind`: what is called with `LossOptions`."""
