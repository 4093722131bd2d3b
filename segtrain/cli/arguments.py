"""The arguments of every command."""

import argparse
from pathlib import Path

from segtrain.cli.common import (
    CONFIG_HELP,
    SOURCE_HELP,
    Commands,
    add_command,
    add_device,
    add_jobs,
    add_nproc,
    add_set,
    add_size,
    add_switch,
    endpoint,
    fraction_below_1,
    group,
    lazily,
    non_negative,
    positive,
    steps,
)

_DATA_OPTIONS = "data.root=/elsewhere/data, data.eval_split=test"


def add_data(commands: Commands) -> None:
    """Adds `segtrain data`."""
    actions = group(commands.add_parser("data", help="make, check or pack data sets"))
    add = add_command(
        actions,
        "synth",
        "synthetic:main",
        help="draw a synthetic data set",
        description="Draw synthetic street scenes in the layout of Cityscapes.",
        epilog="example:\n  segtrain data synth data/street --num-train 200 --num-val 40",
    )
    add("root", type=Path, metavar="ROOT", help="directory to write to")
    add("--num-train", type=positive, default=200, metavar="N", help="default: 200")
    add("--num-val", type=positive, default=40, metavar="N", help="default: 40")
    add_size(add, [256, 512], "height and width in pixels (default: 256 512)")
    add("--seed", type=non_negative, default=0, metavar="S", help="default: 0")
    add_jobs(add)
    add = add_command(
        actions,
        "check",
        "commands.data:check",
        help="check every image and label of a config",
        description="Read both splits completely and report all that is wrong: missing or damaged "
        "files, sizes that differ, label values outside the class file; and class frequencies.",
        epilog="example:\n  segtrain data check own.yaml",
    )
    add("config", metavar="CONFIG", help=CONFIG_HELP)
    add_set(add, _DATA_OPTIONS)
    add_jobs(add)
    add("--json", type=Path, metavar="FILE", help="write the report as JSON")
    add = add_command(
        actions,
        "pack",
        "commands.data:pack",
        help="decode a data set once, so that training reads crops from raw rows",
        description="Decode both splits of a config into a folder of safetensors shards, which "
        "training,\nevaluation and check read by data.pack: DIR. A pixel takes 4 bytes. If it is "
        "interrupted,\nthe same command begins again.",
        epilog="examples:\n  segtrain data pack own.yaml --output packs/own\n"
        "  segtrain train own.yaml --set data.pack=packs/own",
    )
    add("config", metavar="CONFIG", help=CONFIG_HELP)
    add("--output", type=Path, required=True, metavar="DIR", help="a new folder, such as packs/own")
    add_set(add, _DATA_OPTIONS)
    add_jobs(add)
    add = add_command(
        actions,
        "stats",
        "commands.data:stats",
        help="count the classes of a split, and print class weights for the loss",
        description="Read a split once: pixels and images of each class, size, mean and standard "
        "deviation\nof the images, and class weights by median frequency, inverse frequency, "
        "effective\nnumber and ENet's rule, as lines to paste into a config.",
        epilog="examples:\n  segtrain data stats own.yaml\n"
        "  segtrain data stats own.yaml --split val --json stats.json",
    )
    add("config", metavar="CONFIG", help=CONFIG_HELP)
    add("--split", metavar="S", help="split (default: data.train_split)")
    add(
        "--beta",
        type=fraction_below_1,
        metavar="B",
        help="of the effective number of pixels (default: 1 - 1 / pixels of a mean class)",
    )
    add_set(add, _DATA_OPTIONS)
    add_jobs(add)
    add("--json", type=Path, metavar="FILE", help="write all numbers as JSON")


