"""`segtrain data stats CONFIG`: reads a split once and prints how often its classes occur."""

import argparse
from contextlib import ExitStack

from segtrain.commands.data_check import output_errors
from segtrain.config import load_config
from segtrain.data.check.stats import as_json, as_text, measure
from segtrain.errors import EXIT_OK
from segtrain.files import reserve_output, write_output
from segtrain.text import printable_lines


def main(args: argparse.Namespace) -> int:
    """The exit code: 0; what cannot be counted completely is an error."""
    data = load_config(args.config, args.set).data
    with ExitStack() as stack:
        if args.json is not None:
            with output_errors(args.json):
                stack.enter_context(reserve_output(args.json))
        stats = measure(data, args.split or data.train_split, beta=args.beta, jobs=args.jobs)
        text = as_text(stats)
        print("\n".join(printable_lines(text, len(text) + 1)))
        if args.json is not None:
            with output_errors(args.json):
                write_output(args.json, as_json(stats) + "\n")
    return EXIT_OK
