"""A training on this rank: its images, its step, and the parts that go along with the steps.

`segtrain train`, `verify` and `bench` all take their steps as `loop.train` does.
"""

import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from dataclasses import dataclass, field

import torch

from segtrain.config import Config
from segtrain.data.read.dataset import SegDataset
from segtrain.data.sample.loader import TrainLoader, training_workers
from segtrain.data.sample.stream import ClassUniform, TrainStream
from segtrain.data.sample.transforms import TrainTransform
from segtrain.distributed import collectives as dist
from segtrain.distributed.liveness import HostWatch
from segtrain.training.graph import GraphStep
from segtrain.training.local import LocalStep
from segtrain.training.part import Part
from segtrain.training.receipt_meter import ReceiptMeter
from segtrain.training.state import TrainState
from segtrain.training.step import TrainStep
from segtrain.training.step_sync import StepSync


@dataclass(kw_only=True)
class Training:
    """What the steps of an experiment need on this rank.

    step: moves the weights by the images of a step.
    last_step: after which `batches` ends.
    parts: in the order in which they take in a step. watch: see `host_watch`.
    """

    config: Config
    device: torch.device
    train_set: SegDataset
    state: TrainState
    step_sync: StepSync
    step: TrainStep | GraphStep
    last_step: int
    class_uniform: ClassUniform | None = None  # data.class_uniform
    parts: tuple[Part, ...] = ()
    watch: HostWatch | None = None
    _loader: TrainLoader | None = field(default=None, init=False)
    _is_first: bool = field(default=True, init=False)  # no step is done yet

    def batches(self) -> Iterator[LocalStep]:
        """This rank's images of the steps from the current one to the last.

        Ends early, after the same step on all ranks, if `step_sync` was asked to stop or end.
        """
        try:
            while self.state.step < self.last_step and not self.step_sync.is_over:
                began = time.perf_counter()
                if self._loader is None:
                    self._loader = self.loader(self.state.step, self.last_step)
                # One for each microbatch.
                batches = [next(self._loader) for _ in self.state.layout.parts]
                data_s = time.perf_counter() - began
                with self.watched():  # a device that hangs lets no copy through
                    local = self.step.local(batches, data_s)
                yield local
        finally:
            self.reopen()

    def reopen(self) -> None:
        """Lets another loader begin at the next step, with the images of the layout then."""
        if self._loader is not None:
            self._loader.close()
            self._loader = None

    @contextmanager
    def around(self) -> Iterator[None]:
        """Around what a step computes: the watch, and all parts' `around`."""
        with ExitStack() as stack:
            # The watch is the outermost: it covers all that waits inside.
            stack.enter_context(self.watched())
            for part in self.parts:
                stack.enter_context(part.around(self))
            yield
        self._is_first = False

    def watched(self) -> AbstractContextManager[object]:
        """Around what waits for the device, whose driver may never come back."""
        # Compiling may take longer than any exchange.
        compiles = self.config.train.compile and self._is_first
        return nullcontext() if self.watch is None or compiles else self.watch.step()

    def num_workers(self) -> int:
        """The loader processes of this rank."""
        return training_workers(self.config)

    def stream(self) -> TrainStream:
        """The augmented samples of all steps."""
        config, data = self.config, self.config.data
        return TrainStream(
            self.train_set,
            TrainTransform(
                config.augment, form=self.train_set.form, short_side_px=data.short_side_px
            ),
            stream_seed=config.seed,
            batch_size=config.train.batch_size,
            class_uniform=self.class_uniform,
            class_mix_prob=config.augment.class_mix_prob,
            hashes=self.state.passes.promises_bits,
        )

    def loader(self, start: int, stop: int) -> TrainLoader:
        """This rank's batches of the steps `start` to `stop` - 1."""
        return TrainLoader(
            self.stream(),
            indices=self.state.layout.positions(dist.rank()),
            start_step=start,
            steps=stop,
            num_workers=self.num_workers(),
            pin_memory=self.device.type == "cuda",
            # CUDA, and NCCL over InfiniBand, do not survive a fork.
            start_method="forkserver" if self.device.type == "cuda" else None,
            # Time out before the other ranks do, so that the error names the loader.
            timeout_s=0.8 * self.config.train.timeout_s,
        )

    def receipt_meter(self, weights_due: Callable[[int], bool]) -> ReceiptMeter:
        """For the receipts of the steps; `weights_due(step)` says when to hash the weights."""
        stream = self.stream()
        return ReceiptMeter(
            self.state, names=lambda step: stream.names_of_step(step - 1), weights_due=weights_due
        )


def host_watch(config: Config, device: torch.device, stack: ExitStack) -> HostWatch | None:
    """What ends the process if a step gets stuck in the driver; None where nothing waits there.

    stack: closes it.
    """
    if device.type != "cuda" or dist.world_size() == 1:
        return None
    return stack.enter_context(HostWatch(config.train.timeout_s, dist.last_exchange))
