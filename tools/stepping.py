"""Training steps in this process, on one random batch over and over."""

from collections.abc import Iterable, Iterator
from itertools import islice, repeat
from typing import Any

import torch
import torch.nn.functional as F

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.models import build_model
from segtrain.models.norms import make_norm
from segtrain.norm import NormFactory
from segtrain.training.graph import GraphStep
from segtrain.training.state import TrainState, make_state
from segtrain.training.step import StepResult, TrainStep
from segtrain.training.step_sync import StepSync
from segtrain.types import IGNORE_INDEX, Batch

NUM_CLASSES = 19
_BLOCK = 16  # pixels of one label side by side


def config_of(
    size: tuple[int, int], images: int, *, model: dict[str, Any], lr: float = 1e-3, **train: Any
) -> Config:
    """An experiment without data, of more steps than anyone takes; `images` of all ranks.

    lr: a low rate, or random images may make the weights infinite.
    """
    options = {"steps": 10**6, "batch_size": images} | train
    data = {"layout": "folders", "root": "unused", "classes": "unused"}
    return Config(
        data=data, model=model, train=options, optim={"lr": lr}, augment={"crop_size": size}
    )


def random_batch(
    size: tuple[int, int], images: int, device: torch.device, num_classes: int = NUM_CLASSES
) -> Batch:
    """On the host, pinned for CUDA: blocks of classes, of which a tenth is ignored.

    Images are brighter where classes are higher, which a network can learn.
    """
    generator = torch.Generator().manual_seed(0)
    blocks = [-(-side // _BLOCK) for side in size]
    coarse = torch.randint(num_classes, (images, 1, *blocks), generator=generator)
    labels = F.interpolate(coarse.float(), scale_factor=_BLOCK)[:, 0, : size[0], : size[1]]
    noise = torch.randint(12, (images, *size, 3), generator=generator)
    pixels = labels.unsqueeze(-1) * (240 / num_classes) + noise
    labels[:, : size[0] // 10] = IGNORE_INDEX
    tensors = [pixels.byte().permute(0, 3, 1, 2), labels.byte().contiguous()]  # channels-last
    if device.type == "cuda":
        # From other memory the host waits for the copy, which no loader of segtrain makes it do.
        tensors = [tensor.pin_memory() for tensor in tensors]
    return Batch(*tensors, [str(i) for i in range(images)])


def state_of(
    config: Config,
    device: torch.device,
    norm: NormFactory | None = None,
    num_classes: int = NUM_CLASSES,
) -> TrainState:
    """A fresh training, the same in every call; `norm`: None is that of the config."""
    torch.manual_seed(0)
    norm = norm or make_norm(config.norm)
    return make_state(build_model(config.model, num_classes=num_classes, norm=norm), config, device)


def train_steps(
    state: TrainState,
    batches: Iterable[Batch],
    config: Config,
    *,
    device: torch.device,
    step_sync: StepSync,
    replayed: bool = False,
) -> Iterator[StepResult]:
    """The steps of a training until its end; `batches`: of each microbatch, in order."""
    step, batches = TrainStep(state, config, device, step_sync), iter(batches)
    step = GraphStep(step, state) if replayed else step
    while state.step < config.train.steps and not step_sync.is_over:
        local = step.local(list(islice(batches, config.train.accumulate_steps)))
        yield step.done(local, step(local))


def steps_of(
    state: TrainState,
    config: Config,
    device: torch.device,
    num_classes: int = NUM_CLASSES,
    *,
    replayed: bool = False,
) -> Iterator[StepResult]:
    """Endless training steps of this rank's part of a random batch, the same for all passes."""
    train = config.train
    indices = state.layout.positions(dist.rank())
    whole = random_batch(config.augment.crop_size, train.batch_size, device, num_classes)
    mine = slice(indices[0].start, indices[0].stop)
    batch = Batch(*(tensor[mine] for tensor in whole[:2]), whole.names[mine])
    step_sync = StepSync(lambda: False, overflow_allowed=train.precision == "float16")
    about = {"device": device, "step_sync": step_sync, "replayed": replayed}
    return train_steps(state, repeat(batch), config, **about)
