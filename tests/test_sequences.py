"""All ranks ask for the same collectives in the same order, with every option and pair of options.

If one did not, the others would wait for it forever. So each of three ranks is computed in turn in
this process, and what it would send is written down: nothing is sent. A step that is replayed sends
what its recording has sent.
"""

from collections import deque
from contextlib import contextmanager
from functools import cache
from itertools import combinations
from types import SimpleNamespace

import pytest
import torch
from covering import covering, pairs_of
from experiments import unread
from replays import CPU, OPTIONS, Graphs, Recorded
from torch import nn

from segtrain.distributed import collectives as dist
from segtrain.errors import ConfigError
from segtrain.models import SegModel
from segtrain.models.blocks import AuxHead, FeatureChannels, Features
from segtrain.models.deeplab import DeepLabV3PlusHead
from segtrain.models.norms import make_norm
from segtrain.models.precision import float32_products
from segtrain.models.pspnet import PSPHead
from segtrain.models.resnet import _Block, _Conv
from segtrain.training import graph, share_passes
from segtrain.training.exact_sum import ExactGradientSum
from segtrain.training.graph import GraphStep, why_not
from segtrain.training.optim.optimizer import may_be_captured
from segtrain.training.state import make_state
from segtrain.training.step import TrainStep
from segtrain.training.step_sync import StepSync
from segtrain.types import IGNORE_INDEX, Batch

CUDA = torch.device("cuda")
SIZE, RANKS, N, K = (9, 13), 3, 8, 4
BANDS = {"layout": "folders", "root": "none", "classes": "camvid", "label_format": "bands"}
MORE = {
    "3 + 3 + 2": {"train": {"split": "even"}},
    "5 + 3 + 0": {"train": {"split": (4, 2, 0)}},
    "1 + 0 + 7": {"train": {"split": (1, 0, 5)}},
    "recorded": {},
    "AdamW for the average": {"optim": {"kind": "adamw", "ema_decay": 0.9}},
    "frozen backbone": {
        "optim": {"layers": ({"names": ("backbone",), "freeze": True},)},
        "train": {"init_from": "weights"},
    },
    "uneven microbatches": {"train": {"accumulate_steps": 3}},
    "virtual ranks": {"train": {"virtual_ranks": 2}},
    "shares": {"train": {"shares": 4}},
    "mined part": {"loss": {"kind": "ohem", "ohem_fraction": 0.2}},
    "lovasz of the batch": {"loss": {"kind": "lovasz_batch"}},
    "dice": {"loss": {"kind": "dice"}},
    "boundary relaxation": {"loss": {"kind": "boundary_relaxation"}},
    "overlapping classes": {"task": "multilabel", "data": BANDS},
    "class weights": {"loss": {"class_weights": (1.0, 2.0, 0.0, 3.0)}},
    "mean of groups": {"norm": {"images": 2, "running": "mean"}},
    "first of groups": {"norm": {"images": 4, "running": "first"}},
    "sequential groups": {"norm": {"images": 2, "running": "sequential", "momentum": None}},
    "cumulative statistics": {"norm": {"momentum": None}},
    "frozen norms": {"norm": {"kind": "frozen"}, "train": {"init_from": "weights"}},
    "group norm": {"norm": {"kind": "group"}},
    "recomputed norms": {"model": {"recompute": "norm"}},
    "no auxiliary head": {"model": {"aux_head": False, "aux_channels": 256}},
    "decoder": {"model": {"arch": "deeplabv3plus"}},
    "no dropout": {"model": {"dropout": 0.0}},
}
ALL = OPTIONS | MORE
# Of these a config has one at most.
CHOICES = [
    ("3 + 3 + 2", "5 + 3 + 0", "1 + 0 + 7"),
    ("adamw", "muon", "AdamW for the average"),
    ("rates of layers", "zeros", "frozen backbone"),
    ("microbatches", "uneven microbatches"),
    ("virtual ranks", "shares"),
    ("bfloat16", "float16", "float64"),
    (
        *("mining", "mined part", "lovasz", "lovasz of the batch"),
        *("focal", "dice", "boundary relaxation"),
    ),
    (
        *("groups of images", "mean of groups", "first of groups", "sequential groups"),
        *("cumulative statistics", "frozen norms", "group norm"),
    ),
    ("recomputed", "recomputed norms"),
]
CHOICES += [(name,) for name in ALL if not any(name in names for names in CHOICES)]


class Backbone(_Block):
    """Two residual blocks, one of them with a norm in its shortcut."""

    channels = FeatureChannels(8, 8, 8)

    def __init__(self, model, norm):
        options = {"norm": norm, "recompute": model.recompute, "pooled_shortcut": False}
        super().__init__(3, [_Conv(8, 3, 2), _Conv(8, 3)], **options)
        self.second = _Block(8, [_Conv(8, 3), _Conv(8, 3)], **options)

    def forward(self, images):
        low = super().forward(images)
        return Features(low, low, self.second(low))


