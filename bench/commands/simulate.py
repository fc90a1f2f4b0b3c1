"""``mpicomp simulate``: step times at ranks and networks that are not here."""

import argparse
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from mpicomp.cli.options import add_plugin, count, table_columns, write_json

if TYPE_CHECKING:
    from mpicomp.bench.simulate.measured import Measured
    from mpicomp.bench.simulate.rows import Plan
    from mpicomp.bench.simulate.topology import Links

HELP = "predict the seconds of a step at other ranks and networks, from what one run has measured"

_COMMAND = "simulate"
_AUTO = "auto"
_GRID = 13  # bandwidths of a picture
_AROUND = 100.0  # times less and more than the bandwidth of the table, that a picture shows
_COLUMNS = table_columns(
    "ranks:d hosts:d plan overlap step_s:.4g exchange_s:.4g own_work_s:.3g speedup:.2f efficiency:.1%"
)


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_plugin(parser)
    parser.set_defaults(alone=True)
    parser.add_argument(
        "--from", dest="known", metavar="F", required=True, help="what `mpicomp train --measured F` wrote"
    )
    parser.add_argument("--ranks", default="2,4,8,16,32,64", metavar="N[,..]", help="numbers of ranks (%(default)s)")
    parser.add_argument("--per-host", type=int, metavar="K", help="ranks of a host (default: as in the recorded run)")
    parser.add_argument(
        "--bandwidth", metavar="B", help="of a host's link, such as 10gbit (default: as it was measured)"
    )
    parser.add_argument(
        "--latency", metavar="L", help="of a message between hosts, such as 50us (default: as measured)"
    )
    parser.add_argument(
        "--switch", metavar="B", help="of the switch between all hosts (default: as much as their links)"
    )
    parser.add_argument(
        "--compressor",
        metavar="A[,..]",
        help="names from `mpicomp list`, configurations as JSON, or auto for what mpicomp chooses (auto where the "
        "recorded run has chosen, else topk)",
    )
    parser.add_argument("--ratio", default="0.01", metavar="R[,..]", help="kept fractions (%(default)s)")
    parser.add_argument(
        "--collective", default=_AUTO, metavar="X[,..]", help="names, or auto for the fastest that fits (%(default)s)"
    )
    parser.add_argument(
        "--overlap", choices=("on", "off", "both"), default="on", help="exchange while backward goes on (%(default)s)"
    )
    parser.add_argument(
        "--bucket-bytes",
        type=int,
        metavar="N",
        help="cut gradients into other buckets for named compressors (default: as recorded)",
    )
    parser.add_argument("--json", metavar="F", help="write the rows to F as one JSON object")
    parser.add_argument("-o", "--output", metavar="F.svg", help="draw speed-ups against ranks and bandwidth")


def run(arguments: argparse.Namespace) -> int:
    """Simulate, and print the rows."""
    from mpicomp.bench.measure.results import SCHEMA, show
    from mpicomp.bench.simulate.measured import read
    from mpicomp.bench.simulate.rows import simulate

    from mpicomp.cli.options import check_writable

    check_writable(_COMMAND, arguments.json, arguments.output)
    if arguments.output is not None:
        from mpicomp.bench.simulate.picture import check_installed

        check_installed()
    measured = read(arguments.known)
    ranks = _ranks(arguments.ranks)
    plans = _plans(arguments, measured)
    if arguments.bucket_bytes is not None:
        measured = _cut(arguments.bucket_bytes, measured, plans)
    overlaps = {"on": [True], "off": [False], "both": [True, False]}[arguments.overlap]
    links = _links(arguments)
    places = [_topology(arguments, measured, rank, links) for rank in ranks]
    print(
        f"from {measured.task} on {count(measured.ranks, 'rank')} of {count(measured.hosts, 'host')}: "
        f"{sum(bucket.numel for bucket in measured.buckets):,} elements in {count(len(measured.buckets), 'bucket')}, "
        f"{measured.compute_s:.4g} s a step without exchange"
    )
    for note in dict.fromkeys(note for place in places for note in place.notes):
        print(f"note: {note}")
    rows = list(simulate(measured, places, plans, overlaps))
    show(rows, _COLUMNS)
    written: dict[str, Any] = {"schema": SCHEMA, "rows": rows}
    if arguments.output is not None:
        written["grid"] = _draw(arguments, measured, plans, ranks, links)
        print(f"drawn: {arguments.output}")
    if arguments.json is not None:
        write_json(arguments.json, written)
    return 0


