"""A plugin: steps of this process are recorded and replayed, by the stand-in of tools/replays.py.

And the communicator is NCCL's in one respect: it is not destroyed while a graph refers to it. The
environment tells what goes wrong: GRAPHS_FAIL=RANK cannot record; GRAPHS_REPLAY is hang, wrong or
fail.
"""

import os
import sys
import threading
from contextlib import contextmanager
from pathlib import Path

import torch
from torch._C._distributed_c10d import Work

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import replays

from segtrain.distributed import collectives as dist
from segtrain.distributed import process_group
from segtrain.distributed.stack import DeviceStack
from segtrain.plugins import callback
from segtrain.training import graph, graph_trial, state

REFUSED = "the communicator waits for the graphs that refer to it"
STACK = DeviceStack("0", "2", "13", "2.30", "NCCL", "580", ("card", "card"), 1)
LIMIT_S = 3.0


class Recorded(replays.Recorded):
    """Sends sums while it records, too: layers on a CPU read the number of pixels from them."""

    def __torch_dispatch__(self, function, types, args=(), kwargs=None):
        out = function(*args, **(kwargs or {}))
        if function.namespace == "c10d":
            Work.unbox(out[1]).wait()
        self.calls.append((function, args, kwargs or {}, out))
        return out

    def replay(self):
        how = os.environ.get("GRAPHS_REPLAY")
        if how == "hang" and dist.rank() == 0:
            threading.Event().wait()
        if how == "fail":
            raise RuntimeError("an illegal memory access was encountered")
        super().replay()
        if how == "wrong" and dist.rank() == 1:
            with torch.no_grad():
                next(made.state.model.parameters()).mul_(1.5)


class Graphs(replays.Graphs):
    @contextmanager
    def graph(self, recorded, **options):
        with super().graph(recorded, **options):
            yield
        # At the end, since what was sent before was for all.
        if os.environ.get("GRAPHS_FAIL") == str(dist.rank()):
            self.pop()  # nobody holds it
            raise torch.OutOfMemoryError("no memory is left")


made = Graphs()
make_step, destroy = graph.GraphStep.__init__, torch.distributed.destroy_process_group


def watched(self, step, state, *args):
    made.watch(state)
    make_step(self, step, state, *args)


def refusing(*args):
    if any(recorded.calls for recorded in made):
        print(REFUSED, flush=True)
    destroy(*args)


def install():
    torch.cuda.CUDAGraph, torch.cuda.graph = Recorded, made.graph
    torch.distributed.destroy_process_group = refusing
    process_group.is_possible = lambda: False  # sums in shared memory are no operation of torch
    state.may_be_captured = lambda *_: True
    graph.why_not = lambda *_: None
    graph.stack_of_ranks = lambda: STACK
    graph.GraphStep.__init__ = watched
    graph_trial.LIMIT_S = LIMIT_S


if __name__ != "graphs_on_cpu":  # as a plugin; a test that imports it stays as it is
    install()
    callback("graphs on a CPU")(list)  # a plugin has to register something
