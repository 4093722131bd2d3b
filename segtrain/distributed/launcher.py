"""Starts the ranks of this machine by torch elastic, watches them, and tells how the run ended."""

import dataclasses
import logging
import os
import shutil
import signal
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any, NamedTuple

from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
from torch.distributed.elastic.multiprocessing.api import SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.elastic.rendezvous import RendezvousError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from segtrain.distributed import machine, rendezvous, signals
from segtrain.distributed.liveness import (
    FOLDER_VARIABLE,
    ONE_MACHINE,
    ExitStatus,
    Heartbeat,
    Watchdog,
    read_exit_statuses,
    read_heartbeats,
)
from segtrain.errors import EXIT_INTERRUPTED, EXIT_OK, EXIT_SYSTEM, EXIT_TERMINATED, ExecutionError
from segtrain.text import say

_STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)
_RESUME = "resume from the last checkpoint by --resume"

# From the first signal to SIGKILL: time enough to finish a step and write a checkpoint.
_SHUTDOWN_TIMEOUT_S = 120


class MachineGroup(NamedTuple):
    """Several machines on which the same command is started."""

    num: int
    endpoint: str  # HOST:PORT where their launchers meet
    node_rank: int  # of this machine; 0 serves the endpoint
    run_id: str  # names the run, if several meet at the same endpoint
    secret_file: Path  # the key of the run (see `shared_secret`)


def run_ranks(
    command: Sequence[str],
    num_ranks: int,
    *,
    max_restarts: int = 0,
    machines: MachineGroup | None = None,
) -> int:
    """Runs `command` in `num_ranks` processes here, waits for them; the exit code of the run.

    After a failure all ranks are started again, at most `max_restarts` times.

    Raises:
        ExecutionError: the launchers of several machines did not meet or lost each other.
    """
    with tempfile.TemporaryDirectory(prefix="segtrain-", ignore_cleanup_errors=True) as directory:
        folder = Path(directory)
        _set_environment(folder, num_ranks, one_machine=machines is None)
        signal.signal(signal.SIGUSR1, lambda *_: _signal_ranks(signal.SIGUSR1, folder))
        signals.raise_on_stop_signal(
            lambda number: SignalException("asked to stop", sigval=signal.Signals(number)),
            kill=partial(_kill_ranks, folder),
        )
        failures, stopped_by, watchdog = {}, None, Watchdog(folder)
        try:
            config = _launch_config(num_ranks, max_restarts, machines, folder)
            with watchdog:
                elastic_launch(config, command[0])(*command[1:])
                signals.ignore_stop_signals()
        except ChildFailedError as error:
            failures = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException as error:
            stopped_by = error.sigval
        except RendezvousError as error:
            raise ExecutionError(
                f"the launchers did not meet, or lost each other: {error}; resume from the last "
                "checkpoint by --resume, on all machines"
            ) from error
        signals.ignore_stop_signals()
        phases = {heartbeat.phase for heartbeat in read_heartbeats(folder)}
        return exit_code_of(
            read_exit_statuses(folder),
            failures,
            stopped_by,
            killed=watchdog.killed,
            one_machine=machines is None,
            trained=not phases.isdisjoint(("training", "checkpoint")),
        )


def _set_environment(folder: Path, num_ranks: int, *, one_machine: bool) -> None:
    """Sets what the ranks inherit from this process."""
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, machine.num_cores() // num_ranks)))
    os.environ |= {FOLDER_VARIABLE: str(folder), signals.LAUNCHER: str(os.getpid())}
    if one_machine:
        os.environ[ONE_MACHINE] = "1"
    # Set, it would have rank 0 serve a store of its own, on every interface.
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    # torch elastic logs failures as tracebacks; the ranks have told them already.
    logging.disable()


def _launch_config(
    num_ranks: int, max_restarts: int, machines: MachineGroup | None, folder: Path
) -> LaunchConfig:
    rendezvous.register()
    options: dict[str, Any] = {
        "nproc_per_node": num_ranks,
        "max_restarts": max_restarts,
        "monitor_interval": 0.1,
        "start_method": "spawn",
        # The default creates an empty directory in every run and leaves it behind.
        "logs_specs": DefaultLogsSpecs(log_dir=str(folder)),
        # None: torch's handler raises at every signal, wherever the launcher is.
        "signals_to_handle": "",
    }
    # Older versions of torch have no shutdown_timeout and wait 30 s.
    if any(field.name == "shutdown_timeout" for field in dataclasses.fields(LaunchConfig)):
        options["shutdown_timeout"] = _SHUTDOWN_TIMEOUT_S
    if machines is None:
        return LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            run_id=uuid.uuid4().hex,
            rdzv_backend=rendezvous.ONE_MACHINE,
            # Otherwise torch looks up this machine's name, which fails on many laptops.
            local_addr="127.0.0.1",
            **options,
        )
    host, _, port = machines.endpoint.rpartition(":")
    host = host.strip("[]")
    all_here = rendezvous.is_loopback(host)  # several launchers on one machine
    return LaunchConfig(
        min_nodes=machines.num,
        max_nodes=machines.num,
        run_id=machines.run_id,
        rdzv_backend=rendezvous.MACHINES,
        rdzv_endpoint=machines.endpoint,
        rdzv_configs={
            "is_host": str(machines.node_rank == 0),
            "secret_file": str(machines.secret_file),
        },
        local_addr=host if all_here else machine.address_toward(host, int(port)),
        **options,
    )


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
        if status.code not in (None, EXIT_OK, *_STOPPED) and not status.consequence:
            return status.code  # the first cause; its rank has printed it
    if stopped_by is not None:
        late = next((status.rank for status in statuses if status.code is None), None)
        if late is not None and stopped_by != signal.SIGINT:
            say(f"rank {late} did not stop in {_SHUTDOWN_TIMEOUT_S} s and was killed; {_RESUME}")
            return EXIT_SYSTEM
        have_saved = any(status.code in _STOPPED for status in statuses)
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
        if status.code in _STOPPED:
            return status.code
    if any(status.consequence for status in statuses):
        elsewhere = "lost connection to another machine; see its log for the cause"
        say(f"the ranks lost each other; {_RESUME}" if one_machine else elsewhere)
    return EXIT_SYSTEM if failures else EXIT_OK


def _silent_death(rank: int, code: int) -> int:
    """The exit code of the run after a rank ended without writing its status."""
    if -code in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # before training began
        return signals.exit_code(-code)
    if code in _STOPPED:
        return code
    how = f"was ended by {signal.Signals(-code).name}" if code < 0 else f"exited with {code}"
    hint = " (out of memory?)" if -code == signal.SIGKILL else ""
    say(f"rank {rank} {how}{hint}; the other ranks were stopped; {_RESUME}")
    return EXIT_SYSTEM
