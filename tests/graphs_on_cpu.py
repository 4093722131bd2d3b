"""A plugin: steps of this process are recorded and replayed, by the stand-in of tools/replays.py.

And the communicator is NCCL's in one respect: it is not destroyed while a graph refers to it. The
environment tells what goes wrong: GRAPHS_FAIL=RANK cannot record; GRAPHS_REPLAY is hang, wrong or
fail.
"""

import os
import sys
import threading
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).parents[1] / "tools"))

import replays

from segtrain.distributed import collectives as dist
from segtrain.distributed.stack import DeviceStack
from segtrain.plugins import callback
from segtrain.training import graph, graph_trial

REFUSED = "the communicator waits for the graphs that refer to it"
STACK = DeviceStack("0", "2", "13", "2.30", "NCCL", "580", ("card", "card"), 1)
LIMIT_S = 3.0


class Misbehaving(replays.Recorded):
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


def refuse_while_any_is_alive():
    destroy = torch.distributed.destroy_process_group

    def refusing(*args):
        if any(recorded.calls for recorded in made.alive):
            print(REFUSED, flush=True)
        destroy(*args)

    torch.distributed.destroy_process_group = refusing


if __name__ != "graphs_on_cpu":  # as a plugin; a test that imports it stays as it is
    is_full = os.environ.get("GRAPHS_FAIL") == os.environ.get("RANK", "")
    made = replays.install(full=is_full, kind=Misbehaving)
    refuse_while_any_is_alive()
    graph.why_not, graph.stack_of_ranks = lambda *_: None, lambda: STACK
    graph_trial.LIMIT_S = LIMIT_S
    callback("graphs on a CPU")(list)  # a plugin has to register something
