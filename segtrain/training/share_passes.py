"""The passes of shares, whose sums have the same bits on any number of ranks (`train.shares`)."""

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any, TypeVar

import torch
from torch import Tensor, nn

from segtrain.config import TrainConfig
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout
from segtrain.distributed.shares import Shares
from segtrain.errors import CheckpointError
from segtrain.training.exact_sum import ExactGradientSum, replica
from segtrain.training.rank_passes import RankPasses
from segtrain.training.share_rules import fingerprint, refuse_layers, watch

T = TypeVar("T")


class SharePasses(RankPasses):
    """Each share has a replica of the model, which shares its memory, and a thread."""

    promises_bits = True
    by_kernels = False  # all ranks have the same bits, and one of them might lack Triton

    def __init__(
        self, model: nn.Module, wrapped: nn.Module, train: TrainConfig, layout: Layout
    ) -> None:
        refuse_layers(model, "train.shares")
        device = next(model.parameters()).device
        self.sums = Shares.of_this_rank(layout.shares, device)
        self.at_once = self.sums.at_once
        # Before the parent's constructor, which makes the sum of gradients from these. They are set
        # to training here: `state.model.train()` does not reach them.
        replicas = [replica(wrapped).train() for _ in range(self.sums.slots(0))]
        self._replicas = replicas
        super().__init__(model, wrapped, train, layout)
        self.modules = replicas
        # After `of_this_rank`, which has set torch to one thread: others would round otherwise.
        self.arithmetic = fingerprint(device, train)

    def _sum_of_gradients(self, train: TrainConfig) -> ExactGradientSum:
        return ExactGradientSum(
            self._model,
            self._replicas,
            shares=self.sums.counts,
            microbatches=train.accumulate_steps,
        )

    @property
    def images(self) -> Sequence[Sequence[int]]:
        """For each rank, the images of each of its shares."""
        return self._layout.everywhere

    @staticmethod
    def why_no_graph(train: TrainConfig) -> str:
        """The host decides in each step whether it is computed again."""
        return "train.shares waits for the exponents of gradients"

    def first_step(self) -> AbstractContextManager[object]:
        """A layer could break the rules of shares."""
        return watch(self._model)

    def runs_inline(self, parts: int) -> bool:
        """One share alone, too, is computed by one thread of torch."""
        return False

    def run(self, work: Callable[[nn.Module, Any], T], parts: Sequence[Any]) -> list[T]:
        """Each by its replica."""
        # A share has its replica, and so its gradients, whichever thread is first.
        pairs = zip(self._replicas, parts, strict=True)
        return self.sums.run([lambda pair=pair: work(*pair) for pair in pairs])

    def saved_tensors(self, device: torch.device) -> AbstractContextManager[object]:
        """What is saved stays on the device: shares are for equal bits, not for memory."""
        return nullcontext()

    def cut(self, tensor: Tensor, microbatch: int) -> list[Tensor]:
        """This rank's images of a microbatch, a tensor for each of its shares."""
        return list(tensor.split(self._layout.sizes(microbatch, dist.rank())))

    batch = cut

    def fields(self) -> dict[str, Any]:
        """exponents: of the fixed-point gradients of the next step, by parameter.

        arithmetic: `share_rules.fingerprint` of rank 0.
        """
        return {"exponents": self.gradients.exponents, "arithmetic": self.arithmetic}

    def restore(self, saved: dict[str, Any] | None) -> None:
        """Sets the exponents; without any, the first step finds them.

        Raises:
            CheckpointError: they are of other weights.
        """
        if not saved:  # the run had no shares before
            return
        if saved["exponents"].keys() != self.gradients.exponents.keys():
            raise CheckpointError(
                "it has gradients of other weights: with train.shares, optim.layers cannot "
                "freeze others in the middle of a run; start a new one with train.init_from"
            )
        self.gradients.exponents = saved["exponents"]

    def findings(self, saved: dict[str, Any] | None) -> list[str]:
        """Of ranks, or a checkpoint, with another processor, device or version."""
        digits = dist.all_gather_object(self.arithmetic)
        others = [str(rank) for rank, other in enumerate(digits) if other != digits[0]]
        findings = []
        if others:
            findings.append(f"ranks {', '.join(others)} compute other bits than rank 0")
        if saved and saved.get("arithmetic") != digits[0]:
            findings.append("this machine computes other bits than the one that trained")
        why = "other processor, device, precision or version"
        return [f"{finding} ({why})" for finding in findings]
