"""What this rank trains on in a step: its images of each microbatch, on the device."""

from collections.abc import Iterator, Sequence
from itertools import accumulate
from typing import NamedTuple

import torch
from torch import Tensor

from segtrain import seed
from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.training.optim.schedule import learning_rate
from segtrain.training.state import TrainState
from segtrain.types import Batch, DropoutMasks


class LocalMicrobatch(NamedTuple):
    """This rank's part of one microbatch."""

    images: Tensor  # (n, C, H, W) as stored
    labels: Tensor  # (n, H, W) uint8, or (n, H, W, K) with task multilabel
    dropout: DropoutMasks  # of these n images

    def split(self, sizes: Sequence[int]) -> list["LocalMicrobatch"]:
        """The images in contiguous parts of these sizes."""

        def cut(images: range) -> LocalMicrobatch:
            part = slice(images.start, images.stop)
            masks = (None if mask is None else mask[part] for mask in self.dropout)
            tensors = self.images[part], self.labels[part]
            return LocalMicrobatch(*tensors, DropoutMasks(*masks))

        ends = list(accumulate(sizes))
        return [cut(range(end - size, end)) for size, end in zip(sizes, ends, strict=True)]


class StepNumbers(NamedTuple):
    """What changes from step to step besides the images.

    Where updates are `capturable`, tensors () on the device: a CUDA graph would keep Python numbers
    as they were in the step that it has recorded.

    lr: the backbone's. toward: how far the average of the weights goes to the newest ones.
    requests: (2,), what this rank is asked for (`StepSync.requests`).
    """

    lr: float | Tensor
    toward: float | Tensor
    requests: Tensor

    @classmethod
    def on(
        cls,
        device: torch.device,
        numbers: Sequence[float] = (0.0, 0.0),
        requests: Sequence[float] = (0.0, 0.0),
        *,
        tensors: bool = False,
    ) -> "StepNumbers":
        """Those of a step; the host does not wait for `device`.

        numbers: lr and toward.
        """
        values = torch.tensor([*numbers, *requests], dtype=torch.float64)
        # Only a copy from pinned memory lets the host run on.
        if device.type == "cuda":
            values = values.pin_memory().to(device, non_blocking=True)
        # Requests are on the device in any case: they ride in a sum over the ranks.
        if not tensors:
            return cls(*numbers, values[len(numbers) :])
        return cls(*values[: len(numbers)].unbind(), values[len(numbers) :])


class LocalStep(NamedTuple):
    """What this rank computes in a step.

    lr: `numbers.lr`, for the log.
    batches: of which `microbatches` were made, on the host. data_s: seconds that the step waited
        for them.
    """

    microbatches: list[LocalMicrobatch]
    numbers: StepNumbers
    lr: float
    batches: Sequence[Batch]
    data_s: float = 0.0

    @property
    def shape(self) -> tuple[object, ...]:
        """What steps have in common that one recording serves: the shapes of their tensors."""
        return tuple(tuple(tensor.shape) for tensor in self.tensors())

    def tensors(self) -> Iterator[Tensor]:
        """All on the device: of the images, and the numbers if they are tensors."""
        for part in self.microbatches:
            given = part.images, part.labels, *part.dropout
            yield from (tensor for tensor in given if tensor is not None)
        yield from (number for number in self.numbers if isinstance(number, Tensor))

    @property
    def names(self) -> list[str]:
        """The images, for messages."""
        return [name for batch in self.batches for name in batch.names]

    @property
    def pixels(self) -> int | None:
        """The sum of `Batch.pixels`; None: not taken."""
        hashes = [batch.pixels for batch in self.batches]
        return None if None in hashes else sum(hashes)


def local_step(
    state: TrainState,
    batches: Sequence[Batch],
    config: Config,
    device: torch.device,
    *,
    requests: Sequence[float] = (0.0, 0.0),
    data_s: float = 0.0,
) -> LocalStep:
    """The next step of `state`, on `device`; `batches`: of each microbatch, of this rank."""
    lr = learning_rate(config, state.step)
    toward = 0.0 if state.average is None else state.average.toward(state.step + 1)
    return LocalStep(
        microbatches=local_microbatches(state, batches, config, device),
        numbers=StepNumbers.on(device, (lr, toward), requests, tensors=state.capturable),
        lr=lr,
        batches=batches,
        data_s=data_s,
    )


def local_microbatches(
    state: TrainState,
    batches: Sequence[Batch],
    config: Config,
    device: torch.device,
) -> list[LocalMicrobatch]:
    """This rank's parts of a step's microbatches on `device`, with their dropout masks."""
    parts = []
    for batch, where in zip(batches, state.layout.positions(dist.rank()), strict=True):
        images, labels = (t.to(device, non_blocking=True) for t in (batch.images, batch.labels))
        masks = _dropout_masks(state, config, where, device)
        parts.append(LocalMicrobatch(images, labels, masks))
    return parts


def _dropout_masks(
    state: TrainState, config: Config, indices: Sequence[int], device: torch.device
) -> DropoutMasks:
    """The masks of the images at `indices`, out of those drawn for the whole batch of this step."""
    masks: list[Tensor | None] = []
    shape = {"batch_size": config.train.batch_size, "p": config.model.dropout}
    for layer, channels in enumerate(state.model.dropout_channels):
        mask = None
        if channels is not None:
            # Of the whole batch, on every rank: an image has its mask whoever computes it.
            whole = seed.dropout_mask(config.seed, state.step, layer, channels=channels, **shape)
            mask = whole[list(indices)]
            if device.type == "cuda":
                mask = mask.pin_memory().to(device, non_blocking=True)
        masks.append(mask)
    return DropoutMasks(*masks)
