"""Steps that all ranks take together, as one device would: the way of this project."""

from segtrain.config import Config
from segtrain.training.state import TrainState
from segtrain.training.step_sync import StepSync
from segtrain.training.ways import Requests, Way


class Sync(Way):
    """Ranks agree in every step, so none is ahead of another."""

    @classmethod
    def begin(cls, state: TrainState, config: Config, requests: Requests) -> "Sync":
        """Nothing but the sums of a step keeps them together."""
        stop, save = requests
        overflow_allowed = config.train.precision == "float16"
        limits = {"overflow_allowed": overflow_allowed, "timeout_s": config.train.timeout_s}
        return cls(StepSync(stop, save_requested=save, **limits))

    def have_met(self, step: int, *, due: bool, is_last: bool) -> bool:
        """They always have; a rank may be asked to save."""
        return due or self.step_sync.save_is_due


WAY = Sync
