"""``mpicomp bench learned``: learned codes beside what they are to replace, in one table."""

import argparse
from typing import TYPE_CHECKING

from mpicomp.cli import runs

if TYPE_CHECKING:
    from mpicomp.bench.learned import Finished, Runner

HELP = "compare learned codes with top-k and dense: quality, bytes, seconds, and what there is to learn"

_COMMAND = "bench learned"
_MINUTES = 240.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Train with dense exchange, top-k and every form of LGC, and show for every task their quality, bytes and "
        "seconds, the error of the code, and how much ranks' gradients have in common: mean and deviation over seeds. "
        "Without options it takes hours."
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
    runs.add_arguments(parser, _MINUTES, "900")


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a table for each task; 1 where one failed."""
    from mpicomp.bench.learned import DENSE, EXCHANGES, GOALS, STEPS, Runner, runs_of
    from mpicomp.bench.learned_table import rows_of, told_of
    from mpicomp.cli.options import check_least
    from mpicomp.errors import ConfigurationError

    words = ",".join(EXCHANGES) if arguments.exchanges is None else arguments.exchanges
    exchanges = runs.read_names(_COMMAND, "--exchanges", words, list(EXCHANGES))
    exchanges = [DENSE, *(name for name in exchanges if name != DENSE)]  # differences are from it
    tasks = runs.read_names(_COMMAND, "--tasks", arguments.tasks, list(GOALS))
    asked = runs.read_seeds(_COMMAND, arguments.seeds)
    seeds = {task: asked or list(GOALS[task].seeds) for task in tasks}
    check_least(_COMMAND, "--ranks", arguments.ranks, 2)
    runs.check(_COMMAND, arguments)
    steps = STEPS if arguments.steps is None else arguments.steps
    phases = _phases(arguments.phases)
    if steps <= sum(phases):
        raise ConfigurationError(
            f"{_COMMAND}: --steps must be more than {sum(phases)}, before which no code travels, got {steps}"
        )
    runs.check_tasks(_COMMAND)

    with runs.folder_of(arguments) as folder:
        runner = Runner(folder, arguments.ranks, steps, phases)

        def write() -> None:
            runs.write(arguments.json, rows_of(runner), [told_of(own) for own in runner.finished.values()])

        where = f"{arguments.ranks} ranks, {steps} steps"
        limit_s = 60 * (arguments.limit or _MINUTES)
        runs.run_all(_COMMAND, where, runs_of(exchanges, seeds), runner, limit_s, _results, write)
    return _show(runner)


def _phases(text: str | None) -> tuple[int, int]:
    """Read the lengths of the phases before codes travel."""
    from mpicomp.bench.learned import PHASES
    from mpicomp.cli.options import check_least
    from mpicomp.errors import ConfigurationError

    if text is None:
        return PHASES
    try:
        dense, learning = (int(word) for word in text.split(","))
    except ValueError:
        raise ConfigurationError(
            f"{_COMMAND}: --phases must be two whole numbers such as 50,150, got {text!r}"
        ) from None
    return check_least(_COMMAND, "--phases", dense, 0), check_least(_COMMAND, "--phases", learning)


def _results(finished: "Finished") -> str:
    """Say in a few words what a training has found."""
    late = finished.late
    return f", quality {finished.quality:.4f}, {late['wire_bytes'] or 0:,.0f} bytes left rank 0 in a step"


def _show(runner: "Runner") -> int:
    """Print the tables and what they mean; give the exit status."""
    from mpicomp.bench.learned import GOALS
    from mpicomp.bench.learned_table import COLUMNS, cells_of, explained, rows_of
    from mpicomp.bench.measure import results
    from mpicomp.bench.measure.jobs import FAILED

    found = rows_of(runner)
    for task in dict.fromkeys(row["task"] for row in found):
        own = [row for row in found if row["task"] == task]
        better = "lower" if GOALS[task].lower else "higher"
        print(f"\n{task}, {runner.ranks} ranks, ratio {GOALS[task].ratio}; quality: {better} is better")
        results.show([cells_of(row) for row in own], COLUMNS)
    print("\n" + "\n".join(explained(found, runner)))
    return int(any(own.status == FAILED for own in runner.finished.values()))
