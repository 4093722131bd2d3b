"""`segtrain convert`: a checkpoint of another program made one of segtrain."""

import argparse
from pathlib import Path

from segtrain.commands.export import check_output
from segtrain.desk.convert.converter import check_overrides, convert_file, model_lines
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.text import printable


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    output, source = Path(args.output), Path(args.file)
    if output.exists() and source.exists() and output.samefile(source):
        raise ConfigError(f"--output {output}: is the file to convert; choose another name")
    check_output(output, overwrite=args.overwrite)
    if output.suffix != ".pt":
        wanted = output.with_suffix(".pt")
        raise ConfigError(f"--output {output}: checkpoints end in .pt, such as {wanted}")
    check_overrides(args.set)
    converted = convert_file(
        source,
        output,
        classes=args.classes,
        class_order=args.class_order,
        entry=args.entry,
        ignored=args.ignore,
        overrides=args.set,
        overwrite=args.overwrite,
    )
    data = converted.config.data
    for line in (
        *converted.lines,
        f"data        {data.layout} in {data.root}, a guess that predict and export do not need; "
        "eval takes --set data.root=DIR",
        f"to train on from it, set train.init_from: {output} in a config with",
        *model_lines(converted.config),
        f"wrote {output} ({output.stat().st_size / 2**20:.1f} MiB)",
    ):
        print(printable(line))
    return EXIT_OK
