"""``mpicomp bench change``: a network that changes in mid-run, and how soon ``auto`` runs what is best then."""

import argparse
import json
import tempfile
from dataclasses import asdict
from pathlib import Path
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mpicomp.compressors import Compressor

HELP = "show how soon auto follows a change of the network, in an emulated one (needs root)"

_COMMAND = "bench change"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Run auto step after step in a lab whose bandwidth changes, and show what it ran; then time the fixed plans "
        "that it may choose at each bandwidth, and tell after how many steps auto ran the best. Started with mpiexec "
        "or srun it makes no lab: it runs auto among these ranks for as long, while you change their network."
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="of the lab (%(default)s)")
    parser.add_argument(
        "--bandwidths", default="1gbit,50mbit,1gbit", metavar="B[,..]", help="one after the other (%(default)s)"
    )
    parser.add_argument("--latency", default="0us", metavar="L", help="of the links (%(default)s)")
    parser.add_argument("--seconds", type=float, default=15.0, metavar="S", help="of each bandwidth (%(default)s)")
    parser.add_argument("--numel", type=int, default=4_194_304, metavar="N", help="float32 elements (%(default)s)")
    parser.add_argument("--compressor", default="topk", metavar="A", help="a name or JSON (%(default)s)")
    parser.add_argument("--ratio", default="0.01", metavar="R", help="kept fraction (%(default)s)")
    parser.add_argument("--limit", type=float, default=1.5, metavar="S", help="of timing a fixed plan (%(default)s)")
    parser.add_argument("--json", metavar="F", help="write steps and phases to F as one JSON object")


def run(arguments: argparse.Namespace) -> int:
    """Run the steps, or the labs that they are run in."""
    from mpicomp.cli.options import check_least, check_writable, read_compressors, read_list, read_numels, read_ratios
    from mpicomp.errors import ConfigurationError
    from mpicomp.system import launcher

    check_least(_COMMAND, "--hosts", arguments.hosts)
    read_numels(_COMMAND, str(arguments.numel))
    compressors = read_compressors(_COMMAND, read_list(arguments.compressor), read_ratios(_COMMAND, arguments.ratio))
    if len(compressors) != 1:
        raise ConfigurationError(f"{_COMMAND}: --compressor and --ratio must give one plan's, got {len(compressors)}")
    if not 0 < arguments.seconds < float("inf"):
        raise ConfigurationError(f"{_COMMAND}: --seconds must be a number above 0, got {arguments.seconds}")
    launch = launcher.detect()
    if arguments.json is not None and (launch is None or launch.rank == 0):
        check_writable(_COMMAND, arguments.json)
    return (_in_labs if launch is None else _among_ranks)(arguments, compressors[0])


def _among_ranks(arguments: argparse.Namespace, compressor: "Compressor") -> int:
    """Run auto among the ranks of this job."""
    from mpicomp.bench.change import lines_of, run_steps
    from mpicomp.transport.mpi import MPITransport

    transport = MPITransport()
    seconds = arguments.seconds * len(arguments.bandwidths.split(","))
    steps = run_steps(compressor, arguments.numel, seconds, transport)
    if transport.group.rank == 0:
        if arguments.json is not None:
            Path(arguments.json).write_text(json.dumps({"schema": 1, "steps": [asdict(step) for step in steps]}) + "\n")
        print("\n".join(lines_of(steps, [])), flush=True)
    transport.close()
    return 0


def _in_labs(arguments: argparse.Namespace, compressor: "Compressor") -> int:
    """Run auto in a lab that changes, then the fixed plans in labs that do not."""
    from mpicomp.bench.change import Step, lines_of, medians_of, phases_of
    from mpicomp.bench.measure.networks import Network, check_lab, rows_in_lab, run_in_lab
    from mpicomp.policies.carriers import names_for
    from mpicomp.rounds import Group

    networks = [Network.read(f"{word}/{arguments.latency}") for word in arguments.bandwidths.split(",")]
    check_lab(_COMMAND)
    options = ["--numel", str(arguments.numel), "--compressor", arguments.compressor, "--ratio", arguments.ratio]
    with tempfile.TemporaryDirectory(prefix="mpicomp-bench-") as folder:
        schedule, path = Path(folder) / "schedule", Path(folder) / "steps.json"
        times = [arguments.seconds * place for place in range(len(networks))]
        lines = [f"{at_s} {own.bandwidth} {own.latency}" for at_s, own in zip(times, networks, strict=True)]
        schedule.write_text("\n".join(lines) + "\n")
        words = ["bench", "change", *options, "--seconds", str(arguments.seconds), "--json", str(path)]
        words += ["--bandwidths", arguments.bandwidths]
        print(f"{_COMMAND}: {arguments.hosts} hosts, {', then '.join(map(str, networks))}", flush=True)
        run_in_lab(arguments.hosts, networks[0], words, ["--schedule", str(schedule)], lambda line: None)
        steps = [Step(**step) for step in json.loads(path.read_text())["steps"]]
    fixed = {}
    # Auto chooses among these and dense ones, which are timed in any case.
    names = ",".join(names_for(compressor, Group(0, arguments.hosts), whole=True))
    for network in dict.fromkeys(networks):
        found, _ = rows_in_lab(
            arguments.hosts,
            network,
            [*options, "--limit", str(arguments.limit), "--collective", names],
            lambda line: None,
        )
        fixed[network.bandwidth] = medians_of(found)
    phases = phases_of(steps, [network.bandwidth for network in networks], arguments.seconds, fixed)
    print("\n".join(lines_of(steps, [phase.first for phase in phases[1:] if phase.first is not None])))
    print()
    for phase in phases:
        best_s = fixed[phase.bandwidth][phase.best]
        others = [name for name in phase.as_good if name != phase.best]
        near = f", as good: {', '.join(others)}" if others else ""
        print(f"{phase.bandwidth}: best is {phase.best} with {1e3 * best_s:.4g} ms{near}; ", end="")
        if phase.first is None:
            print("the change was not seen")
        else:
            assert phase.mostly is not None
            after = "never ran it" if phase.steps is None else f"ran it after {phase.steps} steps"
            print(f"seen at step {phase.first}, auto {after}, and in {phase.share:.0%} of the second half's")
            took = fixed[phase.bandwidth].get(phase.mostly)
            slower = "not timed" if took is None else f"{took / best_s - 1:+.1%} by its own timing"
            print(f"  mostly it ran {phase.mostly} there: {slower}")
    if arguments.json is not None:
        written = {
            "schema": 1,
            "steps": [asdict(step) for step in steps],
            "phases": [asdict(phase) for phase in phases],
            "fixed": fixed,
        }
        Path(arguments.json).write_text(json.dumps(written) + "\n")
    return 0