def add_config(commands: Commands) -> None:
    """Adds `segtrain config`."""
    actions = group(commands.add_parser("config", help="list, copy or show configs"))
    add_command(
        actions,
        "list",
        "commands.config:print_names",
        help="list the configs that come with segtrain",
    )
    add = add_command(
        actions,
        "copy",
        "commands.config:copy",
        help="copy a config that comes with segtrain",
        description="Copy the config NAME to FILE, and say which lines to change.",
        epilog="example:\n  segtrain config copy own_data my.yaml",
    )
    add("name", metavar="NAME", help="a name from 'segtrain config list'")
    add("file", type=Path, metavar="FILE", help="a new file, such as my.yaml")
    add = add_command(
        actions,
        "show",
        "commands.config:print_config",
        help="check a config and print it with all defaults",
        epilog="examples:\n  segtrain config show own.yaml --set train.lr=0.02\n"
        "  segtrain config show camvid_small",
    )
    add("config", metavar="CONFIG", help=CONFIG_HELP)
    add_set(add)
    add = add_command(
        actions,
        "schema",
        "commands.config:write_schema",
        help="print the JSON Schema of configs, for editors",
        epilog="an editor with a YAML language server completes and checks a config that begins\n"
        "with '# yaml-language-server: $schema=schema.json' after\n"
        "  segtrain config schema --output schema.json",
    )
    add("--output", type=Path, metavar="FILE", help="default: the terminal")


def add_eval(commands: Commands) -> None:
    """Adds `segtrain eval`."""
    add = add_command(
        commands,
        "eval",
        "commands.launch:evaluate",
        help="score a model on a split",
        description="Score a trained model: IoU of every class, mIoU, mAcc, aAcc.",
        epilog="examples:\n"
        "  segtrain eval runs/own\n"
        "  segtrain eval runs/own --set eval.scales='[0.75, 1, 1.25]' --set eval.flip=true\n"
        "  segtrain eval runs/own/checkpoints/last.pt --split val --save-predictions out\n"
        "  segtrain eval runs/own --split test --no-labels --save-predictions out",
    )
    add("checkpoint", metavar="RUN|CHECKPOINT", help=SOURCE_HELP)
    add("--split", metavar="S", help="split (default: data.eval_split)")
    add_set(add, "eval.flip=true, eval.scales='[0.75, 1]', data.root=/elsewhere/data")
    add_nproc(add)
    add_device(add)
    add("--save-predictions", type=Path, metavar="DIR", help="write label maps with raw ids")
    add(
        "--no-labels",
        action="store_true",
        help="the split has no labels: predict for a test server, score nothing",
    )
    add("--json", type=Path, metavar="FILE", help="write all scores as JSON")
    add(
        "--overlays",
        type=Path,
        metavar="DIR",
        help="write pictures of image, label and prediction",
    )
    add("--num-overlays", type=positive, default=8, metavar="N", help="how many (default: 8)")


def add_verify(commands: Commands) -> None:
    """Adds `segtrain verify`."""
    add = add_command(
        commands,
        "verify",
        "commands.launch:verify",
        help="compute steps of a run again and compare every bit",
        description="Compute steps of a run with train.shares again, on any number of ranks, and "
        "compare\nsamples, losses, gradients and weights with its receipts and checkpoints. "
        "Nothing is\nwritten into the run, which may still be training.",
        epilog="The replay starts at the newest checkpoint before A, or at the beginning.\n\n"
        "examples:\n"
        "  segtrain verify runs/own                   from the newest checkpoint before the end\n"
        "  segtrain verify runs/own --steps 1: --nproc 4\n"
        "  segtrain verify runs/own --steps 900:1000 --set data.root=/elsewhere/data",
    )
    add("run", type=Path, metavar="RUN", help="run directory")
    add(
        "--steps",
        type=steps,
        default=(None, None),
        metavar="A:B",
        help="first and last step, counted from 1, or one step (default: from the newest "
        "checkpoint before B; to the last receipt)",
    )
    add_set(add, "data.root=/elsewhere/data, data.pack=null")
    add_nproc(add)
    add_device(add)


