"""Ranks: found in the environment, or started here through torch elastic.

`segtrain train --nproc 4` starts four processes that run the same command again, with RANK and the
rest of torch's variables set. Under torchrun or srun these exist already and nothing is started.
"""

import argparse
import dataclasses
import logging
import os
import shutil
import signal
import sys
import tempfile
import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, Any

import segtrain
from segtrain.config import Config
from segtrain.config.warnings import wrong_units
from segtrain.distributed import exit_status, heartbeat, network, signals, slurm
from segtrain.distributed.exit_status import ExitStatus
from segtrain.distributed.heartbeat import Heartbeat
from segtrain.distributed.partition import batch_findings
from segtrain.distributed.processes import children
from segtrain.distributed.watchdog import Watchdog
from segtrain.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SYSTEM,
    EXIT_TERMINATED,
    ConfigError,
    ExecutionError,
)
from segtrain.text import printable

if TYPE_CHECKING:
    from torch.distributed.launcher.api import LaunchConfig

# Of several machines: the key with which their launchers sign, in the directory of the run.
SECRET_FILE = ".secret"

_GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

_STOPPED = (EXIT_INTERRUPTED, EXIT_TERMINATED)

# From the first signal to SIGKILL: time enough to finish a step and write a checkpoint.
SHUTDOWN_TIMEOUT_S = 120


def train(args: argparse.Namespace, config: Config) -> int:
    """`segtrain train`: as a rank, alone, or as the launcher of ranks; returns the exit code.

    args: the command line, with the directory of the run in `output`.
    """
    from segtrain.run import directory as run_directory

    directory = Path(args.output)
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing to save yet
    if args.accept_changes and not args.resume:
        raise ConfigError("--accept-changes: serves only --resume")
    if args.requeue and "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("--requeue: this is no SLURM job (SLURM_JOB_ID is not set)")
    # With the same command line: by torch elastic after a failure, by SLURM after a requeue.
    starts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    restarted = any(os.environ.get(name, "0") != "0" for name in starts)
    wrong = wrong_units(config)
    if wrong and not (args.resume or restarted):
        raise ConfigError("\n".join(wrong))
    if not adopt_environment():
        for line in wrong:
            _say(f"warning: {line}")
        # Once more in `run`; here a refusal takes no time yet.
        run_directory.check_directory(
            directory,
            config,
            resume=args.resume or (restarted and (directory / run_directory.CONFIG).exists()),
            accept_changes=args.accept_changes,
        )
        if wants_ranks(args):
            ranks_here = num_ranks_here(args.nproc)
            findings = batch_findings(config, args.nnodes * ranks_here, ranks_here)
            if findings:
                raise ConfigError("\n".join(findings))
            return start_ranks(args)
    from segtrain.commands.train.run import run
    from segtrain.distributed import collectives as dist

    return run(
        config,
        directory,
        device=dist.device_for(args.device),
        resume=args.resume,
        accept_changes=args.accept_changes,
        restarted=restarted,
        requeue=args.requeue,
    )


def evaluate(args: argparse.Namespace) -> int:
    """`segtrain eval`, likewise."""
    if not adopt_environment() and wants_ranks(args):
        return start_ranks(args)
    from segtrain.commands.evaluate import run_eval

    return run_eval(args)


