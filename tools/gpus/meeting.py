"""The tool on every rank of several machines: what one knows the others get to know."""

import json
from datetime import timedelta
from typing import Any

import torch.distributed as torch_dist

_PATIENCE = timedelta(minutes=10)  # the longest check of another rank


class Alone:
    """One process, which starts all ranks."""

    rank, size = 0, 1

    def everyone(self, value: Any) -> list[Any]:
        """The values of all processes, in the order of ranks."""
        return [value]


class Meeting:
    """The processes that torchrun has started, one for each rank; RANK and the like are set."""

    def __init__(self) -> None:
        found = next(torch_dist.rendezvous("env://", timeout=_PATIENCE))
        self._store, self.rank, self.size = found
        self._calls = 0

    def everyone(self, value: Any) -> list[Any]:
        """As `Alone`'s; returns when all have come here."""
        self._calls += 1
        key = f"gpus/{self._calls}"
        self._store.set(f"{key}/{self.rank}", json.dumps(value))
        return [json.loads(self._store.get(f"{key}/{rank}")) for rank in range(self.size)]
