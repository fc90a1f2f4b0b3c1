"""The command line: ``mpicomp COMMAND ...``.

A command is a module of this package with a one-line ``HELP``, ``add_arguments(parser)`` and
``run(arguments) -> int``, which returns the exit status. Its name stands in `COMMANDS`. The modules load
nothing heavy when they are imported, no MPI above all: ``--help`` imports all of them, also on a login node.
What is to run on rank 0 alone, without MPI, sets ``alone`` among the defaults of its parser.
"""

from __future__ import annotations

import argparse
import contextlib
import difflib
import importlib
import importlib.util
import io
import os
import sys
from collections.abc import Callable, Sequence
from types import ModuleType

from mpicomp._version import __version__
from mpicomp.system import abort, launcher

COMMANDS = ("doctor", "list", "bench", "train", "lab", "report", "simulate", "trace")
INTERRUPTED = 130  # what a shell reports for a program that SIGINT ended
BROKEN_PIPE = 141  # the same for SIGPIPE


def _available() -> list[str]:
    return [name for name in COMMANDS if importlib.util.find_spec(f"{__name__}.{name}") is not None]


def _parser(chosen: str | None) -> argparse.ArgumentParser:
    """Return the parser; with a command chosen, that command's module is the only one that is imported."""
    parser = argparse.ArgumentParser(
        prog="mpicomp", description="Compressed gradient exchange for data-parallel training, native to MPI."
    )
    parser.add_argument("--version", action="version", version=f"mpicomp {__version__}")
    subparsers = parser.add_subparsers(title="commands", metavar="COMMAND", required=True)
    for name in _available() if chosen is None else [chosen]:
        module = _module(name)
        subparser = subparsers.add_parser(name, help=module.HELP, description=module.HELP)
        module.add_arguments(subparser)
        subparser.set_defaults(_command=module)
    return parser


def _module(name: str) -> ModuleType:
    return importlib.import_module(f"{__name__}.{name}")


def _unknown(name: str) -> str:
    near = difflib.get_close_matches(name, _available(), n=1)
    if near:
        return f"mpicomp: unknown command '{name}'; did you mean '{near[0]}'?"
    return f"mpicomp: unknown command '{name}'; there are {', '.join(_available())}"


def _parse(words: Sequence[str]) -> argparse.Namespace:
    """Read the words after ``mpicomp``; raise SystemExit where there is nothing to run."""
    chosen = next((word for word in words if not word.startswith("-")), None)
    if chosen is not None and chosen not in _available():
        print(_unknown(chosen), file=sys.stderr)
        raise SystemExit(2)
    return _parser(chosen).parse_args(words)


def _parse_on_one(parse: Callable[[], argparse.Namespace], rank: int) -> argparse.Namespace | int:
    """Return the arguments, or the exit status where there is nothing to run.

    All ranks get the same command line and come to the same verdict, so one of them prints it.
    """
    silence = io.StringIO()
    with contextlib.ExitStack() as stack:
        if rank != 0:
            stack.enter_context(contextlib.redirect_stdout(silence))
            stack.enter_context(contextlib.redirect_stderr(silence))
        try:
            return parse()
        except SystemExit as leaving:
            return leaving.code if isinstance(leaving.code, int) else 0


def _report(error: Exception) -> None:
    """Print an error that is meant for people, once if it is the same on all ranks."""
    mpi = abort.running()
    text = " ".join(str(error).split("\n")) or type(error).__name__
    if mpi is None or mpi.COMM_WORLD.Get_size() == 1:
        print(f"mpicomp: {text}", file=sys.stderr, flush=True)
        return
    size, rank = mpi.COMM_WORLD.Get_size(), mpi.COMM_WORLD.Get_rank()
    notes = abort.meet(text.encode(errors="replace"))
    if len(notes) < size or len(set(notes.values())) > 1:
        print(f"mpicomp: rank {rank} of {size}: {text}", file=sys.stderr, flush=True)
    elif rank == 0:
        print(f"mpicomp: {text}", file=sys.stderr, flush=True)


def _watch_over(launch: launcher.Launch | None) -> None:
    """End the job with this rank, which is about to leave with an error.

    A rank that leaves before it has initialized MPI keeps the others waiting in MPI_Init, where no launcher
    notices that it is gone; so it joins them first.
    """
    if abort.running() is not None or (launch is not None and launch.size > 1 and not _finalized()):
        with contextlib.suppress(ImportError, RuntimeError):  # no mpi4py, or no MPI library: nobody waits
            abort.install()


def _finalized() -> bool:
    mpi = sys.modules.get("mpi4py.MPI")
    return mpi is not None and bool(mpi.Is_finalized())


def _load_plugins(names: Sequence[str]) -> None:
    """Load named plugins before any name is looked up; processes that a command starts load them as well."""
    from mpicomp import plugins

    for name in names:
        plugins.add(name)
    plugins.load_all()


def _run(
    run: Callable[[argparse.Namespace], int], arguments: argparse.Namespace, launch: launcher.Launch | None
) -> int:
    from mpicomp.errors import MpicompError

    try:
        if getattr(arguments, "plugin", None):
            _load_plugins(arguments.plugin)
        status = run(arguments)
    except MpicompError as error:
        _watch_over(launch)
        _report(error)
        return 2
    except BrokenPipeError:
        raise
    except Exception:
        _watch_over(launch)
        raise
    if status != 0:
        _watch_over(launch)
    return status


def run_program(parse: Callable[[], argparse.Namespace], run: Callable[[argparse.Namespace], int]) -> int:
    """Run a program as commands are run: an error is printed once, and ends all ranks of a job.

    Parameters
    ----------
    parse : callable
        Reads the command line. What sets ``alone`` among the arguments is run on rank 0 alone, without MPI.
    run : callable
        Does the work and returns the exit status.

    Returns
    -------
    int
        The exit status: 0, what ``run`` returns, or 2 for a wrong command line and for errors that the message
        explains. Other exceptions are passed on; on a job of several ranks they end all of them.
    """
    launch = launcher.detect()
    try:
        arguments = _parse_on_one(parse, launch.rank if launch else 0)
        if launch is not None and getattr(arguments, "alone", False):
            if launch.rank != 0:
                return 0
            launch = None  # the others have left, and an error must not wait for them
        status = arguments if isinstance(arguments, int) else _run(run, arguments, launch)
        if sys.stdout is not None:  # None where the caller has closed it
            sys.stdout.flush()
    except BrokenPipeError:
        # The reader of our output has left, as `head` does. Python would flush once more at exit and complain.
        with contextlib.suppress(OSError, ValueError):
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return BROKEN_PIPE
    except KeyboardInterrupt:
        _watch_over(launch)
        return INTERRUPTED
    return status


def main(argv: Sequence[str] | None = None) -> int:
    """Run one command and return its exit status; see `run_program`.

    Parameters
    ----------
    argv
        The words after ``mpicomp``; those of this process when not given.
    """
    words = sys.argv[1:] if argv is None else argv
    return run_program(lambda: _parse(words), lambda arguments: int(arguments._command.run(arguments) or 0))
