"""Options of what a run does beside training: evaluate, log, save."""

from collections.abc import Iterator
from typing import Literal

from segtrain.config.section import (
    FractionBelow1,
    Positive,
    Scale,
    Section,
    Size,
    option,
)


class EvalConfig(Section):
    """How an image is turned into a prediction, and when training does it."""

    every_steps: Positive | None = option(4000, "evaluate this often; null: at the end only")
    mode: Literal["whole", "slide"] = option(
        "whole", "the image at once, or windows of crop_size whose results are averaged"
    )
    crop_size: Size | None = option(
        None, "sliding window, also of predict on large images; null: the training crop"
    )
    overlap: FractionBelow1 = option(1 / 3, "share of a window that its neighbour repeats")
    scales: tuple[Scale, ...] = option((1.0,), "image scales to average", min_length=1)
    flip: bool = option(False, "average with the mirrored image")
    precision: Literal["float32", "tf32", "bfloat16", "float16"] | None = option(
        None,
        "of the evaluation, as train.precision; null: that of the training; half precision is "
        "faster on a GPU, and scores change a little",
    )
    batch_size: Positive | None = option(
        None,
        "images of equal size, or sliding windows, that go through the network together; null: "
        "up to 8, in a quarter of the GPU's memory; on a CPU 1 image, up to 4 windows",
    )


class LogConfig(Section):
    """What is written while training."""

    every_steps: Positive = option(20, "scalars this often")
    num_images: Positive = option(4, "pictures of image, label and prediction at an evaluation")
    weights_digest_every_steps: Positive = option(
        100, "with train.shares: receipts.jsonl has hashes of all weights this often"
    )


class CheckpointConfig(Section):
    """When the training state is saved. last.pt and best.pt are always kept."""

    every_steps: Positive = option(1000, "write last.pt this often")
    keep_every_steps: Positive | None = option(
        None, "also keep a checkpoint of its own this often; null: none"
    )
    keep_limit: Positive = option(5, "how many of those to keep")

    def _mistakes(self) -> Iterator[str]:
        keeps = self.keep_every_steps is not None
        yield from self._no_effect(("keep_limit", keeps, "keep_every_steps null"))
