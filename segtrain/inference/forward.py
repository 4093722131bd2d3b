"""A network as evaluation and prediction call it: from normalized images to logits.

On CUDA a shape that comes often is recorded as a CUDA graph. DeepLabV3+ on ResNet-18 takes an H200
0.7 ms for an image of 360x480 and 2.1 for eight, and its host 3.5 and 6.8 to launch them.
"""

from collections import Counter
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from segtrain.models.precision import autocast

# Recording waits for the device and collects garbage, about as long as so many passes.
EAGER_PASSES = 8
# Each keeps the memory of a pass. Of more pixels than an image of Cityscapes the device takes
# longer than its host.
_MOST_GRAPHS, _MOST_PIXELS = 8, 2**21


class Forward:
    """Forward passes of `model`, which is in evaluation mode and stays where it is in memory."""

    def __init__(self, model: nn.Module) -> None:
        self.model = model
        self._seen: Counter[Any] = Counter()
        self._graphs: dict[Any, _RecordedPass] = {}
        self._failed = False

    def logits(self, images: Tensor, dtype: torch.dtype | None) -> Tensor:
        """(N, K, H, W) of `images` (N, C, H, W) at their size, in float32, or float64 as the model.

        dtype: of mixed precision; None: the model's own.
        """
        out = self._run("logits", lambda x: self.model(x).out, images, dtype)
        return out if out.dtype == torch.float64 else out.float()

    def small_logits(self, images: Tensor, dtype: torch.dtype | None) -> Tensor:
        """(N, K, h, w) of a SegModel's head."""
        return self._run("small", lambda x: self.model.small_logits(x).out, images, dtype)

    def _run(
        self,
        what: str,
        function: Callable[[Tensor], Tensor],
        images: Tensor,
        dtype: torch.dtype | None,
    ) -> Tensor:
        def call(x: Tensor) -> Tensor:
            with autocast(dtype, x.device):
                return function(x)

        # Strides as well: kernels for another layout may compute other bits.
        shape = what, dtype, images.dtype, images.shape, images.stride()
        recorded = self._graphs.get(shape)
        if recorded is None and self._is_due(shape, images):
            # All graphs use the memory of one pool: passes are replayed one after another, and what
            # they give is cloned.
            pool = next((earlier.graph.pool() for earlier in self._graphs.values()), None)
            try:
                recorded = self._graphs[shape] = _RecordedPass(call, images, pool)
            except RuntimeError:  # out of memory, or an operation that waits: the plain way goes on
                self._failed = True
                # What was recorded goes too: its memory may be what is missing.
                self._graphs.clear()
        return call(images) if recorded is None else recorded.replay(images)

    def _is_due(self, shape: Any, images: Tensor) -> bool:
        """Whether this pass is to be recorded."""
        pixels = images.numel() // images.shape[1]
        if not _is_on_cuda(images) or self._failed or pixels > _MOST_PIXELS:
            return False
        self._seen[shape] += 1
        if self._seen[shape] <= EAGER_PASSES or len(self._graphs) >= _MOST_GRAPHS:
            return False
        # A replay calls nobody.
        return not any(m._forward_hooks or m._forward_pre_hooks for m in self.model.modules())


def _is_on_cuda(images: Tensor) -> bool:
    return images.is_cuda


class _RecordedPass:
    """One graph, with the tensors that it reads and writes."""

    def __init__(self, call: Callable[[Tensor], Tensor], images: Tensor, pool: Any) -> None:
        self._images = images.clone()
        self.graph = torch.cuda.CUDAGraph()
        # Other threads (pinning, reading back) go on calling CUDA meanwhile.
        with torch.cuda.graph(self.graph, pool=pool, capture_error_mode="thread_local"):
            self._out = call(self._images)

    def replay(self, images: Tensor) -> Tensor:
        self._images.copy_(images)
        self.graph.replay()
        return self._out.clone()  # the next replay writes over it
