"""`train.split: measured`: each rank gets what it can compute in the time that the others take."""

import time
from collections.abc import Sequence
from statistics import median

import torch

from segtrain.checkpoint.format import SplitFields
from segtrain.config import Config
from segtrain.data.read.dataset import SegDataset
from segtrain.distributed import collectives as dist
from segtrain.training.speed import Speed, fastest_split, measure_speed, step_time
from segtrain.training.state import TrainState, use_split

# A change stops the loader's workers and starts others, so it has to be worth it.
_LEAST_GAIN = 1.1
# Training between two measurements is at least so many times as long as one.
_LEAST_REST = 20


class MeasuredSplit:
    """The split of a run whose ranks are measured.

    fields: the last change, as a checkpoint keeps it; None: still even.
    """

    def __init__(
        self,
        state: TrainState,
        config: Config,
        train_set: SegDataset,
        device: torch.device,
        saved: SplitFields | None,
    ) -> None:
        self._state, self._config, self._device = state, config, device
        self._train_set, self.fields = train_set, None
        self._step_s: list[float] = []  # means of log intervals since the last change
        self._rests_until = 0.0  # on rank 0, by time.perf_counter()
        if saved is not None and len(saved["counts"]) == dist.world_size() and any(saved["counts"]):
            self.fields = saved
            use_split(state, config, tuple(saved["counts"]))

    def update(self, step_s: float) -> None:
        """Takes in the mean seconds of the steps of a log interval."""
        self._step_s.append(step_s)

    def measure(self) -> tuple[bool, list[str]]:
        """Measures all ranks and divides anew where that pays (collective).

        Returns whether the split has changed, and lines for the log.
        """
        began = time.perf_counter()
        if not dist.run_on_rank0(lambda: began >= self._rests_until):
            return False, []
        state, config, lines = self._state, self._config, self.reached()
        about_data = self._train_set.form, self._train_set.classes.num_classes
        here = measure_speed(state, config, *about_data, self._device)
        speeds = [Speed(*one) for one in dist.all_gather_object(here)]
        ended = time.perf_counter()
        self._rests_until = ended + _LEAST_REST * (ended - began)
        now = self._counts()
        best = fastest_split(sum(now), speeds, least=int(state.shares is not None))
        gain = step_time(now, speeds) / step_time(best, speeds)
        unit = "image" if state.shares is None else "share"
        each = ", ".join(f"{1e3 * one.seconds / one.at_once:.1f}" for one in speeds)
        taken = f"ranks take {each} ms a{'n' if unit == 'image' else ''} {unit}"
        if gain < _LEAST_GAIN:
            # Said once, or nobody would see that ranks are measured.
            stays = f"split      {_plus(now)} {unit}s of a microbatch stay: {taken}"
            return False, lines if self._step_s else [stays]
        self.fields = SplitFields(
            counts=list(best),
            step=state.step,
            predicted=gain,
            images_per_s=[self._images_per_s(), None],
        )
        self._step_s.clear()
        use_split(state, config, best)
        return True, [
            *lines,
            f"split      {_plus(best)} {unit}s of a microbatch instead of {_plus(now)}: {taken}, "
            f"so {gain:.2f} times as fast is predicted",
        ]

    def reached(self) -> list[str]:
        """A line, once, that tells how fast the steps are since the last change."""
        rate = self._images_per_s()
        if self.fields is None or rate is None or self.fields["images_per_s"][1] is not None:
            return []
        before, predicted = self.fields["images_per_s"][0], self.fields["predicted"]
        self.fields = self.fields | {"images_per_s": [before, rate]}
        line = f"split      {_plus(self.fields['counts'])} reach {rate:.1f} images/s"
        if before is not None:
            line += (
                f", {rate / before:.2f} times the {before:.1f} before; predicted {predicted:.2f}"
            )
        return [line]

    def _counts(self) -> tuple[int, ...]:
        layout = self._state.layout
        return layout.images if self._config.train.shares is None else layout.shares

    def _images_per_s(self) -> float | None:
        # The first interval has the start of the loader in it, perhaps steps before the change too.
        steps = self._step_s[1:]
        return self._config.train.batch_size / median(steps) if steps else None


def _plus(counts: Sequence[int]) -> str:
    return " + ".join(map(str, counts))
