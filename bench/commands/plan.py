"""``mpicomp plan``: which exchange for a network that is not here."""

import argparse

from mpicomp.cli.options import add_plugin

HELP = "name the exchange for a network that is not here, and the gain of a faster one"

_OPTIONS = (
    ("--hosts", "8", "N[,..]", "numbers of hosts"),
    ("--ppn", 1, "K", "ranks of a host"),
    ("--bandwidth", "1gbit", "B[,..]", "of a host's link, such as 200mbit,10gbit"),
    ("--latency", "50us", "L", "of a message between hosts"),
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_plugin(parser)
    parser.set_defaults(alone=True)
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Needs no MPI. The training is named by --from, --task, or --parameters and "
        "--step-seconds."
    )
    for option, default, metavar, text in _OPTIONS:
        help_text = f"{text} (%(default)s)"
        parser.add_argument(option, type=type(default), default=default, metavar=metavar, help=help_text)
    parser.add_argument(
        "--links", metavar="F", help="links that `bench collectives --calibrate F` measured, in place of --bandwidth"
    )
    parser.add_argument(
        "--from",
        dest="run",
        metavar="F",
        help="a run that `train --json F` wrote, or 30 steps of your own script with MPICOMP_PLAN=F",
    )
    parser.add_argument("--task", help="a task as in `train`, of which 30 steps are trained here; needs torch")
    parser.add_argument("--parameters", type=float, metavar="P", help="of a GPT, such as 124e6")
    parser.add_argument("--step-seconds", type=float, metavar="S", help="of a step without any exchange")
    parser.add_argument("--steps", type=int, metavar="S", help="of the training (those of the run or task, or 1000)")
    parser.add_argument("--json", metavar="F", help="write the forecasts to F as one JSON object")
    parser.add_argument("--picture", metavar="F.svg", help="draw bars of all networks to F")


def run(arguments: argparse.Namespace) -> int:
    """Forecast, and print a table for each network."""
    from mpicomp.bench import plan

    return plan.run(arguments)
