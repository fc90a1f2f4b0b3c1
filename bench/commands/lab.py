"""The command ``mpicomp lab``: run a command on an emulated cluster."""

import argparse
import sys

HELP = "run a command on an emulated cluster of network namespaces, without root where the kernel allows it"


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Describe the command line."""
    actions = parser.add_subparsers(dest="action", metavar="run", required=True)
    run_parser = actions.add_parser(
        "run",
        help="run COMMAND as ranks of an MPI job on emulated hosts",
        description="Run COMMAND as K ranks on each of N emulated hosts: shared memory inside a host, "
        "shaped TCP between hosts. Needs user namespaces, or root, and the command ip; removes all of it afterwards.",
        epilog="""\
Links are the same in both directions; latency is one way, and between hosts with different links it is the
mean of the two. The way through the emulation itself adds about 20 us. On two cores, 4 hosts at 1 Gbit/s come
within 15 % of the links' rate, and 2.5 Gbit/s within 30 %; beyond 10 Gbit/s for all hosts together the
processor is the limit, and a warning is printed. On a machine that others use as well, put nice -n -15 before it.

examples:
  mpicomp lab run --hosts 4 --bandwidth 1gbit --latency 50us -- python train.py
  mpicomp lab run --hosts 2 --ppn 2 --bandwidth 1gbit,100mbit --latency 1ms -- mpicomp doctor""",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    run_parser.add_argument("--hosts", type=int, required=True, metavar="N", help="number of hosts")
    run_parser.add_argument("--ppn", type=int, default=1, metavar="K", help="ranks on each host (%(default)s)")
    run_parser.add_argument(
        "--bandwidth",
        default="1gbit",
        metavar="RATE[,..]",
        help="of each host's link in each direction, in bit, kbit, mbit or gbit; one, or one a host (%(default)s)",
    )
    run_parser.add_argument(
        "--latency",
        default="0us",
        metavar="TIME[,..]",
        help="one way between two hosts, in ns, us, ms or s; one, or one a host (%(default)s)",
    )
    run_parser.add_argument("--mpi", metavar="mpich|openmpi", help="whose launcher (found out)")
    run_parser.add_argument(
        "--schedule",
        metavar="FILE",
        help="change all links while the job runs: lines of 'seconds bandwidth latency'; a bandwidth of 0 is a link "
        "that is down",
    )
    run_parser.add_argument(
        "--loss", default="0%", metavar="P%", help="percentage of packets that get lost, of 1,500 bytes then (0%%)"
    )
    run_parser.add_argument("--seed", type=int, default=0, metavar="K", help="of which packets these are (0)")
    run_parser.add_argument("command", nargs=argparse.REMAINDER, metavar="-- COMMAND", help="command of each rank")


def run(arguments: argparse.Namespace) -> int:
    """Run the lab and return the exit status of the job, or 2 when there was none."""
    from dataclasses import replace

    from mpicomp.bench.lab.lab_settings import LabError, make_settings
    from mpicomp.bench.lab.run import run_lab

    command = arguments.command
    if command and command[0] == "--":
        command = command[1:]
    try:
        settings = make_settings(
            arguments.hosts,
            arguments.ppn,
            arguments.bandwidth,
            arguments.latency,
            command,
            mpi=arguments.mpi,
            schedule=arguments.schedule,
            loss=arguments.loss,
        )
        return run_lab(replace(settings, seed=arguments.seed))
    except LabError as error:
        print(f"lab: {error}", file=sys.stderr)
        return 2
