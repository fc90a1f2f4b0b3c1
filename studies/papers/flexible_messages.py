"""What an allgather of large messages takes and what its formula says, among the ranks of a lab.

``mpicomp lab run --hosts 8 --bandwidth 500mbit --latency 10ms -- python studies/papers/flexible_messages.py --gbps 0.5
--latency-ms 10``; with ``UCX_RNDV_THRESH=inf`` before it UCX sends large messages at once, without asking the receiver.
"""

import argparse
import os
import sys
from collections.abc import Sequence
from statistics import median

import flexible_tables
import numpy as np
import paper_runs
from mpicomp.bench.measure.timings import gather

from mpicomp.cli import run_program
from mpicomp.cost import formulas
from mpicomp.rounds import Group, Round
from mpicomp.setting_checks import check_least
from mpicomp.transport import Transport

_STUDY = "flexible_messages"
_BYTE = np.dtype(np.uint8)


def ways(nbytes: int, group: Group) -> dict[str, list[Round]]:
    """Return rounds by name: an allgather by MPI, and the same by messages to a neighbour, which go in segments."""
    right, left = (group.rank + 1) % group.size, (group.rank - 1) % group.size
    one = Round("sendrecv", (nbytes, nbytes), _BYTE, peers=(right, left))
    neighbours = [Round(one.operation, one.counts, _BYTE, peers=one.peers) for _ in range(group.size - 1)]
    whole = Round("allgatherv", [nbytes] * group.size, _BYTE)
    filled = {"allgather of MPI": [whole], "by neighbours, in segments": neighbours}
    return {name: [flexible_tables.filled(task, group) for task in tasks] for name, tasks in filled.items()}


def timed(tasks: Sequence[Round], transport: Transport, turns: int) -> float:
    """Return the median of the seconds from when the last rank begins to when the last one ends. Collective."""
    seconds = []
    for turn in range(turns + 1):
        gather(np.zeros(1), transport)
        start = transport.clock()
        transport.run(flexible_tables.communicate(tasks))
        clocks = gather(np.array([start, transport.clock()]), transport)
        if turn > 0:  # the first makes connections
            seconds.append(float(clocks[:, 1].max() - clocks[:, 0].max()))
    return median(seconds)


def parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="studies/papers/flexible_messages.py",
        description="Time an allgather of large messages, and show what its formula says.",
    )
    parser.add_argument("--gbps", type=float, required=True, metavar="G", help="of the lab's links")
    parser.add_argument("--latency-ms", type=float, required=True, metavar="M", help="of the lab's links")
    parser.add_argument("--bytes", type=int, default=4_000_000, metavar="B", help="that each rank has (%(default)s)")
    parser.add_argument("--turns", type=int, default=3, metavar="T", help="(%(default)s)")
    parser.set_defaults(alone=False)
    return parser


def run(arguments: argparse.Namespace) -> int:
    """Time both ways and print them, on rank 0."""
    from mpicomp.transport.mpi import MPITransport  # it loads MPI

    check_least(_STUDY, "--bytes", arguments.bytes)
    check_least(_STUDY, "--turns", arguments.turns)
    transport = MPITransport()
    group = transport.group
    cost = formulas.allgather(group.size, arguments.bytes)
    formula_s = cost.seconds(arguments.latency_ms / 1e3, 8e-9 / arguments.gbps)
    found = []
    for name, tasks in ways(arguments.bytes, group).items():
        here_s = timed(tasks, transport, arguments.turns)
        found.append({"way": name, "formula": 1e3 * formula_s, "here": 1e3 * here_s, "over": here_s / formula_s})
    if group.rank == 0:
        asks = os.environ.get("UCX_RNDV_THRESH", "as UCX sets it")
        title = f"{group.size} hosts, {arguments.gbps:g} Gbit/s, {arguments.latency_ms:g} ms, UCX_RNDV_THRESH {asks}"
        paper_runs.show(f"Milliseconds of an allgather of {arguments.bytes} bytes a rank: {title}", found, {
            "way": "", "formula": ".0f", "here": ".0f", "over": ".2f",
        })  # fmt: skip
    transport.close()
    return 0


if __name__ == "__main__":
    sys.exit(run_program(parser().parse_args, run))
