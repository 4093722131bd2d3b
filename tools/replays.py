"""Small trainings with every option, and a CPU that records and replays as a CUDA graph does.

The stand-in knows what a graph knows: operations, the memory of their tensors, and Python numbers
as they were. So whatever a step does besides, or with other numbers, is missing in the replay.
"""

import weakref
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor, nn
from torch._C._distributed_c10d import Work
from torch.utils._python_dispatch import TorchDispatchMode
from torch.utils._pytree import tree_leaves

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed.layout import Layout, even
from segtrain.distributed.shared_sum import SharedSum
from segtrain.models import SegModel
from segtrain.models.blocks import AuxHead, FeatureChannels, Features, conv2d
from segtrain.models.norms import make_norm
from segtrain.models.precision import float32_products
from segtrain.models.pspnet import PSPHead
from segtrain.norm import NormFactory, norm_relu_conv
from segtrain.training import state as state_module
from segtrain.training.graph import EAGER_STEPS, GraphStep, kept_tensors
from segtrain.training.state import TrainState, make_state
from segtrain.training.step import TrainStep
from segtrain.training.step_sync import StepSync
from segtrain.types import Batch

CPU = torch.device("cpu")
SIZE, N, STEPS = (17, 21), 4, EAGER_STEPS + 4
# Each changes what a step computes.
OPTIONS: dict[str, dict[str, dict[str, Any]]] = {
    "adamw": {"optim": {"kind": "adamw"}},
    "muon": {"optim": {"kind": "muon"}},
    "average": {"optim": {"ema_decay": 0.999}},
    "clipping": {"optim": {"clip_grad_norm": 1.0}},
    "decay toward the start": {
        "optim": {"decay_toward": "start"},
        "train": {"init_from": "weights"},
    },
    "rates of layers": {"optim": {"layers": ({"names": ("head",), "lr_mult": 0.5},)}},
    "zeros": {"optim": {"layers": ({"zero": ("backbone.conv1.weight[:, 1]",)},)}},
    "warmup": {"schedule": {"warmup_steps": 7}},
    "microbatches": {"train": {"accumulate_steps": 2}},
    "bfloat16": {"train": {"precision": "bfloat16"}},
    "float16": {"train": {"precision": "float16"}},
    "float64": {"train": {"precision": "float64"}},
    "mining": {"loss": {"kind": "ohem", "ohem_min_kept": 100}},
    "lovasz": {"loss": {"kind": "lovasz"}},
    "focal": {"loss": {"kind": "focal"}},
    "two losses": {"loss": {"also": ({"kind": "dice", "weight": 3.0},)}},
    "groups of images": {"norm": {"images": 2}},
    "recomputed": {"model": {"recompute": "blocks"}},
}
# Sets of options, which meet each of these at least once.
SETS = [
    *((), ("adamw",), ("muon",), ("average", "clipping"), ("microbatches", "warmup"), ("mining",)),
    *(("float16", "adamw"), ("bfloat16",), ("groups of images",), ("recomputed",)),
    *(("decay toward the start", "rates of layers"), ("zeros",)),
    *(("lovasz", "two losses"), ("average", "muon"), ("float64", "focal")),
]


def config_of(names: Iterable[str], **train: Any) -> Config:
    """A small experiment with these `OPTIONS`; `train`: further ones of that section."""
    sections: dict[str, dict[str, Any]] = {
        "data": {"layout": "folders", "root": "none", "classes": "camvid"},
        "augment": {"crop_size": SIZE},
        "model": {"head_channels": 8, "aux_channels": 8},
        "train": {"batch_size": N, "steps": 8},
    }
    for name in names:
        for section, values in OPTIONS[name].items():
            sections[section] = sections.get(section, {}) | values
    sections["train"] |= train
    return Config.model_validate(sections)


def batches(config: Config, step: int, positions: Sequence[range] | None = None) -> Iterator[Batch]:
    """The microbatches of a step; `positions`: of this rank's images in each, None: all."""
    train = config.train
    if positions is None:
        positions = Layout.of(train, even(1)).positions(0)
    generator = torch.Generator().manual_seed(step)
    shape = (train.batch_size, 3, *SIZE)
    images = torch.randint(256, shape, generator=generator, dtype=torch.uint8)
    labels = (images.sum(1) % 4).to(torch.uint8)
    for mine in map(torch.tensor, map(list, positions)):
        mine = mine.long()  # none may be there
        yield Batch(images[mine], labels[mine], ["a"] * len(mine))


class Stub(nn.Module):
    """A backbone of four layers, in which what ResNet has occurs once."""

    channels = FeatureChannels(8, 8, 8)

    def __init__(self, norm: NormFactory) -> None:
        super().__init__()
        self.conv1, self.bn1 = conv2d(3, 8, 3, stride=2), norm(8)
        self.conv2, self.bn2 = conv2d(8, 8, 3), norm(8)

    def forward(self, images: Tensor) -> Features:
        x = norm_relu_conv(self.conv1(images), self.bn1, self.conv2)
        aux = F.relu(x)
        return Features(aux, aux, F.relu(self.bn2(x)))


