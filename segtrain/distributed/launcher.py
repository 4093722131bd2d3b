"""Starts the ranks of this machine, watches them, and tells how the run ended. Imports no torch.

Ranks meet through a file in the launcher's private folder: nothing listens on a port here. Several
machines train under torchrun, whose ranks need no launcher of segtrain.
"""

import os
import shutil
import signal
import tempfile
import time
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from subprocess import Popen

from segtrain.distributed import machine, signals
from segtrain.distributed.liveness import (
    ATTEMPT_VARIABLE,
    FOLDER_VARIABLE,
    PATIENCE_S,
    WITHOUT_GRAPHS,
    ExitStatus,
    Heartbeat,
    Watchdog,
    asked_without_graphs,
    read_exit_statuses,
    read_heartbeats,
)
from segtrain.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SYSTEM, EXIT_TERMINATED
from segtrain.text import say

_RESUME = "resume from the last checkpoint by --resume"
_STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)
_POLL_S = 0.05
# From a signal to SIGKILL: time enough to finish a step and write a checkpoint; after the death of
# a rank, for the others to say what they have lost, and for the watchdog to name one that hangs.
# NCCL does not notice a death on one machine.
_SHUTDOWN_S, _BEREAVED_S = 120.0, PATIENCE_S + 3.0


class _StopSignal(Exception):  # noqa: N818 - raised by a handler, and no error
    """This process was asked to stop."""

    def __init__(self, number: int) -> None:
        super().__init__(number)
        self.number = number


def run_ranks(command: Sequence[str], num_ranks: int, *, max_restarts: int = 0) -> int:
    """Runs `command` in `num_ranks` processes, waits for them; the exit code of the run.

    After a failure all ranks are started again, at most `max_restarts` times; and once more,
    uncounted, if they ask for it (`liveness.ask_without_graphs`).
    """
    with tempfile.TemporaryDirectory(prefix="segtrain-", ignore_cleanup_errors=True) as directory:
        folder = Path(directory)
        # The ranks share the cores; by default each would take all of them.
        os.environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.num_cores() // num_ranks)))
        os.environ |= {FOLDER_VARIABLE: str(folder), signals.LAUNCHER: str(os.getpid())}
        signal.signal(signal.SIGUSR1, lambda *_: _signal_ranks(signal.SIGUSR1, folder))
        signals.raise_on_stop_signal(_StopSignal, kill=partial(_kill_ranks, folder))
        failures, stopped_by, watchdog = {}, None, Watchdog(folder)
        # Filled by `_run`, so that a signal that comes at any point finds what was started.
        ranks: list[Popen] = []
        try:
            with watchdog:
                failures = _run(command, num_ranks, max_restarts, folder, ranks)
                # The ranks have ended: a signal from here on must not change how the run ended.
                signals.ignore_stop_signals()
        except _StopSignal as stop:
            stopped_by = stop.number
            _end(ranks, stopped_by, _SHUTDOWN_S)
        signals.ignore_stop_signals()
        phases = {heartbeat.phase for heartbeat in read_heartbeats(folder)}
        return exit_code_of(
            read_exit_statuses(folder),
            failures,
            stopped_by,
            killed=watchdog.killed,
            trained=not phases.isdisjoint(("training", "checkpoint")),
        )


def _run(
    command: Sequence[str], num_ranks: int, max_restarts: int, folder: Path, ranks: list[Popen]
) -> dict[int, int]:
    """As `_wait`, of the last attempt, whose processes `ranks` holds."""
    attempt = 0
    while True:
        os.environ[ATTEMPT_VARIABLE] = str(attempt)
        ranks.clear()
        _start(command, num_ranks, ranks)
        failures = _wait(ranks)
        # At most once, by the variable, and not at the cost of a restart that the user allowed.
        if failures and WITHOUT_GRAPHS not in os.environ and asked_without_graphs(folder):
            os.environ[WITHOUT_GRAPHS] = "1"
        elif failures and max_restarts > 0:
            max_restarts -= 1
            _say_why(failures, folder)
        else:
            return failures
        attempt += 1


def _start(command: Sequence[str], num_ranks: int, ranks: list[Popen]) -> None:
    """Appends the processes to `ranks`, one by one: a signal may come in the midst of it."""
    for rank in range(num_ranks):
        numbers = {"RANK": rank, "LOCAL_RANK": rank}
        numbers |= {"WORLD_SIZE": num_ranks, "LOCAL_WORLD_SIZE": num_ranks}
        # Nobody listens there; torch's own start by the environment would look for it.
        place = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": "0"}
        environ = os.environ | place | {name: str(number) for name, number in numbers.items()}
        # In a session of its own, so that Ctrl-C in a terminal comes from here alone.
        ranks.append(Popen(command, env=environ, start_new_session=True))


