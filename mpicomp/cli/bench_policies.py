"""``mpicomp bench policies``: seconds to the quality of dense with every policy, on emulated networks."""

import argparse
from pathlib import Path
from typing import TYPE_CHECKING

from mpicomp.cli import runs

if TYPE_CHECKING:
    from mpicomp.bench.measure.networks import Network
    from mpicomp.bench.policy_runs import Finished, Runner

HELP = "compare policies by the time to equal quality, on emulated networks (needs root)"

_COMMAND = "bench policies"
_MINUTES, _QUICK_MINUTES = 120.0, 45.0


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Train with every policy until the quality of dense exchange is reached, and show for every task and network "
        "the seconds that takes, with bytes and qualities: mean and deviation over seeds. Policies that do not look at "
        "the network are trained on one host, the others in a lab for each network; there the steps of all are timed "
        "in turn. Without options it takes two hours, with --quick 45 minutes."
    )
    parser.add_argument("--quick", action="store_true", help="one seed, two networks, 45 minutes")
    parser.add_argument(
        "--policies",
        metavar="P[,..]",
        help="dense, which is run in any case, static, schedule, gravac, accordion, lgreco, flexible, auto (all)",
    )
    parser.add_argument(
        "--networks",
        metavar="B/L[,..]",
        help="bandwidth and latency of each lab's links (50mbit/1ms,200mbit/1ms,1gbit/0us,2.5gbit/0us)",
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="of each lab (%(default)s)")
    runs.add_arguments(parser, _MINUTES)


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a table for each task and network; 1 where one failed."""
    from mpicomp.bench.measure.networks import Network, check_lab
    from mpicomp.bench.policies import ARMS, DENSE, GOALS, NETWORKS, QUICK_NETWORKS, runs_of
    from mpicomp.bench.policy_runs import Runner
    from mpicomp.bench.policy_table import rows_of, told_of
    from mpicomp.cli.options import check_least, read_list
    from mpicomp.errors import ConfigurationError

    words = ",".join(ARMS) if arguments.policies is None else arguments.policies
    policies = runs.read_names(_COMMAND, "--policies", words, list(ARMS))
    policies = [DENSE, *(name for name in policies if name != DENSE)]  # the target is its quality
    tasks = runs.read_names(_COMMAND, "--tasks", arguments.tasks, list(GOALS))
    default = ",".join(QUICK_NETWORKS if arguments.quick else NETWORKS)
    links = read_list(default if arguments.networks is None else arguments.networks)
    networks = list(dict.fromkeys(Network.read(link) for link in links))
    if not networks:
        raise ConfigurationError(f"{_COMMAND}: --networks names nothing; write for example 50mbit/1ms")
    asked = runs.read_seeds(_COMMAND, "0" if arguments.quick and arguments.seeds is None else arguments.seeds)
    seeds = {task: asked or list(GOALS[task].seeds) for task in tasks}
    check_least(_COMMAND, "--hosts", arguments.hosts, 2)
    if arguments.keep is not None and "," in str(Path(arguments.keep).resolve()):
        raise ConfigurationError(f"{_COMMAND}: --keep must be a folder without commas, got '{arguments.keep}'")
    runs.check(_COMMAND, arguments)
    check_lab(_COMMAND)
    runs.check_tasks(_COMMAND)

    minutes = arguments.limit or (_QUICK_MINUTES if arguments.quick else _MINUTES)
    hosts = arguments.hosts
    with runs.folder_of(arguments) as folder:
        runner = Runner(folder, hosts, arguments.steps)

        def write() -> None:
            own = runner.finished
            told = [told_of(each, own) for each in own.values()]
            runs.write(arguments.json, rows_of(own, networks, hosts), told)

        every = runs_of(policies, networks, seeds)
        runs.run_all(_COMMAND, f"{hosts} hosts", every, runner, 60 * minutes, _results, write)
    return _show(runner, networks, hosts)


def _results(finished: "Finished") -> str:
    """Say in a few words what a run has found."""
    if finished.timed:
        return "; s a step: " + ", ".join(f"{name} {row['median_s']:.4g}" for name, row in finished.timed.items())
    return f", {float(finished.outcome['median_step_s']):.4g} s a step, quality {finished.quality:.4f}"


def _show(runner: "Runner", networks: "list[Network]", hosts: int) -> int:
    """Print the tables and what they mean; give the exit status."""
    from mpicomp.bench.measure import results
    from mpicomp.bench.measure.jobs import FAILED
    from mpicomp.bench.policies import GOALS
    from mpicomp.bench.policy_table import COLUMNS, cells_of, explained, rows_of

    found = rows_of(runner.finished, networks, hosts)
    for task, bandwidth, latency in dict.fromkeys((row["task"], row["bandwidth"], row["latency"]) for row in found):
        own = [row for row in found if (row["task"], row["bandwidth"], row["latency"]) == (task, bandwidth, latency)]
        better = "lower" if GOALS[task].lower else "higher"
        print(f"\n{task}, {hosts} hosts, {bandwidth}, {latency}; quality: {better} is better")
        results.show([cells_of(row) for row in own], COLUMNS)
    print("\n" + "\n".join(explained(found, runner.finished)))
    return int(any(own.status == FAILED for own in runner.finished.values()))
