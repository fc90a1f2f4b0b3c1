"""``mpicomp report``: pictures, tables and a verdict of one or several runs, on one page."""

import argparse

HELP = "show one run, or several compared, on one page that needs no network"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(alone=True)
    parser.add_argument(
        "runs",
        nargs="+",
        metavar="RUN",
        help="a file that train has written with --json or with --metrics; topk.json and topk.jsonl are one run",
    )
    parser.add_argument("-o", "--output", required=True, metavar="F.html", help="the page to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the report, and print its path."""
    from mpicomp.cli.options import check_drawing, check_writable

    check_writable("report", arguments.output)
    check_drawing("report")
    from mpicomp.bench.report.runs import read_runs
    from mpicomp.bench.report.write import draw_report

    print(f"{arguments.output}: {draw_report(read_runs(arguments.runs), arguments.output)} pictures")
    return 0
