"""Ranks: found in the environment, or started here through torch elastic.

`segtrain train --nproc 4` starts four processes that run the same command again, with RANK and the
rest of torch's variables set. Under torchrun or srun these exist already and nothing is started.
"""

import argparse
import dataclasses
import logging
import os
import signal
import subprocess
import sys
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import TYPE_CHECKING

from segtrain.config import Config
from segtrain.errors import (
    EXIT_INTERRUPTED,
    EXIT_OK,
    EXIT_SYSTEM,
    EXIT_TERMINATED,
    ConfigError,
)

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import LaunchConfig

_GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")

# Exit codes that a rank chose itself and that therefore say more than "a rank failed".
_OWN_CODES = (2, 3, 4, 5, EXIT_INTERRUPTED, EXIT_TERMINATED)

# From the first signal to SIGKILL: time enough to finish a step and write a checkpoint.
SHUTDOWN_TIMEOUT_S = 120


def train(args: argparse.Namespace, config: Config) -> int:
    """`segtrain train`: as a rank, alone, or as the launcher of ranks; returns the exit code."""
    from segtrain import rundir

    directory = Path(args.output or Path("runs") / Path(args.config).stem)
    if not adopt_environment():
        rundir.check_directory(directory, config, resume=args.resume)
        if wants_ranks(args):
            return start_ranks(args)
    from segtrain import dist
    from segtrain.train import run

    return run(config, directory, device=dist.device_for(args.device), resume=args.resume)


def evaluate(args: argparse.Namespace) -> int:
    """`segtrain eval`, likewise."""
    if not adopt_environment() and wants_ranks(args):
        return start_ranks(args)
    from segtrain.evaluate import run_eval

    return run_eval(args)


def adopt_environment(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank already; srun's variables are translated into torch's.

    Raises:
        ConfigError: only some of torch's variables are set.
    """
    present = [name for name in _GROUP_VARIABLES if name in environ]
    if "RANK" not in environ and int(environ.get("SLURM_NTASKS", "1")) > 1:
        os.environ.update(slurm_variables(environ))
        return True
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        return False
    missing = [name for name in _GROUP_VARIABLES if name not in present]
    if missing:
        raise ConfigError(
            f"environment: {', '.join(present)} set but not {', '.join(missing)}: start the ranks by "
            "--nproc, torchrun or srun, or unset all of them"
        )
    return True


def slurm_variables(environ: Mapping[str, str]) -> dict[str, str]:
    """torch's variables for a task that srun started.

    The first host of the job is the meeting point; the port comes from the job's number, so that two
    jobs on one host do not meet.
    """
    port = 20_000 + int(environ["SLURM_JOB_ID"]) % 20_000
    return {
        "RANK": environ["SLURM_PROCID"],
        "WORLD_SIZE": environ["SLURM_NTASKS"],
        "LOCAL_RANK": environ["SLURM_LOCALID"],
        "LOCAL_WORLD_SIZE": environ.get("SLURM_NTASKS_PER_NODE", "1"),
        "MASTER_ADDR": environ.get("MASTER_ADDR") or _first_host(environ["SLURM_JOB_NODELIST"]),
        "MASTER_PORT": environ.get("MASTER_PORT", str(port)),
    }


def _first_host(nodes: str) -> str:
    try:
        listed = subprocess.run(
            ["scontrol", "show", "hostnames", nodes], capture_output=True, text=True, check=True
        )
    except (OSError, subprocess.CalledProcessError) as error:
        raise ConfigError(
            f"environment: cannot tell the first host of {nodes!r} ({error}); set MASTER_ADDR"
        ) from None
    return listed.stdout.split()[0]


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
    from torch.distributed.elastic.multiprocessing.api import SignalException
    from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
    from torch.distributed.launcher.api import elastic_launch

    command = [sys.executable, "-m", "segtrain", *args.argv]
    ranks = num_ranks_here(args.nproc)
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    os.environ.setdefault("OMP_NUM_THREADS", str(max(1, cores // ranks)))
    # The agent reports failures as tracebacks; segtrain's ranks have said what is wrong already.
    logging.getLogger("torch.distributed.elastic").setLevel(logging.CRITICAL)
    try:
        elastic_launch(_launch_config(args, ranks), command[0])(*command[1:])
    except ChildFailedError as error:
        return _exit_code(error)
    except SignalException as error:
        return EXIT_INTERRUPTED if error.sigval == signal.SIGINT else EXIT_TERMINATED
    return EXIT_OK


def _launch_config(args: argparse.Namespace, ranks: int) -> "LaunchConfig":
    from torch.distributed.launcher.api import LaunchConfig

    nodes = getattr(args, "nnodes", 1)
    alone = nodes == 1
    options = {
        "min_nodes": nodes,
        "max_nodes": nodes,
        "nproc_per_node": ranks,
        "run_id": uuid.uuid4().hex if alone else args.rdzv_id,
        "rdzv_backend": "c10d",
        # Port 0 is a free one, so that any number of runs fit on a machine.
        "rdzv_endpoint": "127.0.0.1:0" if alone else args.rdzv_endpoint,
        "max_restarts": getattr(args, "max_restarts", 0),
        "monitor_interval": 0.1,
        "start_method": "spawn",
        # Without it torch looks this machine's name up, which fails on many laptops.
        "local_addr": "127.0.0.1" if alone else None,
        "shutdown_timeout": SHUTDOWN_TIMEOUT_S,
    }
    # Older versions of torch lack the last one and wait 30 seconds.
    known = {field.name for field in dataclasses.fields(LaunchConfig)}
    return LaunchConfig(**{key: value for key, value in options.items() if key in known})


def _exit_code(error: "ChildFailedError") -> int:
    """The code of the rank that failed first; what is not one of segtrain's is a system failure."""
    first_rank, failure = error.get_first_failure()
    if failure.exitcode in _OWN_CODES:
        return failure.exitcode
    how = (
        f"was ended by {signal.Signals(-failure.exitcode).name}"
        if failure.exitcode < 0
        else f"ended with exit code {failure.exitcode}"
    )
    print(
        f"segtrain: rank {first_rank} {how}; the other ranks were stopped. The last checkpoint is "
        "whole: go on with --resume",
        file=sys.stderr,
    )
    return EXIT_SYSTEM