def adopt_environment(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank already; srun's variables are translated into torch's.

    Raises:
        ConfigError: only some of torch's or srun's variables are set, or they make no sense.
    """
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        if not slurm.is_task(environ):
            return False
        os.environ.update(slurm.variables(environ))
        return True
    missing = [name for name in _GROUP_VARIABLES if name not in environ]
    if missing:
        present = [name for name in _GROUP_VARIABLES if name in environ]
        raise ConfigError(
            f"environment: {', '.join(present)} set but not {', '.join(missing)}: start the ranks "
            "by --nproc, torchrun or srun, or unset all of them"
        )
    rank, world_size = slurm.number(environ, "RANK"), slurm.number(environ, "WORLD_SIZE")
    slurm.number(environ, "LOCAL_RANK"), slurm.number(environ, "MASTER_PORT")
    if rank >= world_size:
        raise ConfigError(
            f"environment: RANK: expected less than WORLD_SIZE={world_size}, got {rank}"
        )
    return True


def wants_ranks(args: argparse.Namespace) -> bool:
    """Whether the command line asks for more than this one process."""
    return num_ranks_here(args.nproc) > 1 or getattr(args, "nnodes", 1) > 1


def num_ranks_here(nproc: str) -> int:
    """Ranks on this machine: a number, or one a CUDA device for "auto"."""
    if nproc != "auto":
        return int(nproc)
    import torch

    return max(1, torch.cuda.device_count())


def start_ranks(args: argparse.Namespace) -> int:
    """Runs this command in every rank, waits for them and returns the exit code of the run."""
    # Importing torch takes seconds, in which Ctrl-C would end in the middle of some module of it.
    signal.signal(signal.SIGINT, _exit_at_once)
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.elastic.rendezvous import RendezvousError
    from torch.distributed.launcher.api import elastic_launch

    command = [sys.executable, *_safe_path(), "-m", "segtrain", *args.argv]
    ranks = num_ranks_here(args.nproc)
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, _num_cores() // ranks)))
    # The agent reports failures as tracebacks; segtrain's ranks have said what is wrong already.
    # Its loggers have levels of their own, and this process logs nothing else.
    logging.disable()
    # Set, it would have rank 0 serve a store of its own, on every interface.
    os.environ.pop("TORCH_DISABLE_SHARE_RDZV_TCP_STORE", None)
    several = getattr(args, "nnodes", 1) > 1
    statuses: dict[int, int] = {}
    stopped_by = None
    with tempfile.TemporaryDirectory(prefix="segtrain-", ignore_cleanup_errors=True) as directory:
        os.environ |= {exit_status.VARIABLE: directory, signals.LAUNCHER: str(os.getpid())}
        if not several:
            os.environ[exit_status.ONE_MACHINE] = "1"
        signal.signal(signal.SIGUSR1, lambda *_: _pass_on(signal.SIGUSR1, Path(directory)))
        hung = Watchdog(Path(directory))
        requests = signals.LauncherSignals(
            lambda number: SignalException("asked to stop", sigval=signal.Signals(number)),
            kill=lambda: _kill(Path(directory)),
        )
        requests.install()
        try:
            with hung:
                elastic_launch(_launch_config(args, ranks, directory), command[0])(*command[1:])
                requests.ignore()
        except ChildFailedError as error:
            statuses = {rank: failure.exitcode for rank, failure in error.failures.items()}
        except SignalException as error:
            stopped_by = error.sigval
        except RendezvousError as error:
            where = args.rdzv_endpoint if several else "this machine"
            raise ExecutionError(
                f"the launchers lost each other at {where}, or did not meet there: {error}; what "
                "was trained up to the last checkpoint goes on by --resume, on all machines"
            ) from error
        requests.ignore()
        notes = exit_status.read(Path(directory))
        return exit_code_of(notes, statuses, stopped_by, hung=hung.ended)


def _safe_path() -> list[str]:
    """The option of Python that keeps the current folder out of the ranks' search path.

    Otherwise a yaml.py that happens to lie there, in an unpacked data set say, would run in them.
    Only a package that is found in no other way, as in a checkout that was not installed, is
    searched for there; then this process has been, too.
    """
    home = Path(segtrain.__file__).resolve().parent.parent
    first, *others = [Path(entry).resolve() for entry in sys.path]
    needs_it = not sys.flags.safe_path and home == first and home not in others
    return [] if needs_it else ["-P"]


def _pass_on(number: int, directory: Path) -> None:
    ours = children(os.getpid())
    for rank in heartbeat.read(directory):
        if rank.pid in ours:  # else it is an old note
            with suppress(ProcessLookupError):
                os.kill(rank.pid, number)


def _kill(directory: Path) -> None:
    """Ends the ranks at once; those that have not said where they are end with this process."""
    _pass_on(signal.SIGKILL, directory)
    shutil.rmtree(directory, ignore_errors=True)


def _num_cores() -> int:
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _exit_at_once(number: int, _: FrameType | None) -> None:
    os._exit(signals.exit_code(number))


def _launch_config(args: argparse.Namespace, ranks: int, log_directory: str) -> "LaunchConfig":
    from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs
    from torch.distributed.launcher.api import LaunchConfig

    from segtrain.distributed import rendezvous

    rendezvous.register()
    nodes = getattr(args, "nnodes", 1)
    meeting = {} if nodes == 1 else _meeting_point(args)
    options = {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "nproc_per_node": ranks,
        "run_id": uuid.uuid4().hex,
        "rdzv_backend": rendezvous.ONE_MACHINE,
        "max_restarts": getattr(args, "max_restarts", 0),
        "monitor_interval": 0.1,
        "start_method": "spawn",
        # Otherwise it leaves an empty directory behind with every run.
        "logs_specs": DefaultLogsSpecs(log_dir=log_directory),
        # None: torch's handler raises an error at every signal, wherever it finds the launcher.
        "signals_to_handle": "",
        # Without it torch looks this machine's name up, which fails on many laptops.
        "local_addr": "127.0.0.1",
        "shutdown_timeout": SHUTDOWN_TIMEOUT_S,
        **meeting,
    }
    # Older versions of torch lack the last one and wait 30 seconds.
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{key: value for key, value in options.items() if key in known})


def _meeting_point(args: argparse.Namespace) -> dict[str, Any]:
    """How the launchers of several machines find each other."""
    from segtrain.distributed import rendezvous

    host, _, port = args.rdzv_endpoint.rpartition(":")
    host = host.strip("[]")
    # Who serves the meeting point; unsaid, torch compares names, which seldom are the right ones.
    serves = {} if args.node_rank is None else {"is_host": str(args.node_rank == 0)}
    inside = rendezvous.is_this_machine(host)  # several launchers on one machine
    return {
        "rdzv_backend": rendezvous.MACHINES,
        "run_id": args.rdzv_id or "segtrain",
        "rdzv_endpoint": args.rdzv_endpoint,
        "rdzv_configs": {**serves, "secret_file": str(Path(args.output, SECRET_FILE))},
        "local_addr": host if inside else network.address_toward(host, int(port)),
    }


def exit_code_of(
    outcomes: Sequence[ExitStatus],
    statuses: Mapping[int, int],
    stopped_by: int | None,
    hung: Sequence[Heartbeat] = (),
) -> int:
    """The exit code of the run; says what no rank could say itself.

    Args:
        outcomes: the notes that ranks have left.
        statuses: exit status of each rank that failed, as far as known; negative for a signal.
        stopped_by: the signal that the launcher got and passed on to the ranks.
        hung: the ranks that the launcher ended because they did not answer the others.
    """
    told = {note.rank for note in outcomes if note.code is not None}
    for note in outcomes:
        if note.code not in (None, EXIT_OK, *_STOPPED) and not note.consequence:
            return note.code  # the first cause; its rank has said what it is
    if stopped_by is not None:
        cut_off = [note.rank for note in outcomes if note.code is None]
        if cut_off and stopped_by != signal.SIGINT:
            _say(
                f"rank {cut_off[0]} did not stop within {SHUTDOWN_TIMEOUT_S} s and was killed; "
                "training goes on from the last checkpoint by --resume"
            )
            return EXIT_SYSTEM
        return signals.exit_code(stopped_by)
    ended_here = {rank.rank for rank in hung}
    for rank, status in statuses.items():
        if rank not in told | ended_here:
            return _silent_death(rank, status)
    for rank in hung:
        _say(
            f"rank {rank.rank} did not answer the others: it hung in {rank.phase}, after step "
            f"{rank.step}, and was ended; training goes on from the last checkpoint by --resume"
        )
        return EXIT_SYSTEM
    for note in outcomes:
        if note.code in _STOPPED:
            return note.code
    if any(note.consequence for note in outcomes):
        _say("the ranks lost ranks on another machine; see what is said there")
    return EXIT_SYSTEM if statuses else EXIT_OK


def _silent_death(rank: int, status: int) -> int:
    if -status in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP):  # before training began
        return signals.exit_code(-status)
    if status in _STOPPED:
        return status
    how = f"was ended by {signal.Signals(-status).name}" if status < 0 else f"exited with {status}"
    hint = " (out of memory?)" if -status == signal.SIGKILL else ""
    _say(
        f"rank {rank} {how}{hint}; the other ranks were stopped; training goes on from the last "
        "checkpoint by --resume"
    )
    return EXIT_SYSTEM


def _say(line: str) -> None:
    print(f"segtrain: {printable(line)}", file=sys.stderr)
