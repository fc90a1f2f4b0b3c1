"""``mpicomp tour``: three trainings on an emulated slow network, and their seconds, bytes and loss."""

import argparse
import os
import shutil
import subprocess
import sys

HELP = "see its use: train on four emulated hosts, with dense exchange and without, in three minutes"

HOSTS, BANDWIDTH = 4, "200mbit"
_MIN_STEPS = 10


def add_arguments(parser: argparse.ArgumentParser) -> None:
    """Declare the options."""
    parser.description = (
        f"Train a small GPT on {HOSTS} emulated hosts with links of {BANDWIDTH}, by dense exchange, by mpicomp's "
        "choice and by LocalMuon, and compare seconds, bytes and loss. Needs neither root nor a network."
    )
    parser.add_argument("--task", default="text-gpt", help="as in mpicomp train (%(default)s)")
    parser.add_argument("--steps", type=int, default=60, metavar="S", help="of each training (%(default)s)")
    parser.add_argument("--report", default="tour.html", metavar="F.html", help="where the report goes (%(default)s)")
    parser.set_defaults(alone=True)


def run(arguments: argparse.Namespace) -> int:
    """Run the trainings in a lab, or on simulated links where there can be none."""
    from mpicomp.bench.lab import launch
    from mpicomp.bench.lab.lab_settings import LabError, make_settings
    from mpicomp.bench.lab.run import run_lab

    from mpicomp.cli.options import check_drawing, check_writable
    from mpicomp.errors import ConfigurationError
    from mpicomp.setting_checks import check_least

    check_least("tour", "--steps", arguments.steps, _MIN_STEPS)
    check_drawing("tour", "torch,bench,report", ("torch", "rich"))
    check_writable("tour", arguments.report)
    if sys.stdout.isatty():  # for rich in a rank, whose output goes through the launcher
        os.environ |= {"FORCE_COLOR": "1", "COLUMNS": str(shutil.get_terminal_size().columns)}
    words = [arguments.task, str(arguments.steps), os.path.abspath(arguments.report)]
    command = [sys.executable, "-m", "mpicomp.bench.commands.tour_ranks", *words]
    print(
        f"{arguments.task} on {HOSTS} hosts with links of {BANDWIDTH}, three times: by dense exchange, by mpicomp's "
        "choice (auto), and by LocalMuon",
        flush=True,
    )
    try:
        return run_lab(make_settings(HOSTS, 1, BANDWIDTH, "0us", command))
    except LabError as error:
        print(f"simulated links, since this machine has no emulated hosts: mpicomp lab {error}", flush=True)
    try:
        launcher = launch.find_launcher()
        extra = ["--oversubscribe"] if launch.find_mpi(launcher) == "openmpi" else []
    except LabError as error:
        raise ConfigurationError(f"tour: {error}") from error
    line = [str(launcher), *extra, "-n", str(HOSTS), *command, "--simulated"]
    return subprocess.run(line, check=False, env=os.environ | launch.AS_ROOT).returncode
