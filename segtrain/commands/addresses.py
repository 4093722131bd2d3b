"""Runs that a command line names by an address, such as `s3://bucket/runs/mine`."""

import argparse
import os
from typing import Any

from segtrain.distributed.liveness import ATTEMPT_VARIABLE
from segtrain.errors import ConfigError
from segtrain.text import say, scheme_of

# The launcher and torchrun after a failure and SLURM after a requeue start the same command again.
_RESTART_COUNTS = (ATTEMPT_VARIABLE, "TORCHELASTIC_RESTART_COUNT", "SLURM_RESTART_COUNT")


def is_restart(args: argparse.Namespace) -> bool:
    """Whether a training goes on, if it had begun."""
    return args.resume or any(os.environ.get(name, "0") != "0" for name in _RESTART_COUNTS)


def fetch_runs(args: argparse.Namespace) -> None:
    """Puts folders of this machine in the place of the addresses of runs in `args`."""
    for key in ("config", "checkpoint", "source", "runs", "others", "output"):
        if isinstance(value := getattr(args, key, None), list):
            setattr(args, key, [_fetched(args, key, entry) for entry in value])
        elif value is not None:
            setattr(args, key, _fetched(args, key, value))


def _fetched(args: argparse.Namespace, key: str, value: Any) -> Any:
    if not isinstance(value, str) or not scheme_of(value):
        return value
    from segtrain.run.directory import is_run
    from segtrain.run.remote_run import run_folder

    trains = args.function == "commands.start:main"
    url, slash, file = value.removesuffix("/config.yaml").partition("/checkpoints/")
    begins = key == "output" and not is_restart(args)
    one_of = () if trains or file else ("best.pt", "last.pt")
    directory = run_folder(url, begins=begins, one_of=one_of)
    if key != "output" and not is_run(directory):
        raise ConfigError(f"{url}: no run is there")
    if "RANK" not in os.environ:  # ranks would repeat what their launcher has said
        say(f"{url}: on this machine {directory}")
    path = directory / slash.strip("/") / file
    return path if key in ("runs", "output") else str(path)
