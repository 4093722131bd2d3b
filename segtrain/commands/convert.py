"""`segtrain convert`: a checkpoint of another program made one of segtrain."""

import argparse
from pathlib import Path

from segtrain.config import Config
from segtrain.convert.converter import check_overrides, convert_file, model_lines
from segtrain.errors import EXIT_OK, ConfigError
from segtrain.files import kind_of
from segtrain.text import printable


def main(args: argparse.Namespace) -> int:
    """Runs the command and returns its exit code."""
    output = Path(args.output)
    _check_output(output, overwrite=args.overwrite, source=Path(args.file))
    check_overrides(args.set)
    converted = convert_file(
        Path(args.file),
        output,
        classes=args.classes,
        class_order=args.class_order,
        entry=args.entry,
        ignored=args.ignore,
        overrides=args.set,
        overwrite=args.overwrite,
    )
    for line in converted.lines:
        print(printable(line))
    for line in _how_to_go_on(converted.config, output):
        print(printable(line))
    print(f"wrote {printable(output)} ({output.stat().st_size / 2**20:.1f} MiB)")
    return EXIT_OK


def _check_output(output: Path, *, overwrite: bool, source: Path) -> None:
    if output.is_dir():
        raise ConfigError(f"--output {output}: is a directory; name the file")
    if output.exists() and not output.is_file():  # replacing it would take it from everyone
        raise ConfigError(f"--output {output}: is {kind_of(output)}; name a file")
    if output.exists() and source.exists() and output.samefile(source):
        raise ConfigError(f"--output {output}: is the file to convert; choose another name")
    if output.exists() and not overwrite:
        raise ConfigError(f"--output {output}: exists; choose another name or pass --overwrite")
    if output.suffix != ".pt":
        wanted = output.with_suffix(".pt")
        raise ConfigError(f"--output {output}: checkpoints end in .pt, such as {wanted}")


def _how_to_go_on(config: Config, output: Path) -> list[str]:
    data = config.data
    return [
        f"data        {data.layout} in {data.root}, a guess that predict and export do not need; "
        "eval takes --set data.root=DIR",
        f"to train on from it, set train.init_from: {output} in a config with",
        *model_lines(config),
    ]
