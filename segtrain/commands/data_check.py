"""`segtrain data check CONFIG`: reads both splits completely and lists all that is wrong or odd."""

import argparse
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from pathlib import Path

from segtrain.config import load_config
from segtrain.config.loading import with_places
from segtrain.data.check.full import check_data
from segtrain.data.check.result import as_json, as_text
from segtrain.errors import EXIT_DATA, EXIT_OK, ConfigError
from segtrain.files import reserve_output, write_output
from segtrain.text import printable_lines


def main(args: argparse.Namespace) -> int:
    """The exit code: 0 without errors (warnings are allowed), else 3."""
    config = load_config(args.config, args.set)
    with ExitStack() as stack:
        if args.json is not None:
            with output_errors(args.json):
                stack.enter_context(reserve_output(args.json))
        result = check_data(config, jobs=args.jobs)
        placed = (with_places(issue.text, args.config, args.set) for issue in result.issues)
        issues = [replace(i, text=text) for i, text in zip(result.issues, placed, strict=True)]
        result = replace(result, issues=issues)
        # First what can be read at once: the disk may be full.
        text = as_text(result)
        print("\n".join(printable_lines(text, len(text) + 1)))
        if args.json is not None:
            with output_errors(args.json):
                write_output(args.json, as_json(result) + "\n")
    return EXIT_OK if result.ok else EXIT_DATA


@contextmanager
def output_errors(path: Path, option: str = "--json") -> Iterator[None]:
    """Says of an OSError inside that the file of `option` cannot be written, as a ConfigError."""
    try:
        yield
    except OSError as error:
        raise ConfigError(f"{option} {path}: {(error.strerror or '').lower()}") from error
