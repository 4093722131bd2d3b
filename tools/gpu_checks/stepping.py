"""Training steps in this process, on one random batch over and over."""

import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from itertools import repeat
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn

from segtrain.config import Config
from segtrain.data.sample.loader import indices_of_rank
from segtrain.distributed import collectives as dist
from segtrain.distributed.process_group import process_group
from segtrain.models import build_model
from segtrain.models.precision import float32_products
from segtrain.norm import make_norm
from segtrain.training.engine import StepResult, train_steps
from segtrain.training.state import make_state
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch

NUM_CLASSES = 19
_BLOCK = 16  # pixels of one label side by side, which a network can learn


def config_of(size: tuple[int, int], images: int, *, model: dict[str, Any], **train: Any) -> Config:
    """An experiment without data, of as many steps as anybody takes."""
    # A low rate, or random images may make the weights infinite.
    options = {"steps": 10**6, "batch_size": images, "lr": 1e-3} | train
    data = {"layout": "folders", "root": "unused", "classes": "unused"}
    return Config(data=data, model=model, train=options, augment={"crop_size": size})


def random_batch(size: tuple[int, int], images: int, device: torch.device, seed: int = 0) -> Batch:
    """Blocks of classes, whose images are brighter for higher classes; pinned for CUDA."""
    generator = torch.Generator().manual_seed(seed)
    blocks = [-(-side // _BLOCK) for side in size]
    coarse = torch.randint(NUM_CLASSES, (images, 1, *blocks), generator=generator)
    labels = F.interpolate(coarse.float(), scale_factor=_BLOCK)[:, 0, : size[0], : size[1]].long()
    noise = torch.randint(12, (images, *size, 3), generator=generator)
    pixels = (labels.unsqueeze(-1) * 12 + noise).byte().permute(0, 3, 1, 2)  # channels-last
    tensors = [pixels, labels.byte().contiguous()]
    if device.type == "cuda":
        # From other memory the host waits for the copy, which no loader of segtrain makes it do.
        tensors = [tensor.pin_memory() for tensor in tensors]
    return Batch(*tensors, [str(i) for i in range(images)])


class Training:
    """A training, a step at each call.

    norm: makes the norm layers; None: those of the config.
    synchronized: the layers take the way of several ranks (see `as_among_two`).
    """

    def __init__(
        self,
        config: Config,
        device: torch.device,
        norm: Callable[[int], nn.Module] | None = None,
        *,
        synchronized: bool = False,
    ) -> None:
        torch.manual_seed(0)
        model = build_model(
            config.model, num_classes=NUM_CLASSES, norm=norm or make_norm(config.norm)
        )
        self.state = make_state(model, config, device)
        self._train, self._synchronized = config.train, synchronized
        size, images = config.augment.crop_size, config.train.batch_size
        passes = config.train.accumulate_steps
        indices = indices_of_rank(images, passes, dist.rank(), dist.world_size())
        whole = random_batch(size, images, device)
        mine = slice(indices[0].start, indices[0].stop)
        batch = Batch(*(tensor[mine] for tensor in whole[:2]), whole.names[mine])
        self._steps = train_steps(
            self.state,
            repeat(batch),
            config,
            device=device,
            indices=indices,
            step_sync=StepSync(lambda: False, overflow_allowed=config.train.precision == "float16"),
        )

    def __call__(self) -> StepResult:
        """One step."""
        among = as_among_two() if self._synchronized else nullcontext()
        with among, float32_products(self._train):
            return next(self._steps)


@contextmanager
def as_among_two() -> Iterator[None]:
    """Inside, this rank takes the way of several ranks, though every sum is over it alone."""
    before = dist._num_processes
    dist._num_processes = lambda group=None: 2
    try:
        yield
    finally:
        dist._num_processes = before


@contextmanager
def one_rank(device: torch.device) -> Iterator[None]:
    """A process group of this process alone: NCCL on CUDA, otherwise gloo."""
    before = dict(os.environ)
    os.environ.update(group_variables(0, 1, free_port()))
    try:
        with process_group(device, timeout_s=120):
            yield
    finally:
        # Commands that are started later are no ranks of this group.
        os.environ.clear()
        os.environ.update(before)


def group_variables(rank: int, size: int, port: int) -> dict[str, str]:
    """What ranks of this machine need in their environment to meet."""
    return {
        "RANK": str(rank),
        "WORLD_SIZE": str(size),
        "LOCAL_RANK": str(rank),
        "LOCAL_WORLD_SIZE": str(size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        # The machine may have no other network.
        "NCCL_SOCKET_IFNAME": "lo",
        "GLOO_SOCKET_IFNAME": "lo",
    }


def free_port() -> int:
    """A port of the loopback that nobody uses."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


def greatest_difference(one: list[float] | Tensor, other: list[float] | Tensor) -> float:
    """The largest |a - b| / |b| of the pairs; infinite with NaN."""
    a, b = (torch.as_tensor(values, dtype=torch.float64).cpu() for values in (one, other))
    largest = ((a - b).abs() / b.abs().clamp(min=torch.finfo(torch.float64).tiny)).max().item()
    return largest if largest == largest else float("inf")
