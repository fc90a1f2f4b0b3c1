"""``mpicomp bench regret``: what choosing the collective costs over knowing it, on a grid of emulated networks."""

import argparse
import time

HELP = "compare auto with the best fixed plan on a grid of emulated networks (needs root)"

_COMMAND = "bench regret"
_NETWORKS = "50mbit/0us,50mbit/1ms,50mbit/10ms,200mbit/0us,200mbit/1ms,200mbit/10ms,1gbit/0us,2.5gbit/0us"
_COLUMNS = {
    "bandwidth": "",
    "latency": "",
    "numel": "d",
    "ratio": "g",
    "best": "",
    "best_s": ".4g",
    "chosen": "",
    "median_s": ".4g",
    "regret": "+.1%",
    "regret_low": "+.1%",
    "regret_high": "+.1%",
    "best_dense_s": ".4g",
    "behind_dense": "+.1%",
    "prediction_error": ".1%",
}


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        "Run `mpicomp bench collectives` with all plans and auto in one lab a network, and show for every network, "
        "length and ratio how much longer auto takes than the best fixed plan. The default grid takes up to 40 minutes."
    )
    parser.add_argument("--hosts", type=int, default=4, metavar="N", help="of each lab (%(default)s)")
    parser.add_argument(
        "--networks",
        default=_NETWORKS,
        metavar="B/L[,..]",
        help="bandwidth and latency of each lab's links (%(default)s)",
    )
    parser.add_argument("--numel", default="262144,4194304,25600000", metavar="N[,..]", help="elements (%(default)s)")
    parser.add_argument("--ratio", default="0.001,0.01", metavar="R[,..]", help="kept fractions (%(default)s)")
    parser.add_argument("--compressor", default="topk", metavar="A[,..]", help="see bench collectives (%(default)s)")
    parser.add_argument("--limit", type=float, default=0.6, metavar="S", help="seconds of timing a plan (%(default)s)")
    parser.add_argument("--json", metavar="F", help="write all rows to F as one JSON object, after every network")
    parser.set_defaults(alone=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the labs one after the other, and print a table."""
    from mpicomp.bench.measure import results
    from mpicomp.bench.measure.networks import Network, check_lab, rows_in_lab
    from mpicomp.bench.regret import judged, prediction_errors, summary
    from mpicomp.cli.options import check_least, check_writable, read_compressors, read_list, read_numels, read_ratios
    from mpicomp.errors import ConfigurationError

    networks = [Network.read(word) for word in read_list(arguments.networks)]
    if not networks:
        raise ConfigurationError(f"{_COMMAND}: --networks names nothing; write for example 50mbit/1ms")
    check_least(_COMMAND, "--hosts", arguments.hosts)
    read_numels(_COMMAND, arguments.numel)
    read_compressors(_COMMAND, read_list(arguments.compressor), read_ratios(_COMMAND, arguments.ratio))
    if arguments.json is not None:
        check_writable(_COMMAND, arguments.json)
    check_lab(_COMMAND)

    options = ["--numel", arguments.numel, "--ratio", arguments.ratio, "--compressor", arguments.compressor]
    options += ["--limit", str(arguments.limit)]
    begin = time.monotonic()

    def watch(line: str) -> None:
        if "elements" in line and (", auto: " in line or line.startswith("WRONG")):
            print(f"{time.monotonic() - begin:6.0f} s  {network}  {line.removeprefix('# ')}", flush=True)

    found = []
    for network in networks:
        own, job = rows_in_lab(arguments.hosts, network, options, watch)
        found += judged(own)
        if arguments.json is not None:
            results.write(arguments.json, found, 1, job=job)
    cells = [row for row in found if row["chosen"] is not None]
    results.show(cells, _COLUMNS)
    print("\n" + "\n".join(summary(cells, prediction_errors(found))))
    print(f"seconds in all: {time.monotonic() - begin:.0f}")
    return 0