def add_predict(commands: Commands) -> None:
    """Adds `segtrain predict`."""
    add = add_command(
        commands,
        "predict",
        "commands.predict:main",
        help="segment images",
        description="Segment images of any size: writes label maps, colour maps and overlays.",
        epilog="example:\n  segtrain predict runs/own photos/ extra.jpg --output predictions",
    )
    add("source", metavar="RUN|CHECKPOINT", help=SOURCE_HELP)
    add("inputs", nargs="+", type=Path, metavar="INPUT", help="image, or folder of images")
    add("--output", type=Path, required=True, metavar="DIR", help="where to write the results")
    add_switch(add, "--overwrite", "replace results that are already there")
    add_set(add, "eval.mode=slide, eval.crop_size='[512, 1024]'")
    add_device(add)


def add_export(commands: Commands) -> None:
    """Adds `segtrain export`."""
    add = add_command(
        commands,
        "export",
        "commands.export:main",
        help="write a model for other programs",
        description="Write a trained model for other programs; the file is run and compared with "
        "the model before it gets its name.",
        epilog="example:\n  segtrain export runs/own --format onnx --output own.onnx --normalize "
        "--argmax",
    )
    add("source", metavar="RUN|CHECKPOINT", help=SOURCE_HELP)
    add(
        "--format",
        required=True,
        choices=("onnx", "pt2", "torchscript", "safetensors"),
        help="pt2: torch.export, for images of more than model.output_stride px a side; "
        "safetensors: the weights, which eval, predict and train.init_from read too",
    )
    add("--output", type=Path, required=True, metavar="FILE", help="file to write")
    add_switch(add, "--overwrite", "replace a file that is already there")
    add(
        "--normalize",
        nargs="?",
        const="uint8",
        choices=("uint8", "float32"),
        help="the file takes RGB of 0..255, as bytes (default) or floats, and normalizes it itself",
    )
    add_switch(add, "--argmax", "the file returns train ids instead of logits")
    text = "safetensors: kernels as float16, which halves the file and changes scores little"
    add_switch(add, "--half", text)
    add_size(add, None, "write a file for images of this height and width only (default: any size)")


def add_convert(commands: Commands) -> None:
    """Adds `segtrain convert`."""
    add = add_command(
        commands,
        "convert",
        "commands.convert:main",
        help="make a checkpoint of another program one of segtrain",
        description="Read weights of torchvision (DeepLabV3), semseg (PSPNet), mmsegmentation,\n"
        "segmentation_models.pytorch (both PSPNet, DeepLabV3, DeepLabV3+) or VainF (DeepLabV3,\n"
        "DeepLabV3+), which are told apart by their keys, and write a checkpoint for eval,\n"
        "predict, export and train.init_from. A key that finds no place is an error.",
        epilog="What a file cannot say, such as model.output_stride, is assumed by the defaults of "
        "its\nprogram and printed; --set changes it.\n\n"
        "examples:\n"
        "  segtrain convert deeplabv3_resnet50_coco.pth --classes voc --output v3.pt\n"
        "  segtrain convert pspnet_r50.pth --classes cityscapes --output psp.pt "
        "--set model.output_stride=16\n"
        "  segtrain convert theirs.pth --classes own.yaml --class-order theirs.yaml "
        "--output own.pt",
    )
    add("file", type=Path, metavar="FILE", help="a .pth, .pt or .safetensors file")
    add("--output", type=Path, required=True, metavar="FILE", help="checkpoint to write, a .pt")
    add("--classes", metavar="NAME|FILE", help="class file (default: the names in the file)")
    add(
        "--class-order",
        metavar="NAME|FILE|stored",
        help="class file in the order of the file's channels, or 'stored': the names in the file; "
        "channels move to the order of --classes, by name",
    )
    add("--entry", metavar="KEY", help="which state dict to read, where the file holds several")
    add(
        "--ignore",
        action="append",
        default=[],
        metavar="PREFIX",
        help="leave out keys that begin so and are no part of the model; may be repeated",
    )
    add_switch(add, "--overwrite", "replace a file that is already there")
    add_set(add, "model.output_stride=16, data.root=/elsewhere/data")


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
    train = lazily("commands.train.start:main")
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
