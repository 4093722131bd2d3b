"""The comparison that an exported file must pass before it gets its name."""

from typing import NamedTuple

import torch
from torch import Tensor

from segtrain.errors import CheckpointError
from segtrain.export.formats import Run
from segtrain.export.graph import Case, ExportModel

# Largest difference allowed, as a share of the largest logit. Runtimes add in another order, which
# made 2e-6 to 2e-5 with random weights (all architectures, onnxruntime); pooling windows of another
# size make 1e-1, half precision 4e-3.
TOLERANCE = 1e-3

# Height and width are unequal, and neither is a multiple of a pooling grid's bins.
TRACED = Case(2, 104, 168)
# Not traced, so a size that became a constant shows: wider and taller, odd, another batch.
UNSEEN = (Case(1, 131, 222), Case(2, 225, 128))


class Comparison(NamedTuple):
    """How far the file is from the model on one batch.

    difference: the largest one, relative to the largest logit. For label maps: how far the logit of
        the file's class lies below the best one, at most.
    """

    case: Case
    difference: float
    agreement: float  # fraction of pixels with the same class
    problem: str | None = None  # why the two could not be compared

    @property
    def passed(self) -> bool:
        """Whether the file may be used; a NaN fails."""
        return self.problem is None and self.difference <= TOLERANCE


def cases(fixed_size: tuple[int, int] | None, min_side_px: int = 1) -> tuple[Case, ...]:
    """The batches to compare, with the smallest size if it is above 1; the first is traced."""
    if fixed_size is not None:
        return (Case(2, *fixed_size), Case(1, *fixed_size))
    least = (Case(1, min_side_px, min_side_px),) if min_side_px > 1 else ()
    return (TRACED, *UNSEEN, *least)


@torch.no_grad()
def compare(run: Run, graph: ExportModel, case: Case) -> Comparison:
    """Compares `run`, the file read back, with `graph` on one batch.

    Raises:
        CheckpointError: the model itself gives NaN or infinity.
    """
    images = graph.example(case)
    logits = graph.logits(images)  # (N, K, H, W)
    if not logits.isfinite().all():
        raise CheckpointError(
            f"the model's logits are not finite (image {case.height}x{case.width}); export an "
            "earlier checkpoint"
        )
    expected = graph(images)
    try:
        found = run(images)
    except Exception as error:  # any runtime, any reason: the file does not work at this size
        return Comparison(case, float("nan"), 0.0, f"it does not run: {_reason(error)}")
    if (found.shape, found.dtype) != (expected.shape, expected.dtype):
        what = f"{tuple(found.shape)} {found.dtype}, not {tuple(expected.shape)} {expected.dtype}"
        return Comparison(case, float("nan"), 0.0, f"its result is {what}")
    scale = logits.abs().max().clamp_min(torch.finfo(logits.dtype).tiny)
    if graph.argmax:
        worst = _lost_logit(logits, found)  # rounding may swap classes of almost equal logits
        agreement = (found == expected).float().mean()
    else:
        worst = (found - logits).abs().max()
        agreement = (found.argmax(1) == logits.argmax(1)).float().mean()
    return Comparison(case, (worst / scale).item(), agreement.item())


def _lost_logit(logits: Tensor, labels: Tensor) -> Tensor:
    """How far the logit of a pixel's label lies below its best, at most; inf for a label >= K."""
    if int(labels.max()) >= logits.shape[1]:
        return logits.new_tensor(float("inf"))
    chosen = logits.gather(1, labels.long().unsqueeze(1)).squeeze(1)  # (N, H, W)
    return (logits.amax(1) - chosen).max()


def _reason(error: Exception) -> str:
    # The last line: before it TorchScript shows the graph it ran.
    *_, last = ["no message", *str(error).strip().splitlines()]
    return f"{type(error).__name__}: {last.strip()}"[:300]
