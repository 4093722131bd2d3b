"""The arguments of `segtrain train`, `segtrain population` and `segtrain bench`."""

import argparse
from pathlib import Path

from segtrain.cli.common import (
    CONFIG_HELP,
    Commands,
    add_command,
    add_device,
    add_nproc,
    add_set,
    add_switch,
    endpoint,
    lazily,
    non_negative,
    positive,
)


def add_train(commands: Commands) -> None:
    """Adds `segtrain train`."""
    parser = commands.add_parser(
        "train",
        help="train a model from a config",
        description="Train the experiment in CONFIG; evaluate and save checkpoints on the way.",
        epilog="examples:\n"
        "  segtrain train own.yaml --nproc 4 --set train.lr=0.02\n"
        "  segtrain train own.yaml --resume                        or: train runs/own --resume\n"
        "  segtrain train camvid_small --set data.root=CamVid      from 'segtrain config list'\n"
        "  segtrain train CONFIG --nnodes 2 --node-rank 0 --rdzv-endpoint host0:29400\n"
        "  torchrun --nproc-per-node 4 -m segtrain train CONFIG",
    )
    train = lazily("commands.train.target:main")
    parser.set_defaults(command=lambda args: train(_consistent_nodes(parser, args)))
    add = parser.add_argument
    add("config", metavar="CONFIG", help=f"{CONFIG_HELP}; with --resume also the run's directory")
    add_set(add)
    add_nproc(add)
    add_device(add)
    add("--output", type=Path, metavar="DIR", help="run directory (default: runs/<name of CONFIG>)")
    text = "go on at the last checkpoint, on any number of ranks; start the run if there is none"
    add_switch(add, "--resume", text)
    add(
        "--until",
        type=positive,
        metavar="STEP",
        help="save after this step and stop; the learning rate is that of train.steps",
    )
    add_switch(
        add, "--accept-changes", "with --resume: go on although config or data have changed since"
    )
    add_switch(
        add,
        "--requeue",
        "in a SLURM job: at SIGUSR1 save, requeue the job and stop (without: save and go on)",
    )
    add = parser.add_argument_group("several machines (the same command on each)").add_argument
    add("--nnodes", type=positive, default=1, metavar="N", help="machines")
    add(
        "--node-rank",
        type=non_negative,
        metavar="R",
        help="number of this machine; 0 serves the meeting point",
    )
    add("--rdzv-endpoint", type=endpoint, metavar="HOST:PORT", help="meeting point on machine 0")
    add("--rdzv-id", metavar="ID", help="name of the job, where several meet at the same point")
    add(
        "--max-restarts",
        type=non_negative,
        default=0,
        metavar="N",
        help="start all ranks again this often after one failed (default: 0)",
    )


def _consistent_nodes(
    parser: argparse.ArgumentParser, args: argparse.Namespace
) -> argparse.Namespace:
    if args.nnodes > 1 and args.rdzv_endpoint is None:
        parser.error("--nnodes: several machines need --rdzv-endpoint HOST:PORT")
    if args.node_rank is not None and args.node_rank >= args.nnodes:
        parser.error(f"--node-rank: expected less than --nnodes, {args.nnodes}")
    return args


def add_population(commands: Commands) -> None:
    """Adds `segtrain population`."""
    add = add_command(
        commands,
        "population",
        "commands.population.command:main",
        help="search options with runs that learn from each other",
        description="Train several members of CONFIG with other seeds and options, one after "
        "another, a round at a\ntime. After each round the worst quarter takes over weights and "
        "options of the best,\nand changes the options by a factor of 0.8 or 1.2 (population "
        "based training,\narXiv:1711.09846). Member 0 starts with the options of CONFIG.",
        epilog="Each member is a run in DIR/member_0 and so on; DIR/population.csv and "
        "population.png tell\nthe history.\n\n"
        "examples:\n"
        "  segtrain population own.yaml --members 4 --every 2000\n"
        "  segtrain population own.yaml --perturb train.lr --perturb model.dropout --nproc 2\n"
        "  segtrain population runs/own_population --resume",
    )
    help_of_config = f"{CONFIG_HELP}; with --resume also the population's directory"
    add("config", metavar="CONFIG", help=help_of_config)
    add("--members", type=positive, metavar="N", help="runs (default: 4)")
    text = "steps of a round (default: eval.every_steps); members are evaluated and saved then"
    add("--every", type=positive, metavar="N", help=text)
    add(
        "--perturb",
        action="append",
        default=[],
        metavar="SECTION.KEY",
        help="an option to search, a number with a fraction; may be repeated (default: train.lr "
        "and train.weight_decay)",
    )
    add_switch(add, "--alone", "no exchange: the same members, for comparison")
    add_set(add)
    add_nproc(add)
    add_device(add)
    text = "directory (default: runs/<name of CONFIG>_population, or _alone)"
    add("--output", type=Path, metavar="DIR", help=text)
    add_switch(add, "--resume", "go on with the arguments of its start; start it if there is none")


def add_bench(commands: Commands) -> None:
    """Adds `segtrain bench`."""
    add = add_command(
        commands,
        "bench",
        "commands.launch:bench",
        help="where the time of a training step goes",
        description="Train some steps of CONFIG, with its data and loader, and print the time of "
        "their parts,\noperations a second beside what this device reaches, memory, and what "
        "limits the speed.\nNothing is kept.",
        epilog="examples:\n"
        "  segtrain bench own.yaml --nproc 2\n"
        "  segtrain bench own.yaml --set train.precision=bfloat16 --profile trace.json.gz",
    )
    add("config", metavar="CONFIG", help=CONFIG_HELP)
    add_set(add)
    add_nproc(add)
    add_device(add)
    add("--steps", type=positive, default=20, metavar="N", help="steps to measure (default: 20)")
    add("--json", type=Path, metavar="FILE", help="write the figures to this file")
    text = "write a trace of three steps, for https://ui.perfetto.dev; .json or .json.gz"
    add("--profile", type=Path, metavar="FILE", help=text)
