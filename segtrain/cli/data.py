"""The arguments of `segtrain data` and `segtrain config`."""

from pathlib import Path

from segtrain.cli.common import (
    CONFIG_HELP,
    Commands,
    add_command,
    add_jobs,
    add_set,
    add_size,
    fraction_below_1,
    group,
    non_negative,
    positive,
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
        "interrupted,\nthe same command goes on.",
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
