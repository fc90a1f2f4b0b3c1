"""The command line: ``mpicomp COMMAND ...``.

A command is a module with a one-line ``HELP``, ``add_arguments(parser)`` and ``run(arguments) -> int``, which returns
the exit status; `COMMANDS` has its name and its package. Importing the modules loads neither MPI nor torch: ``--help``
imports all of them, also on a login node. A command for rank 0 only, without MPI, sets ``alone`` among the defaults of
its parser.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import io
import os
import sys
from collections.abc import Callable, Sequence

from mpicomp._version import __version__
from mpicomp.job import abort, launcher, print_stderr

_BENCH = "mpicomp.bench.commands"
COMMANDS = {
    "tour": _BENCH,
    "doctor": __name__,
    "list": __name__,
    "bench": _BENCH,
    "train": _BENCH,
    "lab": _BENCH,
    "report": _BENCH,
    "plan": _BENCH,
}
_REPLACED = {"simulate": "plan --hosts N --bandwidth B --parameters P --step-seconds S"}
INTERRUPTED = 130  # exit status that a shell reports after SIGINT
BROKEN_PIPE = 141  # the same after SIGPIPE


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="mpicomp", description="Compressed gradient exchange for data-parallel training, native to MPI."
    )
    parser.add_argument("--version", action="version", version=f"mpicomp {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in COMMANDS if chosen is None else [chosen]:
        module = importlib.import_module(f"{COMMANDS[name]}.{name}")
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(_command=module)
    return parser


def _parse(words: Sequence[str]) -> argparse.Namespace:
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in COMMANDS:
        if chosen in _REPLACED:
            print_stderr(f"'{chosen}' is now: mpicomp {_REPLACED[chosen]}")
            raise SystemExit(2)
        near = difflib.get_close_matches(chosen, COMMANDS, n=1)
        advice = f"did you mean '{near[0]}'?" if near else f"there are {', '.join(COMMANDS)}"
        print_stderr(f"unknown command '{chosen}'; {advice}")
        raise SystemExit(2)
    return _parser(chosen).parse_args(words)


def _parse_on_one(parse: Callable[[], argparse.Namespace], rank: int) -> argparse.Namespace | int:
    silence = io.StringIO()
    with contextlib.ExitStack() as stack:
        if rank != 0:  # all ranks get the same command line, so one of them prints errors
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        try:
            return parse()
        except SystemExit as end:
            return end.code if isinstance(end.code, int) else 0


def _report(error: Exception) -> None:
    mpi = abort.communicator_alive()
    text = " ".join(str(error).split("\n")) or type(error).__name__
    size, rank = (1, 0) if mpi is None else (mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_rank())
    notes = {} if size == 1 else abort.timed_barrier(text.encode(errors="replace"))
    if size > 1 and (len(notes) < size or len(set(notes.values())) > 1):
        print_stderr(f"rank {rank} of {size}: {text}")
    elif rank == 0:
        print_stderr(text)


def _end_job_with(launch: launcher.Launch | None) -> None:
    # This rank is about to exit with an error: before MPI_Init the others would wait for it.
    mpi = sys.modules.get("mpi4py.MPI")
    is_finalized = mpi is not None and mpi.Is_finalized()
    if abort.communicator_alive() is not None or (launch is not None and launch.size > 1 and not is_finalized):
        with contextlib.suppress(ImportError, RuntimeError):  # no mpi4py, or no MPI library: no rank waits
            abort.install()


def _run(
    run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, launch: launcher.Launch | None
) -> int:
    from mpicomp.errors import MpicompError

    try:
        if getattr(arguments, "plugin", None):  # before any name is looked up
            from mpicomp import plugins

            for name in arguments.plugin:
                plugins.add(name)
            plugins.load_all()
        status = run(arguments)
    except MpicompError as error:
        _end_job_with(launch)
        _report(error)
        return 2
    except BrokenPipeError:
        raise
    except Exception:
        _end_job_with(launch)
        raise
    if status != 0:
        _end_job_with(launch)
    return status


def run_program(parse: Callable[[], argparse.Namespace], run: Callable[[argparse.Namespace], int]) -> int:
    """Run a program as commands are run: an error is printed once, and ends all ranks of a job.

    ``parse`` reads the command line; with ``alone`` among the arguments rank 0 alone runs, without MPI. It returns
    the exit status that ``run`` returned, or 2 for a wrong command line and for errors that their message explains.
    """
    launch = launcher.detect()
    try:
        arguments = _parse_on_one(parse, launch.rank if launch else 0)
        if launch is not None and getattr(arguments, "alone", False):
            if launch.rank != 0:
                return 0
            launch = None  # the others have exited, and an error must not wait for them
        status = arguments if isinstance(arguments, int) else _run(run, arguments, launch)
        if sys.stdout is not None:  # None where the caller has closed it
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of the output has closed it, as `head` does. Python would flush again at exit and fail.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        _end_job_with(launch)
        return INTERRUPTED
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command, of the words after ``mpicomp``, and return its exit status; see `run_program`."""
    words = sys.argv[1:] if argv is None else argv
    return run_program(lambda: _parse(words), lambda arguments: int(arguments._command.run(arguments) or 0))
