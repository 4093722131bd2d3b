"""`segtrain train`: the config and the run that its arguments mean, and which process trains it."""

import argparse
import os
import shlex
import signal
from dataclasses import replace
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from segtrain.commands import fit, launch
from segtrain.commands.addresses import is_restart
from segtrain.commands.config import find_config, show_warnings
from segtrain.config import Config, load_config
from segtrain.config.experiment import wrong_units
from segtrain.distributed.layout import batch_findings
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.run import directory as run_directory
from segtrain.run.remote_run import upload_of
from segtrain.run.trackers import check_installed
from segtrain.text import say

if TYPE_CHECKING:  # it imports torch, which takes seconds
    from segtrain.commands.train.setup import TrainRequest

_CHECKPOINT = ".pt"
# A file server gives the locks of a machine that has died free after 90 s.
_LOCK_PATIENCE_S = 120.0


class Target(NamedTuple):
    """The config to train, the directory of the run, and where the config is, if unexpected."""

    config: Path
    directory: Path
    note: str = ""


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
        config = _refined(args, target, fit.kept(target.directory))
    # 3. A rank trains, and so does a process without others; otherwise it starts them.
    if not is_rank:
        # Before anything slow; the ranks check the directory again.
        run_directory.check_directory(target.directory, config, resume=resume)
        num_ranks = launch.num_ranks_here(args.nproc, args.device)
        starts_ranks = num_ranks > 1 or args.max_restarts > 0
        if starts_ranks and (wrong := batch_findings(config, num_ranks)):
            raise ConfigError("\n".join(wrong))
        if fits and not saved:
            config = _refined(args, target, fit.fitted(args, target.config, config, num_ranks))
        if starts_ranks:
            return launch.start_ranks(args, num_ranks)
    from segtrain.commands.train.loop import run

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
        args.config = named_config(args.config, may_write=is_first)
        return resolve_run(args.config, resume=args.resume, output=args.output), resume
    target = _branch(args, resume=resume, alone=not is_rank)
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
    from segtrain.commands.train.setup import TrainRequest
    from segtrain.distributed.process_group import device_for

    return TrainRequest(
        config,
        directory,
        device_for(args.device),
        resume=resume,
        accept_changes=args.accept_changes,
        requeue=args.requeue,
        until=args.until,
        report=write_page,
        lock_patience_s=_LOCK_PATIENCE_S if "TORCHELASTIC_RUN_ID" in os.environ else 0.0,
    )


def write_page(directory: Path, device: Any) -> None:
    """Writes the page about a run, which is complete without it, whatever goes wrong."""
    from segtrain.results.report import evaluated, write_report
    from segtrain.run import console

    try:
        found = [evaluated(directory, device)]
        console.say(f"report     {write_report(directory, found, device)}")
    except Exception as error:
        again = f"segtrain report {run_directory.word_for(directory)}"
        console.say(f"warning: no report ({type(error).__name__}: {error}); try {again}")


def _refined(args: argparse.Namespace, target: Target, found: list[str]) -> Config:
    """The config with the options that --fit has found; ranks get them by --set."""
    args.set = [*args.set, *found]
    words = [word for word in args.argv if word not in ("--fit", "--fit-precision")]
    args.argv = [*words, *(f"--set={option}" for option in found)]
    return load_config(target.config, args.set)


def branch_directory(text: str, output: Path | None) -> Path:
    """Where `segtrain train TEXT --finish` makes the branch; ConfigError if TEXT is no run."""
    run = run_directory.run_of(Path(text))
    if run is None:
        raise ConfigError(f"{text}: expected a run, or a checkpoint of one, to finish")
    beside = Path(os.path.normpath(run / os.pardir))
    return output or beside / f"{run.resolve().name}_finish"


def _branch(args: argparse.Namespace, *, resume: bool, alone: bool) -> Target:
    """The run of --finish; it is made now, unless it is there and goes on.

    alone: no other process has this command line.
    """
    directory = branch_directory(args.config, args.output)
    config = directory / run_directory.CONFIG
    if not (resume and run_directory.has_saved(directory)):
        if not alone:
            raise ConfigError(
                "--finish: makes a run before the ranks start; with torchrun or srun, first, "
                f"alone: segtrain train {shlex.quote(args.config)} --finish {args.finish} "
                f"--until 1; then start all with {directory} --resume"
            )
        _begin_branch(args, directory)
    begun = load_config(config).schedule.finish_from
    if begun is None:
        raise ConfigError(f"{directory}: no branch (schedule.finish_from); choose another --output")
    args.set = [f"train.steps={begun + args.finish}", *args.set]
    return Target(config, directory)


