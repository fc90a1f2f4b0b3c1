"""Seconds to the quality of dense exchange with every policy, on emulated networks: ``python studies/policies.py``."""

import argparse
import sys
from pathlib import Path

import comparison
from mpicomp.bench.measure import networks
from policy_runs import ARMS, GOALS, NETWORKS, QUICK_NETWORKS, Runner, runs_of
from policy_table import Table

from mpicomp.cli import run_program
from mpicomp.cli.options import check_least
from mpicomp.errors import ConfigurationError

_STUDY = "policies"
_MINUTES = 120.0  # limit of the whole study
_QUICK_MINUTES = 45.0  # limit with --quick


def parser() -> argparse.ArgumentParser:
    """Return the parser of the options."""
    parser = argparse.ArgumentParser(
        prog="studies/policies.py",
        description="Train with every policy until the quality of dense exchange is reached, and show for every task "
        "and network the seconds that takes, with bytes and qualities: mean and deviation over seeds. Policies that do "
        "not look at the network are trained on one host, the others in a lab for each network; there the steps of all "
        "are timed in turn. It needs root. Without options it takes two hours, with --quick 45 minutes.",
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
    comparison.add_arguments(parser, _MINUTES)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings one after the other, and print a table for each task and network; 1 where one failed."""
    policies = comparison.read_arms(_STUDY, "--policies", arguments.policies, list(ARMS))
    seeds = "0" if arguments.quick and arguments.seeds is None else arguments.seeds
    seeds_of = comparison.read_seeds(_STUDY, arguments.tasks, seeds, GOALS)
    default = ",".join(QUICK_NETWORKS if arguments.quick else NETWORKS)
    links = networks.read(_STUDY, default if arguments.networks is None else arguments.networks)
    hosts = check_least(_STUDY, "--hosts", arguments.hosts, 2)
    if arguments.keep is not None and "," in str(Path(arguments.keep).resolve()):
        raise ConfigurationError(f"{_STUDY}: --keep must be a folder without commas, got '{arguments.keep}'")
    comparison.check(_STUDY, arguments)
    networks.check_lab(_STUDY)
    comparison.check_tasks(_STUDY)

    minutes = arguments.limit or (_QUICK_MINUTES if arguments.quick else _MINUTES)
    with comparison.folder_of(arguments) as folder:
        runner = Runner(folder, hosts, arguments.steps)
        table = Table(runner.finished, links, hosts)
        runs = runs_of(policies, links, seeds_of)
        return comparison.run_all(_STUDY, f"{hosts} hosts", runs, runner, table, minutes, arguments.json)


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
