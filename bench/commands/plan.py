"""``mpicomp plan``: which exchange for a network that is not here."""

import argparse
from typing import TYPE_CHECKING

from mpicomp.cli.options import add_plugin, read_list, write_json

if TYPE_CHECKING:
    from mpicomp.bench.plan import Links

    from mpicomp.forecast import Job

HELP = "name the exchange for a network that is not here, and the gain of a faster one"

_MAX_RANKS = 1 << 16
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
    from mpicomp.bench.plan import SCHEMA, plan, print_plan

    from mpicomp.cli.options import check_drawing, check_writable

    check_writable("plan", arguments.json, arguments.picture)
    if arguments.picture is not None:
        check_drawing("plan")
    networks = _networks(arguments)
    job, is_measured = _job(arguments)
    plans = []
    for links in networks:
        plans.append(plan(job, links, is_measured))
        print_plan(job, links, plans[-1])
    if arguments.json is not None:
        write_json(arguments.json, {"schema": SCHEMA, "job": job.to_json(), "networks": plans})
    if arguments.picture is not None:
        from mpicomp.bench.report.plots import draw_plans

        draw_plans({str(links): found for links, found in zip(networks, plans, strict=True)}, arguments.picture)
    return 0


def _networks(arguments: argparse.Namespace) -> "list[Links]":
    from mpicomp.bench.lab.lab_settings import LabError, parse_bandwidth, parse_latency
    from mpicomp.bench.plan import Links, read_links

    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    try:
        hosts = [int(word) for word in arguments.hosts.split(",")]
    except ValueError:
        raise ConfigurationError(f"plan: --hosts must be whole numbers such as 2,64, got {arguments.hosts!r}") from None
    ppn = check_least("plan", "--ppn", arguments.ppn)
    for number in hosts:
        if check_least("plan", "--hosts", number, 2) * ppn > _MAX_RANKS:
            raise ConfigurationError(f"plan: at most {_MAX_RANKS:,} ranks are forecast, got {number * ppn:,}")
    if arguments.links is not None:
        return read_links(arguments.links, hosts, ppn)
    try:
        latency_s = parse_latency(arguments.latency) * 1e-9
        widths = [parse_bandwidth(word) for word in read_list(arguments.bandwidth)]
    except LabError as error:
        raise ConfigurationError(f"plan: {error}") from None
    return [Links(number, ppn, bits, latency_s) for bits in widths for number in hosts]


def _job(arguments: argparse.Namespace) -> "tuple[Job, bool]":
    from mpicomp.bench.plan import gpt_job, read_job, task_job

    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    parameters, step_s, steps = arguments.parameters, arguments.step_seconds, arguments.steps
    count = sum(name is not None for name in (arguments.run, arguments.task, parameters))
    if count != 1 or (parameters is None) != (step_s is None):
        raise ConfigurationError("plan: name one of --from FILE, --task T, or --parameters P with --step-seconds S")
    if steps is not None:
        check_least("plan", "--steps", steps)
    if arguments.run is not None:
        return read_job(arguments.run, steps)
    if arguments.task is not None:
        try:
            return task_job(arguments.task, steps), True
        except ImportError as error:
            raise ConfigurationError(f"plan: {error}: pip install 'mpicomp[torch,bench]'") from error
    if not 1 <= parameters < 1e15 or not 0 < step_s < float("inf"):
        raise ConfigurationError(
            f"plan: --parameters must be at least 1 and --step-seconds above 0, got {parameters} and {step_s}"
        )
    return gpt_job(int(parameters), step_s, steps), False
