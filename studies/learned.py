"""Study of learned codes beside the exchanges that they replace, in one table: ``python studies/learned.py``."""

import argparse
import sys

import comparison
from learned_runs import EXCHANGES, GOALS, PHASES, STEPS, Runner, runs_of
from learned_table import Table

from mpicomp.cli import run_program
from mpicomp.cli.options import check_least
from mpicomp.errors import ConfigurationError

_STUDY = "learned"
_MINUTES = 240.0


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="studies/learned.py",
        description="Train with dense exchange, top-k and every form of LGC, and show for every task their quality, "
        "bytes and seconds, the error of the code, and how much ranks' gradients have in common: mean and deviation "
        "over seeds. Without options it takes hours.",
    )
    parser.add_argument(
        "--exchanges",
        metavar="E[,..]",
        help="dense, which is run in any case, topk, star-topk, lgc-ring, lgc-ring-selected, lgc-server, "
        "lgc-server-selected, lgc-linear (all)",
    )
    parser.add_argument(
        "--ranks", type=int, default=4, metavar="N", help="of each training, on this host (%(default)s)"
    )
    parser.add_argument("--phases", metavar="D,L", help="dense steps, and steps in which codes are learnt (50,150)")
    comparison.add_arguments(parser, _MINUTES, str(STEPS))
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a table for each task; 1 where one failed."""
    exchanges = comparison.read_arms(_STUDY, "--exchanges", arguments.exchanges, list(EXCHANGES))
    seeds_of = comparison.read_seeds(_STUDY, arguments.tasks, arguments.seeds, GOALS)
    ranks = check_least(_STUDY, "--ranks", arguments.ranks, 2)
    comparison.check(_STUDY, arguments)
    steps = STEPS if arguments.steps is None else arguments.steps
    phases = _phases(arguments.phases)
    if steps <= sum(phases):
        raise ConfigurationError(
            f"{_STUDY}: --steps must be more than {sum(phases)}, before which no code travels, got {steps}"
        )
    comparison.check_tasks(_STUDY)

    with comparison.folder_of(arguments) as folder:
        runner = Runner(folder, ranks, steps, phases)
        where, minutes = f"{ranks} ranks, {steps} steps", arguments.limit or _MINUTES
        runs = runs_of(exchanges, seeds_of)
        return comparison.run_all(_STUDY, where, runs, runner, Table(runner), minutes, arguments.json)


def _phases(text: str | None) -> tuple[int, int]:
    """Read the lengths of the phases before codes travel."""
    if text is None:
        return PHASES
    try:
        dense, learning = (int(word) for word in text.split(","))
    except ValueError:
        raise ConfigurationError(f"{_STUDY}: --phases must be two whole numbers such as 50,150, got {text!r}") from None
    return check_least(_STUDY, "--phases", dense, 0), check_least(_STUDY, "--phases", learning)


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
