"""How a rank makes the passes of its images of a microbatch: at once, or in parts, in threads.

Here the parts are virtual ranks; `share_passes` is imported where `train.shares` asks for it.
"""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from segtrain.config import TrainConfig
from segtrain.distributed.layout import Layout
from segtrain.distributed.offload import saved_on_host
from segtrain.distributed.rank_sums import RANKS, RankSums
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.training.gradients import GradientSum

T = TypeVar("T")


class RankPasses:
    """How this rank runs forward and backward over its images of a microbatch.

    sums: how the parts of all ranks are added up. gradients: sums those of a step.
    modules: what runs, and whose running statistics follow the batches: the model or its replicas.
    at_once: how many images this process evaluates at the same time.
    """

    promises_bits = False  # the same on any number of ranks
    by_kernels = True  # whether Triton's kernels may compute a step
    sums: RankSums = RANKS
    at_once = 1

    def __init__(
        self, model: nn.Module, wrapped: nn.Module, train: TrainConfig, layout: Layout
    ) -> None:
        """wrapped: `model` and its loss as one module."""
        self._model, self._wrapped, self._layout = model, wrapped, layout
        self.modules: list[nn.Module] = [model]
        self.gradients: Any = self._sum_of_gradients(train)

    def _sum_of_gradients(self, train: TrainConfig) -> Any:
        # Virtual ranks have a backward pass each, so their gradients wait for the end. Processes
        # that train without waiting for each other add up nothing: an empty list makes no buckets.
        summed = [] if train.is_asynchronous else self._model.named_parameters()
        return GradientSum(summed, overlap=train.virtual_ranks == 1)

    @property
    def images(self) -> Sequence[int] | Sequence[Sequence[int]]:
        """For `placed`, of a pass without gradients, which needs no virtual ranks."""
        return self._layout.images

    @staticmethod
    def why_no_graph(train: TrainConfig) -> str | None:
        """Why a CUDA graph cannot hold a step; None: it can."""
        if train.virtual_ranks == 1:
            return None
        return "train.virtual_ranks computes in threads, which wait for each other"

    def first_step(self) -> AbstractContextManager[object]:
        """Around the first step: refuses a model that it changes as it may not."""
        return nullcontext()

    def runs_inline(self, parts: int) -> bool:
        """Whether a microbatch of so many parts needs no threads."""
        return parts == 1

    def run(self, work: Callable[[nn.Module, Any], T], parts: Sequence[Any]) -> list[T]:
        """What `work(module, part)` returns of each part, in its thread (collective)."""
        # The default `lambda part=part` binds this part: the loop goes on before a thread runs.
        group = VirtualRanks(len(parts))
        return group.run([lambda part=part: work(self._wrapped, part) for part in parts])

    def saved_tensors(self, device: torch.device) -> AbstractContextManager[object]:
        """Around the passes of one part: tensors saved for its backward pass stay on the host.

        Virtual ranks save memory: the device holds those of one part alone.
        """
        return saved_on_host(device, self._model.parameters())

    def cut(self, tensor: Tensor, microbatch: int) -> list[Tensor]:
        """This rank's images of a microbatch by the parts that `sums` adds up."""
        return [tensor]

    def batch(self, tensor: Tensor, microbatch: int) -> Any:
        """The same as `sums.each` takes it."""
        return tensor

    def fields(self) -> dict[str, Any] | None:
        """What a checkpoint keeps of it; None: nothing."""
        return None

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Sets what `fields` gave; LookupError, TypeError, CheckpointError: it is none of these."""

    def findings(self, saved: dict[str, Any] | None) -> list[str]:
        """Why bits may differ although they are promised (collective); saved: of a checkpoint."""
        return []
