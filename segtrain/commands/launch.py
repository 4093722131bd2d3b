"""Decides which process does the work of a command: this one, or ranks that it starts.

Ranks run the same command again, with RANK and the rest of torch's variables set. Under torchrun or
srun these exist already and nothing is started.
"""

import argparse
import os
import signal
import sys
from functools import partial
from importlib import import_module
from pathlib import Path

import segtrain
from segtrain.distributed import signals, slurm
from segtrain.errors import ConfigError

_GROUP_VARIABLES = ("RANK", "WORLD_SIZE", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


def on_this_machine(place: str, args: argparse.Namespace) -> int:
    """Runs a command as a rank, alone, or as the launcher of ranks; returns the exit code.

    place: the function of a rank, "module:name" of segtrain, which is imported only there.
    """
    if not adopt_environment():
        num_ranks = num_ranks_here(args.nproc, args.device)
        if num_ranks > 1:
            return start_ranks(args, num_ranks)
        # Only where no other rank is: a rank that waits inside a library would not come to it.
        signal.signal(signal.SIGTERM, signals.exit_at_once)
    module, name = place.split(":")
    return getattr(import_module(f"segtrain.{module}"), name)(args)


evaluate = partial(on_this_machine, "commands.evaluate:run_eval")


def adopt_environment() -> bool:
    """Whether this process is a rank already; srun's variables are translated into torch's."""
    environ = os.environ
    if "RANK" not in environ and "WORLD_SIZE" not in environ:
        if not slurm.is_task(environ):
            return False
        environ.update(slurm.variables(environ))
        return True
    # Half of a group would wait for ranks that nobody has started.
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


def num_ranks_here(nproc: str, device: str) -> int:
    """Ranks on this machine: a number, or for "auto" one for each CUDA device that is used."""
    if nproc != "auto":
        return int(nproc)
    import torch

    # The driver counts devices although torch cannot use them.
    is_used = device != "cpu" and torch.cuda.is_available()
    return max(1, torch.cuda.device_count()) if is_used else 1


def start_ranks(args: argparse.Namespace, num_ranks: int) -> int:
    """Runs this command again in `num_ranks` ranks; returns the exit code of the run."""
    from segtrain.distributed.launcher import run_ranks

    command = [*interpreter(), "-m", "segtrain", *args.argv]
    return run_ranks(command, num_ranks, max_restarts=getattr(args, "max_restarts", 0))


# Where the names of options stand that a program may give to something of its own.
_CHOICES = (
    ("segtrain.training.losses.total", "LOSSES"),
    ("segtrain.training.losses.total", "MULTILABEL_LOSSES"),
    ("segtrain.data.read.label_formats", "LABEL_FORMATS"),
    ("segtrain.task.tasks", "TASKS"),
    ("segtrain.models", "BACKBONES"),
    ("segtrain.models", "MODELS"),
    ("segtrain.data.read.layouts", "LAYOUTS"),
)


def interpreter() -> list[str]:
    """The command line of Python for a process of segtrain's own.

    `-P` keeps the current folder out of its import path, or it would import a yaml.py that happens
    to lie there. Only a checkout that was not installed needs the folder to find segtrain.

    Raises:
        ConfigError: this process has entries in tables of choices that a new one would not have.
    """
    for module, table in _CHOICES:
        loaded = sys.modules.get(module)
        if loaded is not None and (changed := getattr(loaded, table).changed()):
            raise ConfigError(
                f"{module}.{table}: {', '.join(changed)} changed in this process, and those that "
                "segtrain starts would train without the change: call segtrain.cli.main(['train', "
                "CONFIG, '--nproc', '1']), which starts none, or change segtrain's own files"
            )
    home = Path(segtrain.__file__).resolve().parent.parent
    first, *others = [Path(entry).resolve() for entry in sys.path]
    needs_it = not sys.flags.safe_path and home == first and home not in others
    return [sys.executable, *([] if needs_it else ["-P"])]
