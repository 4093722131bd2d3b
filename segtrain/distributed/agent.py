"""torch's elastic agent of one machine, where machines may come and go while a run trains."""

import itertools
import os
import signal
import socket
import time
from contextlib import suppress
from pathlib import Path
from typing import Any

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerState
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent

from segtrain.distributed.liveness import (
    ATTEMPT_VARIABLE,
    ELASTIC_VARIABLE,
    PATIENCE_S,
    WITHOUT_GRAPHS,
    asked_without_graphs,
    read_exit_statuses,
    read_heartbeats,
)
from segtrain.errors import EXIT_INTERRUPTED, EXIT_TERMINATED, ExecutionError
from segtrain.text import say

# How often the machine of rank 0 is asked whether it is there, and for how long it need not answer.
_PROBE_S, _UNREACHED_S = 5.0, 20.0

STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)

# From the first signal to SIGKILL: time enough to finish a step and write a checkpoint.
SHUTDOWN_TIMEOUT_S = 120


def end_of(code: int) -> str:
    """How a process ended that had no time to say it; code: of its exit, negative: a signal."""
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}" if code < 0 else f"exited with {code}"


class Agent(LocalElasticAgent):
    """Starts the ranks of this machine, and starts them again when a machine comes or goes.

    torch asks the ranks to stop when a machine waits to join; all save after the same step. That
    and the death of another machine end the ranks here, too, which torch counts as failures of this
    machine. Here only what has begun on this machine counts against `max_restarts`.

    elastic: machines come and go; otherwise as torch does it.
    folder: of the launcher, where ranks tell it what they do.
    patience_s: how long ranks may fail elsewhere before any has trained.
    """

    def __init__(self, *args: Any, folder: Path, elastic: bool, patience_s: float, **options: Any):
        super().__init__(*args, **options)
        self._folder, self._elastic, self._patience_s = folder, elastic, patience_s
        self.has_trained = False  # whether ranks of this machine have come to their first step
        self._attempts = itertools.count()
        self._members: set[Any] = set()  # the machines of this round
        self._newcomers: set[Any] = set()  # those that were not in the one before
        self._cut_off_since: float | None = None
        self._failing_since: float | None = None
        self._probed_at = self._reached_at = 0.0  # the machine of rank 0
        if elastic:
            os.environ[ELASTIC_VARIABLE] = "1"

    def run(self, *args: Any) -> RunResult | None:
        """As the base class; None: the run has ended while this machine waited for a place."""
        try:
            return super().run(*args)
        finally:
            self._note_training()

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        """Again, if a machine dies before it has told the others how many ranks it has."""
        while True:
            try:
                return super()._rendezvous(worker_group)
            except RuntimeError as error:  # torch's stores have no common type for that
                if "timeout" not in str(error).lower():
                    raise

    def _start_workers(self, worker_group: WorkerGroup) -> dict[int, Any]:
        self._note_training()
        os.environ[ATTEMPT_VARIABLE] = str(next(self._attempts))
        if self._elastic:
            before, self._members = self._members, self._rdzv_handler.members()
            self._newcomers, self._cut_off_since = self._members - before, None
            first, last = (worker_group.workers[i].global_rank for i in (0, -1))
            machines = f"{worker_group.group_rank + 1} of {worker_group.group_world_size}"
            world_size = worker_group.workers[0].world_size
            say(f"machine {machines}: ranks {first} to {last} of {world_size}")
            self._probed_at = self._reached_at = time.monotonic()
        return super()._start_workers(worker_group)

    def _note_training(self) -> bool:
        """Whether the ranks of the last attempt have come to their first step."""
        trained = any(rank.phase != "setup" for rank in read_heartbeats(self._folder))
        self.has_trained = self.has_trained or trained
        return trained

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result = super()._monitor_workers(worker_group)
        if result.state is WorkerState.FAILED and asked_without_graphs(self._folder):
            # Once, and not counted: the ranks of the next attempt record nothing.
            os.environ[WITHOUT_GRAPHS] = "1"
            worker_group.spec.max_restarts += 1
            self._remaining_restarts += 1
        if not self._elastic:
            self._say_why(result)
            return result
        if result.state is WorkerState.HEALTHY:
            self._check_network(worker_group)
        if result.state is WorkerState.HEALTHY and self._is_cut_off():
            # They wait for ranks that do not answer any more.
            self._pcontext.close(signal.SIGKILL)
            result = RunResult(WorkerState.FAILED)
        elif result.state is WorkerState.SUCCEEDED and self._were_stopped():
            result = RunResult(WorkerState.FAILED)
        elif result.state is not WorkerState.FAILED or self._began_here(result):
            self._say_why(result)
            return result
        if self._may_go_on():
            self._remaining_restarts += 1  # the base class takes it off again
        return result

    def _check_network(self, worker_group: WorkerGroup) -> None:
        """Leaves the run if the machine of rank 0 does not answer, where ranks would wait for it.

        The folder in which machines meet may be reached by another network.
        """
        now = time.monotonic()
        if worker_group.group_rank == 0 or now - self._probed_at < _PROBE_S:
            return
        self._probed_at, place = now, (worker_group.master_addr, worker_group.master_port)
        with suppress(OSError), socket.create_connection(place, timeout=_PROBE_S):
            self._reached_at = time.monotonic()
        if time.monotonic() - self._reached_at > _UNREACHED_S:
            self._pcontext.close(signal.SIGKILL)
            raise ExecutionError(
                f"this machine does not reach {place[0]}, where rank 0 is, and leaves: a cable, a "
                "firewall, or two networks (GLOO_SOCKET_IFNAME in the environment names one)?"
            )

    def _is_cut_off(self) -> bool:
        """Whether a machine of this round has been gone for longer than its ranks take to end."""
        if self._members <= self._rdzv_handler.members():
            self._cut_off_since = None
            return False
        now = time.monotonic()
        self._cut_off_since = self._cut_off_since or now
        return now - self._cut_off_since > PATIENCE_S

    def _were_stopped(self) -> bool:
        """Whether the ranks have ended because one on another machine was asked to stop."""
        return any(status.code in STOPPED for status in read_exit_statuses(self._folder))

    def _began_here(self, result: RunResult) -> bool:
        """Whether a rank of this machine failed by itself: not asked to stop, not left alone.

        Not if all failed before the first step with a machine that has just come, such as one with
        another config, where they had trained without it.
        """
        if self.has_trained and self._newcomers and not self._note_training():
            return False
        left_alone = {s.rank for s in read_exit_statuses(self._folder) if s.consequence}
        return any(
            rank not in left_alone and failure.exitcode != -signal.SIGTERM
            for rank, failure in result.failures.items()
        )

    def _say_why(self, result: RunResult) -> None:
        """Names a rank that died without a word, where it is started again."""
        told = {
            status.rank for status in read_exit_statuses(self._folder) if status.code is not None
        }
        for rank, failure in result.failures.items() if self._remaining_restarts else ():
            if rank not in told:
                say(f"rank {rank} {end_of(failure.exitcode)}; all ranks start again")

    def _may_go_on(self) -> bool:
        """False once ranks have failed elsewhere for `patience_s` and none has come to train."""
        now = time.monotonic()
        if self._note_training() or self._failing_since is None:
            self._failing_since = now
        return now - self._failing_since < self._patience_s

    def _shutdown(self, death_sig: signal.Signals = signal.SIGTERM, *_: Any, **__: Any) -> None:
        if self._pcontext:
            self._pcontext.close(death_sig, SHUTDOWN_TIMEOUT_S)
