"""A plugin of the runs of test_gpus.py: counts replays, and takes memory from a rank that is named.

GPUS_REPLAYS: a folder, where each rank writes how many steps it has replayed when it ends.
GPUS_FULL_RANK: the rank for which there is no memory when it records its first graph.
GPUS_RECORDER: set, the CPU records and replays as a device does.
"""

import atexit
import os
from pathlib import Path
from typing import Any

import torch

from segtrain.plugins import callback
from segtrain.training.part import Part

_MARGIN = 2 << 20  # bytes: the capture begins, and ends in its midst


@callback("counted replays")
class Counted(Part):
    """There to have a name: a plugin registers something."""


def count_replays(folder: Path) -> None:
    """Writes how many replays this process has seen when it ends."""
    graph, count = torch.cuda.CUDAGraph, [0]
    replay = graph.replay

    def counted(self: torch.cuda.CUDAGraph) -> None:
        count[0] += 1
        replay(self)

    graph.replay = counted
    rank = os.environ.get("RANK", "0")
    atexit.register(lambda: (folder / rank).write_text(str(count[0])))


def take_memory() -> None:
    """Lets the device be full whenever this process records a graph."""
    enter, leave = torch.cuda.graph.__enter__, torch.cuda.graph.__exit__

    def begin(self: torch.cuda.graph) -> None:
        torch.cuda.synchronize()
        torch.cuda.empty_cache()
        _, total = torch.cuda.mem_get_info()
        torch.cuda.set_per_process_memory_fraction((torch.cuda.memory_reserved() + _MARGIN) / total)
        enter(self)

    def end(self: torch.cuda.graph, *error: Any) -> None:
        try:
            leave(self, *error)
        finally:
            torch.cuda.set_per_process_memory_fraction(1.0)

    torch.cuda.graph.__enter__, torch.cuda.graph.__exit__ = begin, end


def _recorder(*, full: bool) -> None:
    """The CPU in place of a device, for which the run asks its usual questions."""
    import replays

    from segtrain import __version__
    from segtrain.distributed.stack import DeviceStack
    from segtrain.training import graph

    replays.install(full=full)
    graph.why_not = lambda config, *_: None if config.train.graph else ""
    ranks = ("CPU",) * int(os.environ["WORLD_SIZE"])
    stack = DeviceStack(__version__, torch.__version__, "none", "none", "gloo", "none", ranks, 1)
    graph.stack_of_ranks = lambda: stack


def _install() -> None:
    environ = os.environ
    if "RANK" not in environ:  # the launcher
        return
    is_full = environ.get("GPUS_FULL_RANK") == environ["RANK"]
    if "GPUS_RECORDER" in environ:
        _recorder(full=is_full)
    elif is_full:
        take_memory()
    count_replays(Path(environ["GPUS_REPLAYS"]))


_install()
