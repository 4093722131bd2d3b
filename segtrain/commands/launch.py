"""Decides which process does the work of a command: this one, or ranks that it starts.

Ranks run the same command again, with RANK and the rest of torch's variables set. Under torchrun or
srun these exist already and nothing is started.
"""

import argparse
import os
import signal
import sys
from collections.abc import Mapping
from importlib import import_module
from pathlib import Path

import segtrain
from segtrain.config import Config
from segtrain.config.experiment import wrong_units
from segtrain.distributed import signals, slurm
from segtrain.distributed.partition import batch_findings
from segtrain.errors import ConfigError
from segtrain.run import directory as run_directory
from segtrain.text import say

# In the run directory: the key with which the launchers of several machines sign.
SECRET_FILE = ".secret"

_GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def train(args: argparse.Namespace, config: Config) -> int:
    """`segtrain train` as a rank, alone, or as the launcher of ranks; returns the exit code."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing to save yet
    # Torch elastic after a failure and SLURM after a requeue start the same command line again.
    counts = ("TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")
    restarted = any(os.environ.get(name, "0") != "0" for name in counts)
    resume, directory = args.resume or restarted, Path(args.output)

    # 1. Refuse options that do not fit together, and a config in wrong units.
    if args.accept_changes and not args.resume:
        raise ConfigError("--accept-changes: serves only --resume")
    if args.requeue and "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("--requeue: this is no SLURM job (SLURM_JOB_ID is not set)")
    if args.until is not None and args.until > config.train.steps:
        raise ConfigError(f"--until: {args.until} is more than train.steps, {config.train.steps}")
    wrong = wrong_units(config)
    if wrong and not (resume and run_directory.has_saved(directory)):
        raise ConfigError("\n".join(wrong))

    # 2. A rank trains.
    if adopt_environment():
        return _run_training(args, config, resume)

    # 3. Refuse the run directory before anything slow; the ranks check it again.
    for line in wrong:
        say(f"warning: {line}")
    run_directory.check_directory(
        directory, config, resume=resume, accept_changes=args.accept_changes
    )

    # 4. Without other ranks, this process trains; otherwise it starts them.
    num_ranks = num_ranks_here(args.nproc)
    if num_ranks == 1 and args.nnodes == 1:
        return _run_training(args, config, resume)
    findings = batch_findings(config, args.nnodes * num_ranks, num_ranks)
    if findings:
        raise ConfigError("\n".join(findings))
    return _start_ranks(args, num_ranks)


def evaluate(args: argparse.Namespace) -> int:
    """`segtrain eval`, likewise."""
    return _on_this_machine(args, "evaluate:run_eval")


def verify(args: argparse.Namespace) -> int:
    """`segtrain verify`, likewise."""
    return _on_this_machine(args, "verify:run_verify")


def bench(args: argparse.Namespace) -> int:
    """`segtrain bench`, likewise."""
    return _on_this_machine(args, "bench:run_bench")


def _on_this_machine(args: argparse.Namespace, place: str) -> int:
    """Starts ranks, or is one and calls the function `module:name` of this folder."""
    if not adopt_environment():
        num_ranks = num_ranks_here(args.nproc)
        if num_ranks > 1:
            return _start_ranks(args, num_ranks)
        # Only where no other rank is: a rank that waits inside a library would not come to it.
        signal.signal(signal.SIGTERM, signals.exit_at_once)
    module, name = place.split(":")
    return getattr(import_module(f"segtrain.commands.{module}"), name)(args)


def adopt_environment(environ: Mapping[str, str] = os.environ) -> bool:
    """Whether this process is a rank already; srun's variables are translated into torch's."""
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        if not slurm.is_task(environ):
            return False
        os.environ.update(slurm.variables(environ))
        return True
    missing = [name for name in _GROUP_VARIABLES if name not in environ]
    if missing:
        raise ConfigError(
            f"environment: RANK or WORLD_SIZE is set but not {', '.join(missing)}: start the ranks "
            "by --nproc, torchrun or srun, or unset all of them"
        )
    slurm.number(environ, "LOCAL_RANK"), slurm.number(environ, "MASTER_PORT")
    rank, size = slurm.number(environ, "RANK"), slurm.number(environ, "WORLD_SIZE")
    if rank >= size:
        raise ConfigError(f"environment: RANK: expected less than WORLD_SIZE={size}, got {rank}")
    return True


def num_ranks_here(nproc: str) -> int:
    """Ranks on this machine: a number, or for "auto" one for each CUDA device."""
    if nproc != "auto":
        return int(nproc)
    import torch

    return max(1, torch.cuda.device_count())


def _run_training(args: argparse.Namespace, config: Config, resume: bool) -> int:
    from segtrain.commands.train.loop import run
    from segtrain.distributed.process_group import device_for

    return run(
        config,
        Path(args.output),
        device=device_for(args.device),
        resume=resume,
        accept_changes=args.accept_changes,
        requeue=args.requeue,
        until=args.until,
    )


def _start_ranks(args: argparse.Namespace, num_ranks: int) -> int:
    """Runs this command again in `num_ranks` ranks; returns the exit code of the run."""
    # Importing torch takes seconds, and Ctrl-C in the midst of it would show a traceback.
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, signals.exit_at_once)
    from segtrain.distributed.launcher import Machines, run_ranks

    command = [sys.executable, *safe_path(), "-m", "segtrain", *args.argv]
    machines = None
    if getattr(args, "nnodes", 1) > 1:  # only `segtrain train` has it
        run_id, secret = args.rdzv_id or "segtrain", Path(args.output, SECRET_FILE)
        machines = Machines(args.nnodes, args.rdzv_endpoint, args.node_rank, run_id, secret)
    max_restarts = getattr(args, "max_restarts", 0)
    return run_ranks(command, num_ranks, max_restarts=max_restarts, machines=machines)


def safe_path() -> list[str]:
    """Python's option that keeps the current folder out of the ranks' import path.

    Otherwise the ranks would import a yaml.py that happens to lie there. Only a checkout that was
    not installed needs the current folder to find segtrain.
    """
    home = Path(segtrain.__file__).resolve().parent.parent
    first, *others = [Path(entry).resolve() for entry in sys.path]
    needs_it = not sys.flags.safe_path and home == first and home not in others
    return [] if needs_it else ["-P"]
