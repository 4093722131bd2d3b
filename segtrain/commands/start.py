"""`segtrain train`: the config and the run that its arguments mean, and which process trains it."""

import argparse
import os
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING

from segtrain.commands import from_desk, launch
from segtrain.commands.addresses import is_restart
from segtrain.commands.config import show_warnings
from segtrain.commands.run_target import Target, resolve_run
from segtrain.config import Config, load_config
from segtrain.config.experiment import wrong_units
from segtrain.distributed.layout import batch_findings
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.run import directory as run_directory
from segtrain.run.remote_run import upload_of
from segtrain.run.trackers import check_installed
from segtrain.text import say

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from segtrain.trainer.setup import TrainRequest

# A file server gives the locks of a machine that has died free after 90 s.
_LOCK_PATIENCE_S = 120.0


def main(args: argparse.Namespace) -> int:
    """Trains as a rank, alone, or by starting ranks; returns the exit code."""
    signal.signal(signal.SIGUSR1, signal.SIG_IGN)  # nothing to save yet
    is_first = "RANK" not in os.environ  # what is said here is said once, not by every rank
    is_rank = launch.adopt_environment()
    # 1. Which config, which run?
    target, resume = _find_target(args, is_first=is_first, is_rank=is_rank)
    if target.note and is_first:
        say(target.note)
    args.output = target.directory
    config = load_config(target.config, args.set)
    saved = resume and run_directory.has_saved(target.directory)
    # 2. Do the options fit together?
    _check_options(args, config)
    if not saved and (wrong := wrong_units(config)):
        raise ConfigError("\n".join(wrong))
    if is_first:
        show_warnings(config)
    fits = args.fit or args.fit_precision
    if fits and is_rank:
        raise ConfigError(
            "--fit: tries this machine before it starts the ranks, which torchrun and srun do not "
            "allow; set model.recompute or train.virtual_ranks yourself"
        )
    if fits and saved:
        config = _refined(args, target, from_desk.kept_fit(target.directory))
    # 3. A rank trains, and so does a process without others; otherwise it starts them.
    if not is_rank:
        # Before anything slow; the ranks check the directory again.
        run_directory.check_directory(target.directory, config, resume=resume)
        num_ranks = launch.num_ranks_here(args.nproc, args.device)
        starts_ranks = num_ranks > 1 or args.max_restarts > 0
        if starts_ranks and (wrong := batch_findings(config, num_ranks)):
            raise ConfigError("\n".join(wrong))
        if fits and not saved:
            options = from_desk.fitted(args, target.config, config, num_ranks)
            config = _refined(args, target, options)
        if starts_ranks:
            return launch.start_ranks(args, num_ranks)
    # Only now, since it imports torch: a launcher of ranks has returned by here.
    from segtrain.trainer.loop import run

    request = _request(args, config, target.directory, resume=resume)
    upload = upload_of(target.directory)
    if upload is None:
        return run(request)
    with upload:
        code = run(replace(request, saved=upload.put))
        upload.stopped = code != EXIT_OK
    return code


def _find_target(args: argparse.Namespace, *, is_first: bool, is_rank: bool) -> tuple[Target, bool]:
    """What to train, and whether it goes on; `args` get the config and options that this means."""
    resume = is_restart(args)
    if args.finish is None:
        args.config = from_desk.named_config(args.config, may_write=is_first)
        return resolve_run(args.config, resume=args.resume, output=args.output), resume
    target = from_desk.branch(args, resume=resume, alone=not is_rank)
    args.resume = True
    return target, True


def _check_options(args: argparse.Namespace, config: Config) -> None:
    """ConfigError for an option that serves nothing here."""
    if args.accept_changes and not args.resume:
        raise ConfigError("--accept-changes: serves only --resume")
    if args.requeue and "SLURM_JOB_ID" not in os.environ:
        raise ConfigError("--requeue: this is no SLURM job (SLURM_JOB_ID is not set)")
    if args.until is not None and args.until > config.train.steps:
        raise ConfigError(f"--until: {args.until} is more than train.steps, {config.train.steps}")
    check_installed(config.log.trackers)


def _request(
    args: argparse.Namespace, config: Config, directory: Path, *, resume: bool
) -> "TrainRequest":
    """What this process is to train."""
    from segtrain.distributed.process_group import device_for
    from segtrain.trainer.setup import TrainRequest

    return TrainRequest(
        config,
        directory,
        device_for(args.device),
        resume=resume,
        accept_changes=args.accept_changes,
        requeue=args.requeue,
        until=args.until,
        report=from_desk.write_page,
        lock_patience_s=_LOCK_PATIENCE_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0,
    )


def _refined(args: argparse.Namespace, target: Target, found: list[str]) -> Config:
    """The config with the options that --fit has found; ranks get them by --set."""
    args.set = [*args.set, *found]
    words = [word for word in args.argv if word not in ("--fit", "--fit-precision")]
    args.argv = [*words, *(f"--set={option}" for option in found)]
    return load_config(target.config, args.set)
