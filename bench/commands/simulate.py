"""``mpicomp simulate``: seconds of a step by the cost model, on a network that is not here."""

import argparse
import json
from collections.abc import Iterator, Sequence
from typing import TYPE_CHECKING, Annotated, Any, TypedDict

from mpicomp.cli.options import add_plugin, table_columns, write_json

if TYPE_CHECKING:
    from mpicomp.collectives import Scheme
    from mpicomp.compressors import Compressor
    from mpicomp.mpi.rounds import Group

HELP = "predict the seconds of a step on other hosts and links by the cost model"

_COMMAND = "simulate"
_AUTO = "auto"
_LATE = 1 << 30  # number of a step in the long run
_LINK_SD = 0.1  # of the logarithms of a link's latency and bandwidth: they are given
_COLUMNS = table_columns(
    "hosts:d plan collective step_s:.4g exchange_s:.4g kernels_s:.3g wire_bytes:.4g speedup:.2f efficiency:.1%"
)


class SimulatedRow(TypedDict):
    """A row of ``simulate``."""

    hosts: Annotated[int, "with one rank each"]
    plan: Annotated[str, "the compressor"]
    config: Annotated[dict[str, Any], "its configuration"]
    collective: Annotated[str, "the one that was named, or the fastest that delivers all that was selected"]
    step_s: Annotated[float, "a step: computing, and then the exchange of one bucket"]
    exchange_s: Annotated[float, "the exchange: rounds and kernels"]
    kernels_s: Annotated[float, "of it, a rank's computation: selection, coding, sums; measured on this machine"]
    wire_bytes: Annotated[float, "that leave a host in a step, mean over hosts (over some of many)"]
    speedup: Annotated[float, "seconds of a step with the fastest dense exchange over `step_s`"]
    efficiency: Annotated[float, "seconds of a step without any exchange over `step_s`"]


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    add_plugin(parser)
    parser.set_defaults(alone=True)
    parser.add_argument("--hosts", default="2,4,8,16,32,64", metavar="N[,..]", help="with a rank each (%(default)s)")
    parser.add_argument("--bandwidth", default="10gbit", metavar="B", help="of a host's link (%(default)s)")
    parser.add_argument("--latency", default="50us", metavar="L", help="of a message between hosts (%(default)s)")
    parser.add_argument(
        "--from", dest="run", metavar="F", help="parameters and seconds of the run that `train --json F` wrote"
    )
    parser.add_argument("--parameters", type=int, metavar="P", help="elements of the model, float32")
    parser.add_argument("--step-seconds", type=float, metavar="S", help="of a step without any exchange")
    parser.add_argument(
        "--compressor", default="topk", metavar="A[,..]", help="names or configurations as JSON (%(default)s)"
    )
    parser.add_argument("--ratio", default="0.01", metavar="R[,..]", help="kept fractions (%(default)s)")
    parser.add_argument(
        "--collective", default=_AUTO, metavar="X", help="a name, or auto for the fastest that fits (%(default)s)"
    )
    parser.add_argument("--json", metavar="F", help="write the rows to F as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Predict, and print the rows."""
    from mpicomp.bench.lab.lab_settings import LabError, parse_bandwidth, parse_latency
    from mpicomp.bench.measure.results import SCHEMA, show

    from mpicomp.cli.options import check_writable, read_compressors, read_list, read_ratios
    from mpicomp.errors import ConfigurationError

    check_writable(_COMMAND, arguments.json)
    try:
        per_byte = 8 / parse_bandwidth(arguments.bandwidth)
        latency_s = max(1e-9, parse_latency(arguments.latency) * 1e-9)
    except LabError as error:
        raise ConfigurationError(f"{_COMMAND}: {error}") from None
    hosts = _hosts(arguments.hosts)
    numel, compute_s = _model(arguments)
    named = read_compressors(_COMMAND, read_list(arguments.compressor), read_ratios(_COMMAND, arguments.ratio))
    rows = list(simulate(hosts, latency_s, per_byte, numel, compute_s, named, arguments.collective))
    print(f"{numel:,} elements in one bucket, {compute_s:.4g} s a step without exchange")
    show(rows, _COLUMNS)
    if arguments.json is not None:
        write_json(arguments.json, {"schema": SCHEMA, "rows": rows})
    return 0


def simulate(
    hosts: Sequence[int],
    latency_s: float,
    seconds_per_byte: float,
    numel: int,
    compute_s: float,
    compressors: "Sequence[Compressor]",
    collective: str = _AUTO,
) -> Iterator[SimulatedRow]:
    """Yield a row for dense exchange and one for each compressor, at each number of hosts."""
    import numpy as np

    from mpicomp.compressors import Dense
    from mpicomp.cost import CostModel, Network, measure_kernels
    from mpicomp.mpi import LocalWorld
    from mpicomp.mpi.rounds import WORLD, layout_groups

    [alone] = LocalWorld(1).transports
    kernels: dict[str, Any] = {}
    named = [(Dense(), _AUTO)] + [(compressor, collective) for compressor in compressors if compressor != Dense()]
    for count in hosts:
        model = CostModel(Network(count))
        model.kernels = kernels
        model.network.set_link(WORLD, latency_s, seconds_per_byte, _LINK_SD)
        group = layout_groups(range(count), 0)[0]
        dense_s = 0.0
        for compressor, name in named:
            schemes = _schemes(compressor, name, numel, group)
            alone.run(measure_kernels(model, schemes, compressor.feedback, alone))
            candidates = model.candidates(schemes, numel, np.dtype(np.float32), group)
            exchange_s = candidates.seconds()
            fastest = int(np.argmin(exchange_s))
            scheme, seconds = schemes[fastest], float(exchange_s[fastest])
            dense_s = dense_s or compute_s + seconds
            yield {
                "hosts": count,
                "plan": repr(compressor),
                "config": compressor.get_config(),
                "collective": scheme.id,
                "step_s": compute_s + seconds,
                "exchange_s": seconds,
                "kernels_s": candidates.prediction(fastest).kernels_s,
                "wire_bytes": _wire_bytes(scheme, numel, group),
                "speedup": dense_s / (compute_s + seconds),
                "efficiency": compute_s / (compute_s + seconds),
            }


def _schemes(compressor: "Compressor", collective: str, numel: int, group: "Group") -> "list[Scheme[Any]]":
    from mpicomp.collectives import bind
    from mpicomp.policies.plan_selector import collectives_for

    bound = compressor.bind(["parameters"], [numel], warm_up=False)
    names = collectives_for(bound, group, complete=True) if collective == _AUTO else [collective]
    return [bind(bound, name) for name in names]


def _wire_bytes(scheme: "Scheme[Any]", numel: int, group: "Group") -> float:
    import numpy as np

    from mpicomp.cost import sample_views

    found = []
    for view in sample_views(group):
        tasks = scheme.rounds(numel, np.dtype(np.float32), view, _LATE)
        parts = [(task, view.part(task.group)) for task in tasks if not task.once]
        found.append(sum(task.wire_bytes(part) for task, part in parts if part is not None))
    return float(np.mean(found))


def _hosts(text: str) -> list[int]:
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    try:
        numbers = [int(word) for word in text.split(",")]
    except ValueError:
        raise ConfigurationError(f"{_COMMAND}: --hosts must be whole numbers such as 2,64, got {text!r}") from None
    return sorted({check_least(_COMMAND, "--hosts", number, 2) for number in numbers})


def _model(arguments: argparse.Namespace) -> tuple[int, float]:
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    numel, compute_s = arguments.parameters, arguments.step_seconds
    if arguments.run is not None:
        try:
            with open(arguments.run, encoding="utf-8") as file:
                content = json.load(file)
            numel = int(content["parameters"]) if numel is None else numel
            phases = content["phases_s"]
            compute_s = float(phases["compute"] + phases["update"]) if compute_s is None else compute_s
        except OSError as error:
            raise ConfigurationError(f"{_COMMAND}: '{arguments.run}' cannot be read: {error.strerror}") from None
        except (KeyError, RecursionError, TypeError, ValueError) as error:
            raise ConfigurationError(
                f"{_COMMAND}: '{arguments.run}' was not written by `mpicomp train --json FILE` "
                f"({type(error).__name__}: {error})"
            ) from None
    if numel is None or compute_s is None:
        raise ConfigurationError(
            f"{_COMMAND}: the model is not known; name --from FILE of `mpicomp train --json FILE`, or --parameters and "
            "--step-seconds"
        )
    check_least(_COMMAND, "--parameters", numel)
    if not 0 <= compute_s < float("inf"):
        raise ConfigurationError(f"{_COMMAND}: --step-seconds must be a number of at least 0, got {compute_s}")
    return numel, compute_s