def model_of(config):
    norm, model = make_norm(config.norm), config.model.model_copy(update={"ppm_bins": (2, 3)})
    options = {"num_classes": K, "norm": norm}
    head = {"pspnet": PSPHead, "deeplabv3plus": DeepLabV3PlusHead}[model.arch]
    aux = AuxHead(model, Backbone.channels, **options) if model.aux_head else None
    return SegModel(
        Backbone(model, norm),
        head(model, Backbone.channels, **options),
        aux,
        dropout=model.dropout,
        align_corners=False,
        recompute=model.recompute == "blocks",
    )


@cache
def config_of(names):
    """The config with these options.

    Raises:
        ConfigError, ValueError: they do not go together.
    """
    sections = {
        "augment": {"crop_size": SIZE},
        "model": {"head_channels": 12, "aux_channels": 8},
        "train": {"batch_size": N, "steps": 30},
    }
    for name in names:
        for section, values in ALL[name].items():
            merged = isinstance(values, dict)
            sections[section] = sections.get(section, {}) | values if merged else values
    config = unread(**sections)
    if "recorded" in names:
        capturable = may_be_captured(model_of(config), config, CUDA)
        if why_not(config, SimpleNamespace(capturable=capturable), CUDA):
            raise ValueError("such a step is not recorded")
    return config


@cache
def valid(names):
    try:
        config_of(tuple(sorted(names)))
    except (ConfigError, ValueError):
        return False
    return True


def batches(config, state, step):
    """Of this rank; a part of the pixels is ignored, in the last image all."""
    generator = torch.Generator().manual_seed(step)
    images = torch.randint(256, (N, 3, *SIZE), generator=generator, dtype=torch.uint8)
    labels = (images.sum(1) % K).to(torch.uint8)
    if config.is_multilabel:
        labels = nn.functional.one_hot(labels.long(), K).byte()
    labels[:, :3] = labels[-1:] = IGNORE_INDEX
    for mine in map(torch.tensor, map(list, state.layout.positions(dist.rank()))):
        mine = mine.long()
        yield Batch(images[mine], labels[mine], ["a"] * len(mine))


class Replayed(Recorded):
    """Sends in each replay what was asked for while it was recorded, and computes nothing."""

    def __init__(self, sent):
        super().__init__()
        self.sent, self.events = sent, []

    def replay(self):
        self.sent += self.events


class Ranks(Graphs):
    """Three ranks, of which one is computed at a time.

    sent: what the `rank` of now has asked for: operation, dtype and size, whether it waits, and the
        ranks that it is among.
    """

    def __init__(self):
        super().__init__()
        self.rank, self.sent = 0, []

    @contextmanager
    def graph(self, recorded, **options):
        before = len(self.sent)
        with super().graph(recorded, **options):
            yield
        recorded.events = self.sent[before:]
        del self.sent[before:]

    def group_of(self, ranks):
        if ranks is None or len(ranks) == RANKS:
            return None
        assert self.rank in ranks
        return dist.ALONE if len(ranks) == 1 else ranks

    def size(self, group=None):
        if group is dist.ALONE or dist.current().alone:
            return 1
        return len(self.members(group))

    def members(self, group):
        return tuple(range(RANKS)) if group is None else group

    def send(self, kind, tensor, group=None, *, waits=True):
        self.sent.append((kind, str(tensor.dtype), tensor.numel(), waits, self.members(group)))

    def all_reduce(self, tensor, group=None, async_op=False):
        self.send("all_reduce", tensor, group, waits=not async_op)
        return SimpleNamespace(wait=lambda: None)

    def all_gather(self, gathered, tensor, group=None):
        self.send("all_gather", tensor, group)
        gathered.copy_(tensor.repeat(self.size(group)))

    def all_gather_object(self, value, group=None):
        self.sent.append(("objects", self.members(group)))
        return [value] * self.size(group)


def finish_alike(sums, finish=ExactGradientSum.finish):
    """All ranks find the same largest gradients of all; here each would find its own."""
    sums._largest.fill_(1.0)
    return finish(sums)