def small_model(config: Config) -> SegModel:
    """A model of few layers, in which what PSPNet has occurs once."""
    norm, model = make_norm(config.norm), config.model.model_copy(update={"ppm_bins": (2, 3)})
    options = {"num_classes": 4, "norm": norm}
    head = PSPHead(model, Stub.channels, **options)
    aux = AuxHead(model, Stub.channels, **options)
    return SegModel(Stub(norm), head, aux, dropout=model.dropout, align_corners=False)


class Recorded(TorchDispatchMode):
    """What was called, with which tensors; `replay` does it again in the same memory.

    While it records, ranks send as in any step, since a CPU's layers read how many values they
    have; a device sends nothing then.
    """

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[Any, ...]] = []

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def pool(self) -> None:
        """The memory of a graph, in which others may be made too."""

    def reset(self) -> None:
        """Destroys it."""
        self.calls.clear()

    @torch.no_grad()
    def replay(self) -> None:
        """Calls all of it again."""
        for function, args, kwargs, out in self.calls:
            again = function(*args, **kwargs)
            if function.namespace == "c10d":
                Work.unbox(again[1]).wait()
                continue
            for kept, found in zip(tensors(out), tensors(again), strict=True):
                if kept.data_ptr() != found.data_ptr():  # neither a view nor in place
                    kept.copy_(found)


class Graphs:
    """In place of torch.cuda.graph; recording changes nothing, as on a device. Counts them.

    full: there is no memory for any. alive: those that somebody still has.
    """

    def __init__(self, *, full: bool = False) -> None:
        self.state: TrainState | None = None
        self.alive: weakref.WeakSet[Recorded] = weakref.WeakSet()
        self._full, self._count = full, 0

    def __len__(self) -> int:
        return self._count

    def watch(self, state: TrainState) -> None:
        """Of the training that may be recorded next."""
        self.state = state

    @contextmanager
    def graph(self, recorded: Recorded, **_: Any) -> Iterator[None]:
        """Around what is recorded."""
        state = self.state
        # What torch's AdamW asks on a device, and nowhere else.
        groups = [] if state is None else state.optimizer.param_groups
        assert all(group.get("capturable", True) for group in groups)
        before = [] if state is None else [tensor.clone() for tensor in changes(state)]
        try:
            with recorded:
                yield
            if self._full:
                raise torch.OutOfMemoryError("no memory is left, says the test")
        finally:
            now = [] if state is None else changes(state)
            with torch.no_grad():
                for tensor, value in zip(now, before, strict=True):
                    tensor.copy_(value)
        self._count += 1
        self.alive.add(recorded)


def install(*, full: bool = False, kind: type[Recorded] = Recorded) -> Graphs:
    """Lets this process record and replay on its CPU from now on; full: it never has memory.

    kind: of what is recorded.
    """
    made, begin = Graphs(full=full), GraphStep.__init__

    def watched(self: GraphStep, step: TrainStep, state: TrainState, *rest: Any, **more: Any):
        made.watch(state)
        begin(self, step, state, *rest, **more)

    GraphStep.__init__ = watched
    state_module.may_be_captured = lambda *_: True
    torch.cuda.CUDAGraph, torch.cuda.graph = kind, made.graph
    SharedSum.takes = lambda self, tensor: False  # it is no operation of torch
    return made


def tensors(values: Any) -> list[Tensor]:
    """All tensors in nested containers."""
    return [x for x in tree_leaves(values) if isinstance(x, Tensor)]


def changes(state: TrainState) -> list[Tensor]:
    """All that a step changes."""
    scale = [state.scaler._scale, state.scaler._growth_tracker] if state.scaler.is_enabled() else []
    return [*kept_tensors(state), *scale]


def trained(
    config: Config,
    device: torch.device = CPU,
    *,
    replayed: bool = False,
    watch: Callable[[TrainState], object] = lambda state: None,
    between: Callable[[int, TrainState], object] | None = None,
    around: Callable[[], AbstractContextManager[object]] = nullcontext,
) -> tuple[list[tuple[float, ...]], list[Tensor]]:
    """Losses and norms of all steps, and what they leave (collective).

    watch: is called with the state once. between: with each step's number and the state after it.
    around: each step.
    """
    torch.manual_seed(0)
    state = make_state(small_model(config), config, device, capturable=True)
    watch(state)
    sync = StepSync(lambda: False, overflow_allowed=config.train.precision == "float16")
    step = TrainStep(state, config, device, sync)
    step, results = GraphStep(step, state) if replayed else step, []
    for number in range(STEPS):
        mine = state.layout.positions(dist.rank())
        local = step.local(list(batches(config, number, mine)))
        with float32_products(config.train), around():
            left = step(local)
        results.append(step.done(local, left))
        if between is not None:
            between(number, state)
    sync.check_finite()
    numbers = [(r.step, r.loss.item(), r.aux_loss.item(), r.grad_norm.item()) for r in results]
    return numbers, changes(state)
