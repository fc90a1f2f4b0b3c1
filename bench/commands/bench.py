"""``mpicomp bench NAME``: micro-benchmarks.

Each is a module of this package named ``bench_NAME`` that looks like a command's: ``HELP``, ``add_arguments`` and
``run``.
"""

import argparse
import importlib
from typing import Any

from mpicomp.cli.options import add_plugin

HELP = "measure kernels, exchanges among ranks, and training with them"

BENCHMARKS = ("kernels", "collectives", "training")


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the benchmarks and their options."""
    benchmarks = parser.add_subparsers(title="benchmarks", metavar="NAME", required=True)
    for name in BENCHMARKS:
        module: Any = importlib.import_module(f"{__package__}.bench_{name}")
        subparser = benchmarks.add_parser(name, help=module.HELP, description=module.HELP)
        add_plugin(subparser)
        module.add_arguments(subparser)
        subparser.set_defaults(_benchmark=module)


def run(arguments: argparse.Namespace) -> int:
    """Run the benchmark that was named."""
    return int(arguments._benchmark.run(arguments))
