"""``mpicomp doctor``: the MPI, launcher, hosts and GPUs of a job, and their problems."""

from __future__ import annotations

import argparse
import json

HELP = "show which MPI, launcher, hosts and GPUs a job gets, and their problems"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the options of this command."""
    parser.add_argument("--json", action="store_true", help="print one JSON object instead of text")


def run(arguments: argparse.Namespace) -> int:
    """Print the report once, and return 1 if there is a problem."""
    from mpicomp.job import abort, doctor, launcher

    launch = launcher.detect()
    report = doctor.examine()
    mpi = abort.communicator_alive()
    connected = mpi is not None and mpi.COMM_WORLD.Get_size() > 1
    # Processes that do not find each other are all rank 0; then the launcher's rank decides who prints.
    alone = 0 if launch is None else launch.rank
    if (mpi.COMM_WORLD.Get_rank() if connected else alone) == 0:
        print(json.dumps(report, indent=2) if arguments.json else doctor.render(report))
    elif not connected:
        return 0  # a launcher that sees one process fail may end the others, before the first one has printed
    return 1 if report["problems"] else 0
