"""The loss of each training image and class, kept while a run trains: what `suspects` reads.

A mask that contradicts the others keeps a high loss where the loss of right ones falls (the
small-loss criterion, arXiv:1804.06872; measured over the whole training as by AUM,
arXiv:2001.10528). So every pixel of every crop counts here once, as it was trained on:

- with its plain cross entropy under the main head, whatever the loss of the run is;
- for its image and the class of its label. Crops made of two images (MixUp, class mix) show a scene
  that no mask is of, and are left out; other augmentation is not.
- in the forward pass of the step, not in one that is repeated, or the second one of SAM.

Losses are added up as integers. Such sums have the same bits in any order, so they do not depend on
ranks, shares or virtual ranks as long as the logits do not, nor on an interruption.
"""

import hashlib
import threading
from collections.abc import Iterable
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.files.torch_file import is_plain
from segtrain.models.blocks import at_least_float32
from segtrain.models.enlarged import Enlarged
from segtrain.types import IGNORE_INDEX

# A unit of the sums is 2**-16, and a loss beyond 64, of a probability of 1e-28, counts as 64: so
# 2**41 pixels fit into 63 bits.
UNITS, _MOST_LOSS = 1 << 16, 64.0
# What a checkpoint grows by, at most.
_MOST_BYTES = 50_000_000
_MOST_PHASES = 8
LOSS, PIXELS = range(2)
# Rows at a time, which stay in a processor's cache: with 150 classes a third of the time.
_CACHED_ROWS = 8


def names_digest(names: Iterable[str]) -> str:
    """Tells whether two splits have the same images in the same order."""
    return hashlib.sha256("\0".join(names).encode(errors="surrogateescape")).hexdigest()


def why_unmeasured(config: Config, num_images: int) -> str:
    """Why a run of this config cannot keep the losses of so many images; empty if it can."""
    if config.is_multilabel:
        return "a pixel has several classes (task multilabel)"
    if config.train.compile:
        return "a compiled graph may never make the logits (train.compile)"
    if config.train.is_asynchronous:
        way = config.train.parallel
        return f"no step sees the same weights on all processes (train.parallel: {way})"
    if config.augment.mixup_alpha is not None or config.augment.class_mix_prob == 1:
        return "crops show two images (augment.mixup_alpha or class_mix_prob)"
    if 2 * 8 * num_images > _MOST_BYTES:
        return f"those of {num_images} images take more than {_MOST_BYTES // 1_000_000} MB"
    return ""


class SampleLosses:
    """Sums of the loss and pixels, by phase of the training, image and class, (P, N, K, 2) int64.

    Phases have equal length, that of the `steps` of now. There are as many as 50 MB hold, 8 at
    most; where they hold none, the classes are added up, and K is 1.

    names: of the images, N. steps: `train.steps`.
    """

    def __init__(
        self, names: Iterable[str], num_classes: int, *, steps: int, device: torch.device
    ) -> None:
        names = list(names)
        self._steps, self._digest = steps, names_digest(names)
        if 2 * 8 * len(names) * num_classes > _MOST_BYTES:
            num_classes = 1
        phases = min(_MOST_PHASES, _MOST_BYTES // (2 * 8 * len(names) * num_classes))
        size = phases, len(names), num_classes, 2
        self.recent = torch.zeros(size, dtype=torch.int64, device=device)  # here since `gather`
        self._gathered = torch.zeros(size, dtype=torch.int64)  # on all ranks before it
        self._lock = threading.Lock()  # shares and virtual ranks run in threads

    def phase(self, step: int) -> int:
        """That of a step, counted from 0."""
        phases = len(self.recent)
        return min(step * phases // self._steps, phases - 1)

    @torch.no_grad()
    def add(
        self, phase: int | Tensor, shown: Tensor, logits: Tensor | Enlarged, labels: Tensor
    ) -> None:
        """Adds the crops of a step; nothing waits for the device.

        phase: of the step; a tensor () is not read by the host.
        shown: (n,) int64, the image that each crop shows; -1: this crop is left out.
        logits: (n, K, H, W) of the main head; labels: (n, H, W) int64, or IGNORE_INDEX.
        """
        number, size = len(labels), IGNORE_INDEX + 1
        losses = _cross_entropy(logits, labels)
        units = losses.clamp_(max=_MOST_LOSS).mul_(UNITS).round_().long().flatten()
        crops = torch.arange(0, number * size, size, device=labels.device)
        keys = (labels + crops.view(-1, 1, 1)).flatten()
        table = units.new_zeros(2, number * size)
        table[LOSS].scatter_add_(0, keys, units)
        table[PIXELS].scatter_add_(0, keys, units.new_ones(()).expand_as(units))
        found = table.view(2, number, size)[..., : logits.shape[1]].permute(1, 2, 0)  # (n, K, 2)
        if self.recent.shape[2] == 1:
            found = found.sum(1, keepdim=True)
        found = found * (shown >= 0).view(-1, 1, 1)
        rows = phase * self.recent.shape[1] + shown.clamp(min=0)
        with self._lock:
            self.recent.flatten(0, 1).index_add_(0, rows, found)

    def gather(self) -> None:
        """Adds up what the ranks have measured, before they save (collective)."""
        total = dist.all_reduce_sum(self.recent)
        dist.wait_for_device(total.device)
        self._gathered += total.cpu()
        self.recent.zero_()

    def fields(self) -> dict[str, Any]:
        """What a checkpoint keeps: the sums at the last `gather`, and of which images they are."""
        return {"sums": self._gathered, "names": self._digest}

    def restore(self, saved: dict[str, Any]) -> bool:
        """Goes on from a checkpoint's `fields`; False: they are of other images, so it begins anew.

        Raises:
            ValueError: they are damaged.
        """
        sums = parse_sums(saved)
        if saved["names"] != self._digest or sums.shape != self._gathered.shape:
            return False
        self._gathered.copy_(sums)
        return True


def _cross_entropy(logits: Tensor | Enlarged, labels: Tensor) -> Tensor:
    """That of each pixel, (n, H, W), 0 where it is ignored."""
    if isinstance(logits, Enlarged):
        return logits.cross_entropy(labels)
    rows = _CACHED_ROWS if labels.device.type == "cpu" else labels.shape[1]
    parts = zip(logits.split(rows, 2), labels.split(rows, 1), strict=True)
    options = {"ignore_index": IGNORE_INDEX, "reduction": "none"}
    return torch.cat([F.cross_entropy(at_least_float32(x), y, **options) for x, y in parts], 1)


def parse_sums(saved: dict[str, Any]) -> Tensor:
    """The sums in a checkpoint's `fields`; ValueError if they cannot be such."""
    sums, names = saved.get("sums"), saved.get("names")
    if not is_plain(sums) or sums.dtype != torch.int64 or sums.ndim != 4 or sums.shape[3] != 2:
        raise ValueError("sample_losses: expected sums (P, N, K, 2) int64")
    if sums.numel() == 0:
        raise ValueError("sample_losses: the sums are empty")
    if not isinstance(names, str) or (sums < 0).any():
        raise ValueError("sample_losses: expected the digest of the names, and no sum below 0")
    return sums
