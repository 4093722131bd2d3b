"""`segtrain train` on one rank: set up, train, leave. Rank 0 alone writes files."""

from contextlib import ExitStack
from pathlib import Path
from signal import SIGUSR1, Signals

import torch

from segtrain.commands.train import loop
from segtrain.commands.train.setup import Order, Run, set_up
from segtrain.config import Config
from segtrain.distributed import collectives as dist
from segtrain.distributed import heartbeat, slurm
from segtrain.distributed.malloc import keep_freed_memory
from segtrain.distributed.process_group import process_group
from segtrain.distributed.signals import exit_code
from segtrain.errors import EXIT_OK
from segtrain.models.precision import float32_products
from segtrain.run import directory as run_directory


def run(
    config: Config,
    directory: Path,
    *,
    device: torch.device,
    resume: bool,
    accept_changes: bool = False,
    restarted: bool = False,
    requeue: bool = False,
    until: int | None = None,
) -> int:
    """Trains `config` into `directory` and returns the exit code (collective).

    Args:
        resume: go on with the run in `directory`, which must be there.
        accept_changes: go on even if it was started with another config or other data.
        restarted: go on with it if it is there.
        requeue: on SIGUSR1 save, requeue the SLURM job and stop; otherwise only save.
        until: save after this step, at most train.steps, and stop.
    """
    if device.type == "cpu":
        keep_freed_memory()
    heartbeat.beat("setup", 0)
    group = process_group(device, timeout_s=config.train.timeout_s)
    with group, float32_products(config.train), ExitStack() as stack:
        resume = _all_resume(directory, resume, restarted)
        order = Order(config, directory, device, resume, accept_changes, requeue, until)
        this = set_up(order, stack)
        with this.log:
            loop.train(this)
            return _leave(this) if this.step_sync.stopped else EXIT_OK


def _all_resume(directory: Path, resume: bool, restarted: bool) -> bool:
    """Whether the ranks go on with a run: all of them or none (collective).

    Of several machines, only one that was started anew knows that this is a restart.
    """
    resumes, restarts = zip(*dist.all_gather_object((resume, restarted)), strict=True)
    if any(resumes) or not any(restarts):
        return any(resumes)
    return dist.run_on_rank0((directory / run_directory.CONFIG).exists)


def _leave(run: Run) -> int:
    """The exit code after a signal, which may have reached one rank only (collective)."""
    numbers = dist.all_gather_object(run.signal_flags.signal)
    number = next(number for number in numbers if number is not None)
    where = f"after step {run.state.step}, which is saved"
    run.log.lines([f"stopped by {Signals(number).name} {where}; go on with --resume"])
    if number == SIGUSR1:
        dist.run_on_rank0(slurm.requeue)
    return exit_code(number)