def _begin_branch(args: argparse.Namespace, directory: Path) -> None:
    """Makes the run of --finish, from the checkpoint that is named or the newest of the run."""
    from segtrain.commands import finish

    named = Path(args.config)
    checkpoint = named if args.config.endswith(_CHECKPOINT) else None
    run = run_directory.run_of(named)
    if (run / run_directory.CONFIG).is_file():
        load_config(run / run_directory.CONFIG)  # imports its plugins, as --resume does
    finish.begin(run, checkpoint, directory, steps=args.finish, overrides=args.set)
    args.argv = [*args.argv, "--resume"]  # of the ranks


def named_config(text: str, *, may_write: bool) -> str:
    """`text`; if it is a folder, and no run, the config that `segtrain init` has written for it.

    may_write: if there is none, it is written now.

    Raises:
        ConfigError, DataError: what `segtrain init` cannot decide or read.
    """
    if not os.path.isdir(text) or run_directory.run_of(Path(text)) is not None:
        return text
    from segtrain.commands import init

    folder = Path(text)
    if folder.name in ("", ".."):  # `.` and `..` do not end with the name for the run
        folder = folder.resolve()
    for made in (folder / run_directory.CONFIG, init.default_output(folder) / run_directory.CONFIG):
        if made.exists():
            return str(made)
    if any(folder.glob(init.READINGS)):
        raise ConfigError(f"{folder}: segtrain init stopped here with a question; answer it there")
    if not may_write:
        raise ConfigError(f"{folder}: a folder without a config; segtrain init makes one first")
    config = init.write_experiment(folder)
    init.say_written(config.parent)
    return str(config)


def resolve_run(text: str, *, resume: bool, output: Path | None) -> Target:
    """What `segtrain train TEXT` works on.

    `text` is a config or, with `resume`, the directory of a run or the config.yaml in it.

    Raises:
        ConfigError: there is no such config; or `text` means a run, but `resume` is missing or
            `output` is another directory, so it is not clear what is wanted.
    """
    run = run_directory.run_of(Path(text))
    if run is None:
        return _of_config(text, output)
    config = run / run_directory.CONFIG
    elsewhere = output is not None and os.path.realpath(output) != os.path.realpath(run)
    if elsewhere and Path(text).name == run_directory.CONFIG:  # another run with the same config
        return Target(config, output)
    # A checkpoint is refused: training resumes from the newest, whichever is named.
    if not resume or elsewhere or text.endswith(_CHECKPOINT):
        new = output if elsewhere else Path("runs") / f"{run.resolve().name}_2"
        raise _no_config(text, run, new)
    if not config.exists():
        again = f"segtrain train CONFIG --output {shlex.quote(str(run))} --resume"
        raise ConfigError(f"{config}: missing; to go on with a config of your own: {again}")
    return Target(config, run)


def _of_config(text: str, output: Path | None) -> Target:
    """A config, whose run has its name unless `output` is given."""
    found = find_config(text)
    name = found.path.stem
    if found.path.name == run_directory.CONFIG:  # of `segtrain init`: the folder has the name
        name = found.path.parent.name or name
    return Target(found.path, output or Path("runs") / name, found.note)


def _no_config(text: str, run: Path, new: Path) -> ConfigError:
    """`text` means a run, and it is not clear what is wanted of it. new: where another could be."""
    kind = "a checkpoint" if text.endswith(_CHECKPOINT) else "a run"
    config = run / run_directory.CONFIG
    return ConfigError(
        f"{text}: expected a config, found {kind}\n"
        f"to go on with the run: segtrain train {run_directory.word_for(run)} --resume\n"
        f"to train it longer: segtrain train {run_directory.word_for(run)} --finish STEPS\n"
        "to start a new run with its config: "
        f"segtrain train {shlex.quote(str(config))} --output {shlex.quote(str(new))}"
    )
