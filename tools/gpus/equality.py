"""Replayed steps beside eager ones, and several ranks beside one, under every set of options."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from bits import sha256
from replays import EAGER_STEPS, SETS, STEPS, config_of, trained
from torch import Tensor

from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.trainer.setup import make_repeatable

# Beside one rank.
FLOAT64, SHARES = "float64 beside one rank", "shares beside one rank"
# Steps amplify rounding; tests/gpu/test_graph.py has the same bound.
_ROUNDING = 1e-2
_ROUNDING_64 = 1e-9

Found = tuple[dict[str, Any], list[str]]


def items(device: torch.device, options: dict[str, Any]) -> dict[str, Callable[[], Found]]:
    """Sets of options, other splits, and what is compared with one rank.

    options: `images` of a step; `sets`: how many of the sets; `most`: ranks that are tried.
    """
    images, ranks = {"batch_size": options["images"]}, dist.world_size()
    beside_one = {
        FLOAT64: partial(both_ways, config_of(["float64", "average"], **images), device),
        SHARES: partial(with_shares, config_of([], **images, shares=options["most"]), device),
    }
    if ranks == 1:
        return beside_one
    config = {" and ".join(names) or "defaults": config_of(names, **images) for names in SETS}
    chosen = dict(list(config.items())[: options["sets"]])
    for name, split in {
        "an uneven split": (3, *[1] * (ranks - 1)),
        "a rank without images": (1, 0, *[1] * (ranks - 2)),
    }.items():
        chosen[name] = config_of(["average", "clipping"], **images, split=split)
    found = {name: partial(both_ways, one, device) for name, one in chosen.items()}
    return found | beside_one


def both_ways(config: Config, device: torch.device) -> Found:
    """Trains eagerly and with a graph: the same bits if deterministic, else within rounding."""
    problems, figures = [], {}
    for deterministic in (True, False) if device.type == "cuda" else (True,):
        train = config.train.model_copy(update={"deterministic": deterministic})
        one = config.model_copy(update={"train": train})
        make_repeatable(one, device)
        numbers, left = trained(one, device)
        with counted_replays() as replays:
            found, kept = trained(one, device, replayed=True)
        if len(replays) < STEPS - EAGER_STEPS:
            problems.append(f"{len(replays)} of {STEPS - EAGER_STEPS} steps were replayed")
        if deterministic:
            figures = {"losses": numbers, "sha256": sha256(on_host(left))[:16]}
            same = found == numbers and all(map(torch.equal, kept, left))
            problems += [] if same else [f"other bits, losses differ by {apart(found, numbers)}"]
        elif (difference := apart(found, numbers)) > _ROUNDING:
            problems.append(f"not deterministic: losses differ by {difference:.1e}")
    if len(set(dist.all_gather_object(figures["sha256"]))) > 1:
        problems.append("the ranks have other weights")
    return figures, problems


def with_shares(config: Config, device: torch.device) -> Found:
    """The bits of a training with train.shares, which has no graph."""
    make_repeatable(config, device)
    numbers, left = trained(config, device)
    return {"losses": numbers, "sha256": sha256(on_host(left))[:16]}, []


def beside_one_rank(one: dict[str, Any], several: dict[str, Any]) -> list[str]:
    """What differs between the figures of one rank and of several."""
    problems = []
    if {FLOAT64, SHARES} <= one.keys() & several.keys():
        difference = apart(*(found[FLOAT64]["losses"] for found in (several, one)))
        if not difference < _ROUNDING_64:
            problems.append(f"{FLOAT64}: losses differ by {difference:.1e}")
        if several[SHARES] != one[SHARES]:
            problems.append(f"{SHARES}: other bits")
    return problems


def apart(found: Any, numbers: Any) -> float:
    """The largest relative difference of losses and norms; infinite with NaN."""
    a, b = (torch.tensor(values, dtype=torch.float64)[:, 1:] for values in (found, numbers))
    difference = ((a - b) / b).abs().nan_to_num(nan=float("inf"))
    return difference[~(a.isnan() & b.isnan())].max().item()  # without an auxiliary head


def on_host(left: list[Tensor]) -> list[Tensor]:
    """What a training has left, to be hashed."""
    return [tensor.detach().cpu() for tensor in left]


@contextmanager
def counted_replays() -> Iterator[list[None]]:
    """Inside, the list grows with each replay of a CUDA graph."""
    graph, replays = torch.cuda.CUDAGraph, []
    replay = graph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        replays.append(None)
        replay(self)

    graph.replay = counted
    try:
        yield replays
    finally:
        graph.replay = replay
