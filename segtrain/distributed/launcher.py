"""Starts the ranks of this machine by torch elastic, watches them, and tells how the run ended."""

import logging
import math
import os
import shutil
import signal
import subprocess
import tempfile
from collections.abc import Mapping, Sequence
from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import NamedTuple

from torch.distributed.elastic.agent.server import WorkerSpec
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.elastic.rendezvous.api import (
    RendezvousClosedError,
    RendezvousTimeoutError,
)

from segtrain.distributed import machine, signals
from segtrain.distributed.agent import SHUTDOWN_TIMEOUT_S, STOPPED, Agent, end_of
from segtrain.distributed.liveness import (
    FOLDER_VARIABLE,
    ONE_MACHINE,
    ExitStatus,
    Heartbeat,
    Watch,
    Watchdog,
    read_exit_statuses,
    read_heartbeats,
)
from segtrain.distributed.rendezvous import OneMachine, SeveralMachines
from segtrain.errors import (
    EXIT_MEMORY,
    EXIT_OK,
    EXIT_SYSTEM,
    ConfigError,
    ExecutionError,
)
from segtrain.text import say

_RESUME = "resume from the last checkpoint by --resume"

# How long a machine whose ranks have ended well waits for the others.
_EXIT_BARRIER_S = 30
# How often a command of --notice is run, and how long it may take.
_NOTICE_S = 5.0


class MachineGroup(NamedTuple):
    """Several machines on which the same command is started."""

    least: int  # fewer do not train
    most: int
    folder: Path  # where they meet, which all of them see
    patience_s: float  # how long to wait for the fewest

    @property
    def is_elastic(self) -> bool:
        """Whether machines may come and go."""
        return self.least < self.most


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    *,
    max_restarts: int = 0,
    machines: MachineGroup | None = None,
    notice: str | None = None,
) -> int:
    """Runs `command` in `num_ranks` processes here, waits for them; the exit code of the run.

    After a failure all ranks are started again, at most `max_restarts` times. Where machines may
    come and go, only failures of this one count, and a signal lets only this one leave.

    notice: a command of the shell that ends with 0 once this machine is about to be taken away.

    Raises:
        ConfigError: this machine has no address for the others, or `notice` cannot be run.
        ExecutionError: the launchers of several machines did not meet or lost each other.
    """
    with tempfile.TemporaryDirectory(prefix="segtrain-", ignore_cleanup_errors=True) as directory:
        folder = Path(directory)
        _set_environment(folder, num_ranks, one_machine=machines is None)
        meeting = OneMachine() if machines is None else _meeting(machines)
        agent = _agent(command, num_ranks, max_restarts, meeting, machines, folder)
        signal.signal(signal.SIGUSR1, lambda *_: _signal_ranks(signal.SIGUSR1, folder))
        signals.raise_on_stop_signal(
            lambda number: SignalException("asked to stop", sigval=signal.Signals(number)),
            kill=partial(_kill_ranks, folder),
        )
        failures, stopped_by, watchdog = {}, None, Watchdog(folder)
        try:
            with watchdog, nullcontext() if notice is None else Notice(notice):
                result = agent.run()
                signals.ignore_stop_signals()
            if result is not None and result.is_failed():
                failures = {rank: failure.exitcode for rank, failure in result.failures.items()}
        except SignalException as error:
            stopped_by = error.sigval
        except RendezvousError as error:
            raise ExecutionError(_why_apart(error, machines)) from error
        except ExecutionError:
            meeting.leave()
            raise
        signals.ignore_stop_signals()
        phases = {heartbeat.phase for heartbeat in read_heartbeats(folder)}
        code = exit_code_of(
            read_exit_statuses(folder),
            failures,
            stopped_by,
            killed=watchdog.killed,
            one_machine=machines is None,
            trained=not phases.isdisjoint(("training", "checkpoint")),
        )
        # Without a machine that has failed the others go on, unless they would fail alike.
        is_alone = code in (EXIT_SYSTEM, EXIT_MEMORY) or (code != EXIT_OK and not agent.has_trained)
        is_elastic = machines is not None and machines.is_elastic
        if is_elastic and stopped_by and code in STOPPED and agent.has_trained:
            say("this machine leaves the run, which is saved")
        with suppress(RendezvousError):
            meeting.leave() if stopped_by or (is_elastic and is_alone) else meeting.shutdown()
        return code


