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


def run(
    config: Config,
    directory: Path,
    *,
    device: torch.device,
    resume: bool,
    accept_changes: bool = False,
    requeue: bool = False,
    until: int | None = None,
) -> int:
    """Trains `config` into `directory` and returns the exit code (collective).

    Args:
        resume: go on with the run in `directory` if it has saved a checkpoint. One rank may ask for
            all: of several machines, only one that was started anew knows that this is a restart.
        accept_changes: go on even if it was started with another config or other data.
        requeue: on SIGUSR1 save, requeue the SLURM job and stop; otherwise only save.
        until: save after this step, at most train.steps, and stop.
    """
    if device.type == "cpu":
        keep_freed_memory()
    heartbeat.beat("setup", 0)
    group = process_group(device, timeout_s=config.train.timeout_s)
    with group, float32_products(config.train), ExitStack() as stack:
        resume = any(dist.all_gather_object(resume))
        order = Order(config, directory, device, resume, accept_changes, requeue, until)
        this = set_up(order, stack)
        with this.log:
            loop.train(this)
            return _leave(this) if this.step_sync.stopped else EXIT_OK


def _leave(run: Run) -> int:
    """The exit code after a signal, which may have reached one rank only (collective)."""
    numbers = dist.all_gather_object(run.signal_flags.signal)
    number = next(number for number in numbers if number is not None)
    where = f"after step {run.state.step}, which is saved"
    run.log.lines([f"stopped by {Signals(number).name} {where}; go on with --resume"])
    if number == SIGUSR1:
        dist.run_on_rank0(slurm.requeue)
    return exit_code(number)
