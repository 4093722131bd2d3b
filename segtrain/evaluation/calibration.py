"""Batch norm statistics taken anew from images of the split to score, without their labels.

If images look otherwise than those of the training (another camera, fog, noise), the statistics of
the training no longer fit them. Prediction-time batch norm (Nado et al., arXiv:2006.10963) takes
those of the images themselves; covariate shift adaptation (Schneider et al., arXiv:2006.16971,
equation 1) mixes both, and counts the training's like N images:

    mean = (N * mean of the training + n * mean of the n images) / (N + n), likewise the variance

Both papers take the statistics of each batch that is predicted, so predictions depend on which
images come together. Here they are taken once, from images spread over the split, and all images
are scored with them.

The network sees batches of up to 8 images, at scale 1 as they are scored: whole, or up to 4 windows
of each. Inside a batch, a layer normalizes by what it sees, as in training. The moments of all
batches are pooled exactly. Batches do not depend on the number of ranks, nor does the result.
"""

from collections.abc import Iterator
from contextlib import closing
from functools import partial

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from segtrain.data.read.concurrent import prefetch
from segtrain.data.read.dataset import SegDataset
from segtrain.distributed import collectives as dist
from segtrain.distributed.partition import partition
from segtrain.distributed.virtual_ranks import VirtualRanks
from segtrain.evaluation.inference import normalized_view
from segtrain.evaluation.settings import InferenceSettings, view_size
from segtrain.evaluation.windows import spread_windows
from segtrain.models.precision import autocast
from segtrain.norm import convert, precise_statistics

_BATCH_SIZE = 8


def chosen_images(num_images: int, wanted: int) -> list[int]:
    """`wanted` of the images, or all if there are fewer, spread evenly over the data set."""
    return np.linspace(0, num_images - 1, min(wanted, num_images)).round().astype(int).tolist()


@torch.no_grad()
def take_statistics(
    model: nn.Module,
    dataset: SegDataset,
    settings: InferenceSettings,
    *,
    num_images: int,
    prior: int = 0,
    num_threads: int = 2,
) -> int:
    """Sets the running statistics of `model` to those of images of `dataset` (collective).

    Layers that these images do not reach, such as those of an auxiliary head, keep theirs.

    Args:
        model: with torch's own batch norm, as `load_model` returns it; on its device.
        num_images: at least 2, from `chosen_images`.
        prior: N of the formula above.
        num_threads: threads that decode images.

    Returns:
        the number of images.
    """
    device = next(model.parameters()).device
    chosen = chosen_images(len(dataset), num_images)
    num_batches = -(-len(chosen) // _BATCH_SIZE)
    mine = [
        partition(len(chosen), num_batches, i)
        for i in range(dist.rank(), num_batches, dist.world_size())
    ]

    def batches() -> Iterator[list[Tensor]]:
        indices = [chosen[i] for batch in mine for i in batch]
        with closing(prefetch(dataset.image, indices, num_threads)) as images:
            for batch in mine:
                yield [_inputs(model, next(images), settings, device) for _ in batch]

    def forward(images: list[Tensor]) -> None:
        # They may differ in size, so they do not fit into one tensor.
        work = partial(_forward, model, settings)
        VirtualRanks(len(images)).run([partial(work, image) for image in images])

    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    trained = [(m.running_mean.clone(), m.running_var.clone()) for m in layers]
    # A batch is computed by one rank.
    convert(model, "sync", process_group=(dist.rank(),))
    try:
        precise_statistics(model, batches(), forward)
    finally:
        convert(model, "local")
    layers = [m for m in model.modules() if isinstance(m, _BatchNorm)]
    for layer, (mean, var) in zip(layers, trained, strict=True):
        for running, before in ((layer.running_mean, mean), (layer.running_var, var)):
            running.lerp_(before, prior / (prior + len(chosen)))
    return len(chosen)


def _inputs(
    model: nn.Module, image: np.ndarray, settings: InferenceSettings, device: torch.device
) -> Tensor:
    """What the network sees of an image (H, W, 3) at scale 1, (n, 3, h, w)."""
    pixels = torch.from_numpy(image).permute(2, 0, 1).unsqueeze(0).to(device)
    size = view_size(pixels.shape[-2:], settings.short_side_px, 1.0)
    view = normalized_view(model, pixels, size, settings)
    return view if settings.mode == "whole" else spread_windows(view, settings)


def _forward(model: nn.Module, settings: InferenceSettings, images: Tensor) -> None:
    if images.device.type == "cuda":
        torch.cuda.set_device(images.device)  # a new thread begins with device 0
    # Each thread has a mode of its own.
    with torch.no_grad(), autocast(settings.autocast, images.device):
        model(images)
