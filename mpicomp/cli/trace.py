"""``mpicomp trace``: one trace of the files that the ranks of a job have left."""

import argparse

HELP = "merge the parts of a trace that the ranks of a job that died have written"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.set_defaults(alone=True)
    parser.add_argument("parts", nargs="+", metavar="F.rank-N", help="a file that a rank has left, of each one")
    parser.add_argument("-o", "--output", required=True, metavar="F.json", help="the trace to write")


def run(arguments: argparse.Namespace) -> int:
    """Write the trace."""
    from mpicomp.cli.options import check_writable
    from mpicomp.errors import ConfigurationError
    from mpicomp.reducer.trace_merge import merge_files

    check_writable("trace", arguments.output)
    try:
        merge_files(arguments.parts, arguments.output)
    except OSError as error:
        raise ConfigurationError(f"trace: {error}; name files that are there, and one that can be written") from error
    return 0