def _draw(
    arguments: argparse.Namespace, measured: "Measured", plans: "Sequence[Plan]", ranks: Sequence[int], links: "Links"
) -> list[dict[str, Any]]:
    """Draw the picture, and return the rows that it shows."""
    from dataclasses import replace

    from mpicomp.bench.simulate.compute_time import ComputeTime
    from mpicomp.bench.simulate.picture import draw
    from mpicomp.bench.simulate.rows import Simulation

    compute_time = ComputeTime(measured.cost)
    per_byte = links.seconds_per_byte or measured.cost.network.seconds_per_byte
    shown = [plan for plan in plans if plan.title != "dense"]
    grid: list[dict[str, Any]] = []
    for place in range(_GRID):
        rate = _AROUND ** (2 * place / (_GRID - 1) - 1) / per_byte
        there = replace(links, seconds_per_byte=1 / rate)
        for rank in ranks:
            simulation = Simulation(measured, _topology(arguments, measured, rank, there), compute_time)
            for plan in shown:
                row = simulation.row(plan, arguments.overlap != "off")
                names = ("ranks", "plan", "step_s", "dense_step_s", "speedup")
                grid.append({"bandwidth": 8 * rate} | {name: row[name] for name in names})
    draw(arguments.output, grid, 8 / per_byte)
    return grid


def _plans(arguments: argparse.Namespace, measured: "Measured") -> "list[Plan]":
    """Return what is simulated, dense exchange first."""
    from mpicomp.bench.simulate.rows import Plan

    from mpicomp.cli.options import read_compressors, read_list, read_ratios
    from mpicomp.collectives import bind
    from mpicomp.compressors import Dense
    from mpicomp.errors import ConfigurationError, IncompatiblePairError

    words = read_list(arguments.compressor or ("topk" if measured.auto is None else _AUTO))
    plans = [Plan(Dense())]
    for compressor in read_compressors(
        _COMMAND, [word for word in words if word != _AUTO], read_ratios(_COMMAND, arguments.ratio)
    ):
        fitting = []
        for name in read_list(arguments.collective):
            try:
                if name != _AUTO:
                    bind(compressor, name)
                fitting.append(Plan(compressor, name))
            except IncompatiblePairError as error:
                problem = error
        if not fitting:
            raise problem
        plans += [plan for plan in fitting if plan not in plans]
    if _AUTO in words:
        if measured.auto is None:
            raise ConfigurationError(
                "simulate: auto needs what it learns of elements, and the recorded run had another policy; record one "
                "with `mpicomp train --measured F` and neither --compressor nor --policy"
            )
        plans.append(Plan(None))
    return plans


def _cut(bucket_bytes: int, measured: "Measured", plans: "Sequence[Plan]") -> "Measured":
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    if any(plan.compressor is None for plan in plans):
        raise ConfigurationError(
            "simulate: auto knows the elements of the buckets that were recorded, and --bucket-bytes cuts others; "
            "leave one out"
        )
    return measured.cut(check_least(_COMMAND, "--bucket-bytes", bucket_bytes))


def _ranks(text: str) -> list[int]:
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"{_COMMAND}: --ranks must be whole numbers such as 2,64, got {text!r}") from None
    return sorted({check_least(_COMMAND, "--ranks", number, 2) for number in numbers})


def _links(arguments: argparse.Namespace) -> "Links":
    from mpicomp.bench.lab.lab_settings import LabError, parse_bandwidth, parse_latency
    from mpicomp.bench.simulate.topology import Links

    from mpicomp.errors import ConfigurationError

    def per_byte(option: str, text: str | None) -> float | None:
        try:
            return None if text is None else 8 / parse_bandwidth(text)
        except LabError as error:
            raise ConfigurationError(f"{_COMMAND}: {str(error).replace('--bandwidth', option)}") from None

    try:
        latency = None if arguments.latency is None else max(1e-9, parse_latency(arguments.latency) * 1e-9)
    except LabError as error:
        raise ConfigurationError(f"{_COMMAND}: {error}") from None
    return Links(per_byte("--bandwidth", arguments.bandwidth), latency, per_byte("--switch", arguments.switch))


def _topology(arguments: argparse.Namespace, measured: "Measured", ranks: int, links: "Links") -> Any:
    from mpicomp.bench.simulate.topology import Topology

    from mpicomp.setting_checks import check_least

    per_host = arguments.per_host
    if per_host is None:
        per_host = -(-measured.ranks // measured.hosts)
    check_least(_COMMAND, "--per-host", per_host)
    return Topology(ranks, per_host, measured.cost.network, measured.ranks, links)
