"""The temperature by which `export` best divides logits (arXiv:1706.04599, section 4.2)."""

import shlex
from collections.abc import Iterable
from typing import Any

import numpy as np
import torch
from numpy.polynomial import Polynomial
from torch import Tensor

from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.inference.settings import InferenceSettings
from segtrain.types import IGNORE_INDEX

# log2 of 0.25 to 8: a quartic through five of these points finds T to 0.1 %.
_TRIED = np.linspace(-2, 3, 21)
# Smaller probabilities count as this, as float32 has no smaller ones with all digits. Of other
# classes than the label's that moves the NLL by at most 2e-5 each, at T = 8.
_FLOOR = torch.finfo(torch.float32).tiny


class Temperature:
    """Seeks the T of the least mean negative log-likelihood (NLL); `add` watches an evaluation.

    Softmax ignores a shift, so the logarithm of the softmax of a single view does as its logits.
    settings: of the evaluation; ConfigError: no file has its scores. own: of the run, as export.
    """

    def __init__(
        self, settings: InferenceSettings, own: InferenceSettings, num_images: int, device: Any
    ) -> None:
        single = "--set eval.mode=whole --set eval.flip=false --set eval.scales='[1.0]'"
        is_other = settings.short_side_px != own.short_side_px
        problems = {  # of a sigmoid that rounds to 1 nobody knows how large its logit was
            "is for one class a pixel (task semantic)": not settings.decoding.takes_highest,
            f"export writes no mean of views; add {single}": not settings.gives_logits,
            "export goes by the run's data.short_side_px; set eval.scales instead": is_other,
        }
        for problem, is_so in problems.items():
            if is_so:
                raise ConfigError(f"--temperature: {problem}")
        is_resized = settings.short_side_px or settings.scales != (1,)
        self._view = f" --scale {settings.scales[0]:g}" if is_resized else ""
        # Of each image: NLL at each T, pixels, and those at the floor. Added up at the end in the
        # order of the data set, so any number of ranks gives the same bits.
        size = num_images, len(_TRIED) + 2
        self._sums = torch.zeros(size, dtype=torch.float64, device=device)

    def add(self, index: int, probability: Tensor, label: Tensor) -> None:
        """Counts an image: probability (K, h, w), label (h, w); the host does not wait."""
        rows = max(1, 2**20 // probability[:, 0].numel())  # which stay in a cache
        for p, own in zip(probability.split(rows, 1), label.split(rows), strict=True):
            valid = own != IGNORE_INDEX
            index_of_label = own.long().masked_fill(~valid, 0)[None]
            log_p = p.clamp_min(_FLOOR).log_()
            log_p -= log_p.amax(0)  # then no exp overflows
            right, low = (x.gather(0, index_of_label)[0] for x in (log_p, p <= _FLOOR))
            nll = [(log_p / t).exp_().sum(0).log_() - right / t for t in (2.0**_TRIED).tolist()]
            # `where`, not a product: an ignored pixel may be NaN.
            found = [torch.where(valid, x, 0) for x in (*nll, valid, low)]
            self._sums[index] += torch.stack([x.sum(dtype=torch.float64) for x in found])

    def sum_over_ranks(self) -> None:
        """Gives every rank the images of all ranks (collective; call it once)."""
        dist.all_reduce_sum(self._sums)
        dist.wait_for_device(self._sums.device)

    def answer(
        self, sources: Iterable[Any], *, trained: bool, by_windows: int
    ) -> tuple[list[str], dict[str, Any]]:
        """Lines and JSON. sources: of the model. trained: on these images; `by_windows` went so."""
        *sums, pixels, low = self._sums.cpu().numpy().sum(0)
        if not (pixels and np.isfinite(sums).all()):
            why = "the scores are not finite numbers" if pixels else "no pixel is labelled"
            return [f"temperature: none, {why}"], {"temperature": None}
        nll = np.array(sums) / pixels
        i, last = int(nll.argmin()), len(_TRIED) - 1
        five = slice(first := min(max(i - 2, 0), last - 4), first + 5)
        near = np.linspace(_TRIED[max(i - 1, 0)], _TRIED[min(i + 1, last)], 4001)
        found = Polynomial.fit(_TRIED[five], nll[five], 4)(near)
        t, least, before = 2.0 ** near[found.argmin()], found.min(), nll[_TRIED == 0][0]
        at_end = bool(t in (0.25, 8))
        warnings = {
            "the best is beyond 0.25 to 8, which are tried": at_end,
            f"{low:.0f} labels have a probability below {_FLOOR:.0e}, and count as that": low,
            f"{by_windows} images went by windows, of which export writes none": by_windows,
            "fitted on images of the training, on which a model is right too often": trained,
        }
        lines = [f"temperature {t:.3g}: NLL {before:.4g} -> {least:.4g}"]
        lines += [f"warning: temperature: {what}" for what, is_so in warnings.items() if is_so]
        run = " --with ".join(shlex.quote(str(source)) for source in sources)
        options = f"--format onnx --output FILE.onnx{self._view} --temperature {t:.3g}"
        lines += [] if at_end else [f"segtrain export {run} {options}"]
        json = {"temperature": t, "nll_before": before, "nll_after": least, "at_end": at_end}
        return lines, {**json, "pixels": int(pixels), "pixels_at_floor": int(low)}
