"""``mpicomp plan``: which exchange for a network that is not here."""

import argparse
from typing import TYPE_CHECKING

from mpicomp.cli.options import add_plugin, write_json

if TYPE_CHECKING:
    from mpicomp.bench.plan import Links

    from mpicomp.forecast import Job

HELP = "name the exchange for a network that is not here, and the gain of a faster one"

_COMMAND = "plan"
_MAX_RANKS = 1 << 16


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_plugin(parser)
    parser.set_defaults(alone=True)
    parser.description = (
        f"{HELP[0].upper()}{HELP[1:]}. Needs no MPI. The training is named by --from, --task, or --parameters and "
        "--step-seconds."
    )
    parser.add_argument("--hosts", default="8", metavar="N[,..]", help="numbers of hosts (%(default)s)")
    parser.add_argument("--ppn", type=int, default=1, metavar="K", help="ranks of a host (%(default)s)")
    parser.add_argument(
        "--bandwidth", default="1gbit", metavar="B[,..]", help="of a host's link, such as 200mbit,10gbit (%(default)s)"
    )
    parser.add_argument("--latency", default="50us", metavar="L", help="of a message between hosts (%(default)s)")
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
    from mpicomp.bench.plan import SCHEMA, plan, print_plan

    from mpicomp.cli.options import check_drawing, check_writable

    check_writable(_COMMAND, arguments.json, arguments.picture)
    if arguments.picture is not None:
        check_drawing(_COMMAND)
    networks = _networks(arguments)
    job, is_measured = _job(arguments)
    plans = []
    for links in networks:
        plans.append(plan(job, links, is_measured))
        print_plan(job, links, plans[-1])
    if arguments.json is not None:
        write_json(arguments.json, {"schema": SCHEMA, "job": job.to_json(), "networks": plans})
    if arguments.picture is not None:
        from mpicomp.bench.report.plan_picture import draw_plans

        draw_plans([(str(links), found) for links, found in zip(networks, plans, strict=True)], arguments.picture)
    return 0


def _networks(arguments: argparse.Namespace) -> "list[Links]":
    from mpicomp.bench.lab.lab_settings import LabError, parse_bandwidth, parse_latency
    from mpicomp.bench.plan import Links, read_links

    from mpicomp.cli.options import read_list
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    try:
        hosts = [int(word) for word in arguments.hosts.split(",")]
    except ValueError:
        raise ConfigurationError(
            f"{_COMMAND}: --hosts must be whole numbers such as 2,64, got {arguments.hosts!r}"
        ) from None
    ppn = check_least(_COMMAND, "--ppn", arguments.ppn)
    for number in hosts:
        if check_least(_COMMAND, "--hosts", number, 2) * ppn > _MAX_RANKS:
            raise ConfigurationError(f"{_COMMAND}: at most {_MAX_RANKS:,} ranks are forecast, got {number * ppn:,}")
    if arguments.links is not None:
        return read_links(arguments.links, hosts, ppn)
    try:
        latency_s = parse_latency(arguments.latency) * 1e-9
        widths = [parse_bandwidth(word) for word in read_list(arguments.bandwidth)]
    except LabError as error:
        raise ConfigurationError(f"{_COMMAND}: {error}") from None
    return [Links(number, ppn, bits, latency_s) for bits in widths for number in hosts]


def _job(arguments: argparse.Namespace) -> "tuple[Job, bool]":
    from mpicomp.bench.plan import gpt_job, read_job, task_job

    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    named = [arguments.run, arguments.task, arguments.parameters]
    if sum(name is not None for name in named) != 1 or (arguments.parameters is None) != (
        arguments.step_seconds is None
    ):
        raise ConfigurationError(
            f"{_COMMAND}: name one of --from FILE, --task T, or --parameters P with --step-seconds S"
        )
    if arguments.steps is not None:
        check_least(_COMMAND, "--steps", arguments.steps)
    if arguments.run is not None:
        return read_job(arguments.run, arguments.steps)
    if arguments.task is not None:
        try:
            return task_job(arguments.task, arguments.steps), True
        except ImportError as error:
            raise ConfigurationError(
                f"{_COMMAND}: {error}; install its packages with pip install 'mpicomp[torch,bench]'"
            ) from error
    if not 1 <= arguments.parameters < 1e15 or not 0 < arguments.step_seconds < float("inf"):
        raise ConfigurationError(
            f"{_COMMAND}: --parameters must be at least 1 and --step-seconds above 0, got {arguments.parameters} and "
            f"{arguments.step_seconds}"
        )
    return gpt_job(int(arguments.parameters), arguments.step_seconds, arguments.steps), False
