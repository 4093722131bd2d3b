"""`segtrain report`: a page about one or several runs."""

import argparse

from segtrain.desk.results.joined_folds import join_folds
from segtrain.desk.results.report import evaluated, report_page, write_figures, write_report
from segtrain.distributed.process_group import device_for
from segtrain.errors import EXIT_OK, ConfigError, ExecutionError
from segtrain.files import check_output, os_errors_as, write_output
from segtrain.run.directory import REPORT
from segtrain.run.division import is_scored, named_runs, read_division
from segtrain.text import printable


def main(args: argparse.Namespace) -> int:
    """Writes the page and returns the exit code.

    args: runs (directories; or one of folds), output (a file; default: report.html of the only
        run), figures (a folder or None), curves (a bool), set, device.

    Raises:
        UserError: no run, no checkpoint, or a file that cannot be read or written.
    """
    runs = named_runs(args.runs)
    output = args.output
    if output is None and len(runs) > 1:
        raise ConfigError("--output FILE: needed for a report of several runs")
    if len(runs) == 1 and is_scored(runs[0]):
        raise ConfigError(f"{runs[0]}: segtrain score has written the page of these label maps")
    folds = [run for run in runs if read_division(run) is not None]
    if folds and len(runs) > 1:
        what = "holds folds, which have a page of their own; segtrain compare takes several"
        raise ConfigError(f"{folds[0]}: {what}")
    if args.curves and (folds or len(runs) > 1):
        raise ConfigError("--curves: serves only the report of one run")
    device = device_for(args.device)
    output = output or runs[0] / REPORT
    # Now, rather than after an evaluation, which may be long.
    with os_errors_as(ConfigError, f"--output {output}", "cannot be written"):
        check_output(output, "<!DOCTYPE html>")
    if args.figures:
        with os_errors_as(ConfigError, f"--figures {args.figures}", "cannot make this folder"):
            args.figures.mkdir(parents=True, exist_ok=True)
    if folds:
        results, joined = join_folds(folds[0], device, args.set)
    else:
        how = {"with_curves": args.curves, "with_pictures": len(runs) == 1}
        results, joined = [evaluated(run, device, args.set, **how) for run in runs], None
    with os_errors_as(ExecutionError, output, "the report cannot be written"):
        if args.output is None:
            write_report(runs[0], results, device, joined=joined)
        else:
            write_output(output, report_page(results, device, joined=joined))
    print(printable(output))
    if args.figures:
        with os_errors_as(ExecutionError, args.figures, "the figures cannot be written"):
            write_figures(args.figures, results, joined=joined)
        print(printable(args.figures))
    return EXIT_OK