def _set_environment(folder: Path, num_ranks: int, *, one_machine: bool) -> None:
    """Sets what the ranks inherit from this process."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.num_cores() // num_ranks)))
    os.environ |= {FOLDER_VARIABLE: str(folder), signals.LAUNCHER: str(os.getpid())}
    if one_machine:
        os.environ[ONE_MACHINE] = "1"
    # Set, it would have rank 0 serve a store of its own, on every interface.
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    # None: torch's handler raises at every signal, wherever the launcher is.
    os.environ["TORCHELASTIC_SIGNALS_TO_HANDLE"] = ""
    # torch elastic logs failures as tracebacks; the ranks have told them already.
    logging.disable()


def _meeting(machines: MachineGroup) -> SeveralMachines:
    address = machine.own_address()
    if address is None:
        raise ConfigError(
            "--nnodes: several networks, or none: GLOO_SOCKET_IFNAME in the environment names the "
            f"one of the machines; here are {', '.join(machine.addresses())}"
        )
    limits = machines.least, machines.most
    number = f"at least {machines.least}" if machines.is_elastic else str(machines.least)
    say(f"this machine, {address}, waits until {number} are in {machines.folder}")
    return SeveralMachines.at(machines.folder, limits, address, machines.patience_s)


def _agent(
    command: Sequence[str],
    num_ranks: int,
    max_restarts: int,
    meeting: OneMachine | SeveralMachines,
    machines: MachineGroup | None,
    folder: Path,
) -> Agent:
    return Agent(
        WorkerSpec(
            role="default",
            local_world_size=num_ranks,
            entrypoint=command[0],
            args=tuple(command[1:]),
            rdzv_handler=meeting,
            max_restarts=max_restarts,
            monitor_interval=0.1,
        ),
        # The default creates an empty directory in every run and leaves it behind.
        DefaultLogsSpecs(log_dir=str(folder)),
        exit_barrier_timeout=_EXIT_BARRIER_S,
        folder=folder,
        elastic=machines is not None and machines.is_elastic,
        patience_s=math.inf if machines is None else machines.patience_s,
    )


def _why_apart(error: RendezvousError, machines: MachineGroup) -> str:
    """What to say when the launchers did not meet, or lost each other."""
    if isinstance(error, RendezvousTimeoutError):
        few = f"fewer than {machines.least} machines came within {machines.patience_s:.0f} s"
        return f"{few} (--rdzv-timeout); {_RESUME}"
    if isinstance(error, RendezvousClosedError):
        return "the run has ended on another machine; see its log"
    return f"the launchers lost each other: {error}; {_RESUME}, on all machines"


class Notice(Watch):
    """Asks this process to stop once `command` says that the machine is about to be taken away.

    Raises:
        ConfigError: there is no such command.
    """

    def __init__(self, command: str) -> None:
        super().__init__(interval_s=_NOTICE_S)
        self._command = command
        if self._ends_with() in (126, 127):  # by the shell: it cannot be run, it is not there
            raise ConfigError(f"--notice: cannot be run: {command}")

    def _ends_with(self) -> int | None:
        """Its exit code; None if it takes too long."""
        with suppress(subprocess.TimeoutExpired):
            options = {"stdin": subprocess.DEVNULL, "capture_output": True}
            return subprocess.run(
                self._command, shell=True, timeout=_NOTICE_S, **options
            ).returncode

    def _look(self) -> None:
        if self._ends_with() == 0:
            say(f"this machine is about to be taken away ({self._command}): saving")
            os.kill(os.getpid(), signal.SIGTERM)
            self._over.set()


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
    one_machine: bool = False,
    trained: bool = False,
) -> int:
    """The exit code of the run; prints what no rank could print itself.

    statuses: of the ranks, by time.
    failures: the exit code of each process that failed, as far as known; negative: a signal.
    stopped_by: the signal that the launcher got and passed on to the ranks.
    killed: the ranks that the watchdog killed.
    one_machine: no rank is elsewhere.
    trained: they had steps to save.
    """
    for status in statuses:
        if status.code not in (None, EXIT_OK, *STOPPED) and not status.consequence:
            return status.code  # the first cause; its rank has printed it
    if stopped_by is not None:
        late = next((status.rank for status in statuses if status.code is None), None)
        if late is not None and stopped_by != signal.SIGINT:
            say(f"rank {late} did not stop in {SHUTDOWN_TIMEOUT_S} s and was killed; {_RESUME}")
            return EXIT_SYSTEM
        have_saved = any(status.code in STOPPED for status in statuses)
        if trained and not have_saved and any(status.consequence for status in statuses):
            say(f"the ranks lost each other before they could save; {_RESUME}")
            return EXIT_SYSTEM
        # Ranks that stop in good order say so; before and besides training they just end.
        if not have_saved:
            say(signals.word_for(stopped_by))
        return signals.exit_code(stopped_by)
    explained = {status.rank for status in statuses if status.code is not None}
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
        if status.code in STOPPED:
            return status.code
    if any(status.consequence for status in statuses):
        elsewhere = "lost connection to another machine; see its log for the cause"
        say(f"the ranks lost each other; {_RESUME}" if one_machine else elsewhere)
    return EXIT_SYSTEM if failures else EXIT_OK


def _silent_death(rank: int, code: int) -> int:
    """The exit code of the run after a rank ended without writing its status."""
    if -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # before training began
        return signals.exit_code(-code)
    if code in STOPPED:
        return code
    say(f"rank {rank} {end_of(code)}; the other ranks were stopped; {_RESUME}")
    return EXIT_SYSTEM