def _wait(ranks: Sequence[Popen]) -> dict[int, int]:
    """The exit codes of the ranks that failed, after all have ended; negative: a signal."""
    failures: dict[int, int] = {}
    while not failures and any(rank.poll() is None for rank in ranks):
        time.sleep(_POLL_S)
        failures = {number: rank.returncode for number, rank in enumerate(ranks) if rank.poll()}
    # Once more: the last ranks may have ended after that look at them.
    failures = {number: rank.returncode for number, rank in enumerate(ranks) if rank.poll()}
    if failures:
        _end(ranks, signal.SIGTERM, _BEREAVED_S)
    return failures


def _end(ranks: Sequence[Popen], number: int, limit_s: float) -> None:
    """Sends signal `number` to the ranks that run, and after `limit_s` SIGKILL."""
    # All get the signal before any is waited for: ranks stop after the same step, together.
    until = time.monotonic() + limit_s
    for rank in ranks:
        rank.send_signal(number)  # does nothing to one that has been waited for
    for rank in ranks:
        while rank.poll() is None and time.monotonic() < until:
            time.sleep(_POLL_S)
    for rank in ranks:
        rank.kill()  # nothing to one that has been waited for
        rank.wait()


def _say_why(failures: Mapping[int, int], folder: Path) -> None:
    """Names a rank that died without a word, where it is started again."""
    told = {status.rank for status in read_exit_statuses(folder) if status.code is not None}
    for rank, code in failures.items():
        if rank not in told:
            say(f"rank {rank} {_end_of(code)}; all ranks start again")


def _end_of(code: int) -> str:
    """How a process ended that had no time to say it; code: of its exit, negative: a signal."""
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    return f"was ended by {signal.Signals(-code).name}{hint}" if code < 0 else f"exited with {code}"


def _signal_ranks(number: int, folder: Path) -> None:
    ours = machine.children(os.getpid())
    for rank in read_heartbeats(folder):
        if rank.pid in ours:  # otherwise the heartbeat is old
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def _kill_ranks(folder: Path) -> None:
    """Kills the ranks at once; a rank without a heartbeat yet ends with this process."""
    _signal_ranks(signal.SIGKILL, folder)
    shutil.rmtree(folder, ignore_errors=True)


def exit_code_of(
    statuses: Sequence[ExitStatus],
    failures: Mapping[int, int],
    stopped_by: int | None,
    killed: Sequence[Heartbeat] = (),
    *,
    trained: bool = False,
) -> int:
    """The exit code of the run; prints what no rank could print itself.

    statuses: of the ranks, by time.
    failures: the exit code of each process that failed, as far as known; negative: a signal.
    stopped_by: the signal that the launcher got and passed on to the ranks.
    killed: the ranks that the watchdog killed.
    trained: they had steps to save.
    """
    # What a rank has told itself comes first; then a signal to all, deaths without a word, ranks
    # that hung, ranks that stopped; last, ranks that lost others without any cause here.
    for status in statuses:
        if status.code not in (None, EXIT_OK, *_STOPPED) and not status.consequence:
            return status.code  # the first cause; its rank has printed it
    if stopped_by is not None:
        late = next((status.rank for status in statuses if status.code is None), None)
        if late is not None and stopped_by != signal.SIGINT:
            say(f"rank {late} did not stop in {_SHUTDOWN_S:.0f} s and was killed; {_RESUME}")
            return EXIT_SYSTEM
        have_saved = any(status.code in _STOPPED for status in statuses)
        if trained and not have_saved and any(status.consequence for status in statuses):
            say(f"the ranks lost each other before they could save; {_RESUME}")
            return EXIT_SYSTEM
        # Ranks that stop in good order say so; before and besides training they just end.
        if not have_saved:
            say(signals.word_for(stopped_by))
        return signals.exit_code(stopped_by)
    # A death without a word is the cause, and what other ranks lost by it the consequence. One that
    # fails while its process ends has written that all is well.
    explained = {status.rank for status in statuses if status.code not in (None, EXIT_OK)}
    explained |= {rank.rank for rank in killed}
    for rank, code in failures.items():
        if rank not in explained:
            return _silent_death(rank, code)
    if killed:
        rank, _, phase, step, _ = killed[0]
        where = f"in {phase}, after step {step}"
        say(f"rank {rank} did not answer the others: it hung {where}, and was killed; {_RESUME}")
        return EXIT_SYSTEM
    for status in statuses:
        if status.code in _STOPPED:
            return status.code
    if any(status.consequence for status in statuses):
        say(f"the ranks lost each other; {_RESUME}")
    return EXIT_SYSTEM if failures else EXIT_OK


def _silent_death(rank: int, code: int) -> int:
    """The exit code of the run after a rank ended without writing its status."""
    if -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # before training began
        return signals.exit_code(-code)
    if code in _STOPPED:
        return code
    say(f"rank {rank} {_end_of(code)}; the other ranks were stopped; {_RESUME}")
    return EXIT_SYSTEM