@pytest.fixture
def ranks(monkeypatch):
    ranks, threads = Ranks(), torch.get_num_threads()
    monkeypatch.setattr(dist, "rank", lambda: ranks.rank)
    monkeypatch.setattr(dist, "world_size", lambda: RANKS)
    monkeypatch.setattr(dist, "_num_processes", ranks.size)
    monkeypatch.setattr(dist, "group_of", ranks.group_of)
    monkeypatch.setattr(dist, "group_ranks", lambda group: group)
    monkeypatch.setattr(dist, "all_gather_object", ranks.all_gather_object)
    monkeypatch.setattr("torch.distributed.all_reduce", ranks.all_reduce)
    monkeypatch.setattr("torch.distributed.all_gather_into_tensor", ranks.all_gather)
    monkeypatch.setattr(
        "torch.distributed.broadcast", lambda tensor, src: ranks.send("broadcast", tensor)
    )
    monkeypatch.setattr(torch.cuda, "CUDAGraph", lambda: Replayed(ranks.sent))
    monkeypatch.setattr(torch.cuda, "graph", ranks.graph)
    monkeypatch.setattr(graph, "EAGER_STEPS", 1)
    monkeypatch.setattr(ExactGradientSum, "finish", finish_alike)
    monkeypatch.setattr(share_passes, "fingerprint", lambda *_: "")  # a second, of no interest
    torch.set_num_threads(1)  # shares leave it so, too
    yield ranks
    torch.set_num_threads(threads)


def sequence(ranks, rank, names):
    """What a rank asks for: when it begins, and in each step."""
    ranks.rank, config, is_recorded = rank, config_of(tuple(sorted(names))), "recorded" in names
    ranks.sent.clear()
    torch.manual_seed(0)
    state = make_state(model_of(config), config, CPU, capturable=is_recorded)
    ranks.watch(state)
    sync = StepSync(lambda: False, overflow_allowed=config.train.precision == "float16")
    step = TrainStep(state, config, CPU, sync)
    step = GraphStep(step, state) if is_recorded else step
    found = [[*ranks.sent]]
    for number in range(3):  # as it is, recorded, replayed
        ranks.sent.clear()
        local = step.local(list(batches(config, state, number)))
        with float32_products(config.train):
            left = step(local)
        step.done(local, left)
        found.append([*ranks.sent])
    return found


def stuck(sequences):
    """Where ranks wait for each other forever: what each asks for next; empty if all end."""
    left = [deque(each) for each in sequences]
    while any(left):
        heads = [one[0] if one else None for one in left]
        ready = (head for head in heads if head and all(heads[r] == head for r in head[-1]))
        event = next(ready, None)
        if event is None:
            return [*enumerate(heads)]
        for rank in event[-1]:
            left[rank].popleft()
    return []


def mistakes(ranks, names):
    """What is wrong with a config: ranks that differ, or steps of one kind that do."""
    found = [sequence(ranks, rank, names) for rank in range(RANKS)]
    for number, step in enumerate(zip(*found, strict=True)):
        if where := stuck(step):
            return f"step {number}: {where}"
    for rank, (_, _, *steps) in enumerate(found):
        tensors = [[event for event in step if event[0] != "objects"] for step in steps]
        if tensors[1:] != tensors[:-1]:
            return f"rank {rank}: {[*map(len, tensors)]}"
    return None


def wrong(ranks, configs):
    """The mistakes of those that have any."""
    found = {" and ".join(names): mistakes(ranks, names) for names in configs}
    return {names: what for names, what in found.items() if what}


def few():
    """Configs in which each option occurs, as many in one as go together."""
    rows = [[name] for name in CHOICES[0]]
    for name in (name for group in CHOICES[1:] for name in group):
        fitting = (row for row in rows if valid((*row, name)) and not {*group_of(name)} & {*row})
        row = next(fitting, None)
        if row is None:
            row = ["5 + 3 + 0"]
            rows.append(row)
        row.append(name)
    return [tuple(row) for row in rows]


def group_of(name):
    return next(group for group in CHOICES if name in group)


def test_with_each_option_all_ranks_ask_for_the_same(ranks):
    """Also a rank without images does."""
    configs = few()
    assert {*ALL} == {name for names in configs for name in names}
    assert all(map(valid, configs))
    assert wrong(ranks, [(), *configs]) == {}


@pytest.mark.slow("training", "norm", "distributed", "models")
def test_with_every_pair_of_options_all_ranks_ask_for_the_same(ranks):
    configs = covering(CHOICES, valid, seed=0)
    met = {frozenset(pair) for names in configs for pair in combinations(names, 2)}
    wanted = {*map(frozenset, pairs_of(CHOICES, valid))}
    assert met >= wanted
    assert len(configs) < len(wanted) / 10
    assert all(map(valid, configs))
    assert wrong(ranks, configs) == {}


def test_a_step_of_microbatches_weighs_them_and_moves_statistics_in_one_sum_each(ranks):
    """Rank 0 has a whole group of images, so its norms send nothing themselves."""
    names = ("3 + 3 + 2", "groups of images", "microbatches")
    *_, step = sequence(ranks, 0, names)
    waiting = [event for event in step if event[0] == "all_reduce" and event[3]]
    losses = 2
    assert len(waiting) == 1 + losses + 1
