"""Run everything that has to pass: lint, types, the serial tests, and the parallel tests at 3 ranks.

    python tests/run.py [--quick | --slow] [-k EXPRESSION] [--ranks 3] [--only lint,serial,parallel] [PATH ...]

It joins commands that work by themselves, such as ``pytest tests`` and ``mpiexec -n 3 python -m pytest -m mpi tests``,
and prints them. ``--quick`` is for the minute before a commit: lint, types, and the tests marked quick. ``--slow`` adds
the tests marked slow: what is left of products of which others run representatives, and long studies.

It uses the tools of the Python that runs it and the ``mpiexec`` next to it, of MPICH or of Open MPI. The last line is
``N passed, N failed``: tests over all runs, and each check that is no test counts as one. The line before it counts
what is in neither number: ``N skipped, N failed as expected``.
"""

from __future__ import annotations

import argparse
import contextlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
RANKS = "3"  # which catches what only works for powers of two; CI also runs 1, 2 and 4
LIMIT_S = {"check": 600, "serial": 3300, "parallel": 900}
SIDE_BY_SIDE = ["-n", "auto", "--dist", "loadscope", "--no-loadscope-reorder"]  # the serial suite on all cores
# All cores have a process of their own: threads of the libraries would only take turns, and spin while they wait.
ALONE = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
# Ranks that wait inside MPI leave their core to others: by sleeping (MPICH), or by yielding it (Open MPI).
WAITING = {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1", "OMPI_MCA_mpi_yield_when_idle": "1"}
STACKS_S = 3  # how long a run that is to be killed has for dumping its stacks


def show(text: str) -> None:
    print(f"== {text}", flush=True)


def descendants(pid: int) -> list[int]:
    """Return the processes that stem from this one. Launchers give ranks process groups of their own."""
    children: dict[int, list[int]] = {}
    for entry in Path("/proc").iterdir():
        if entry.name.isdigit():
            with contextlib.suppress(OSError):  # it has ended meanwhile
                parent = int((entry / "stat").read_text().rpartition(")")[2].split()[1])
                children.setdefault(parent, []).append(int(entry.name))
    found, new = [], [pid]
    while new:
        new = [child for parent in new for child in children.get(parent, [])]
        found += new
    return found


def kill(pid: int, stacks_s: float = STACKS_S) -> None:
    """Kill a process and all that stem from it; those that can dump their stacks do it first."""
    victims = [pid, *descendants(pid)]
    for victim in victims:
        with contextlib.suppress(OSError):
            # Only a process that has asked for the signal survives it: conftest.py does in parallel runs.
            caught = int(Path(f"/proc/{victim}/status").read_text().partition("SigCgt:")[2].split()[0], 16)
            if caught >> (signal.SIGUSR1 - 1) & 1 and "python" in os.readlink(f"/proc/{victim}/exe"):
                os.kill(victim, signal.SIGUSR1)
    time.sleep(stacks_s)
    for victim in {*victims, *descendants(pid)}:
        with contextlib.suppress(OSError):
            os.kill(victim, signal.SIGKILL)


def run(command: list[str], limit_s: float, env: dict[str, str] | None = None, output: IO[str] | None = None) -> int:
    """Run a command with a time limit, its output going to a file where one is given, and return its exit status."""
    show(" ".join(command))
    started = time.monotonic()
    # Compiled files are kept, whatever the shell says: every rank and every process of a test would compile them all.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**inherited, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,  # what a rank prints before it gives up belongs among the results
        start_new_session=True,
    )
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        show(f"no end after {limit_s:.0f} s: killing it, stacks follow")
        kill(process.pid)
        process.wait()
        status = 124
    except BaseException:
        kill(process.pid)
        raise
    show(f"status {status} after {time.monotonic() - started:.1f} s")
    return status


def launcher() -> tuple[list[str], dict[str, str]]:
    """Return how to start ranks with the MPI of this Python, and the environment for a small machine."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec) if mpiexec.exists() else "mpiexec"]
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout.lower()
    if any(name in version for name in ("open mpi", "openrte", "prte")):
        # Bound ranks would all sit on the first cores, where another job's sit too.
        command += ["--oversubscribe", "--bind-to", "none"]
    as_root = {"OMPI_ALLOW_RUN_AS_ROOT": "1", "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1"}
    return command, ALONE | WAITING | as_root


def check(command: list[str]) -> Counter[str]:
    """Run a check and count it as a test."""
    return Counter(["failed" if run(command, LIMIT_S["check"]) else "passed"])


def types_command() -> list[str]:
    """Return the type checker's command, as the repository configures it."""
    # mypy goes by folders: it needs to see the packages where they are installed, not where they stand.
    cache = ROOT / ".mypy_cache"
    package = cache / "tree" / "mpicomp"
    shutil.rmtree(package, ignore_errors=True)
    package.mkdir(parents=True)
    for entry in [*(ROOT / "mpicomp").iterdir(), ROOT / "kernels", ROOT / "bench"]:
        (package / entry.name).symlink_to(entry)
    studies = cache / "tree" / "studies"  # scripts, which import each other by their bare names
    if not studies.is_symlink():
        studies.symlink_to(ROOT / "studies")
    settings = ["--config-file", str(ROOT / "setup.cfg"), "--cache-dir", str(cache)]
    return [sys.executable, "-m", "mypy", *settings, str(package), str(studies)]


def pytest(arguments: list[str], limit_s: float, mpiexec: Sequence[str] = ()) -> Counter[str]:
    """Run pytest and count its results; a run that fails without a failed test counts as one failure."""
    with tempfile.TemporaryDirectory(prefix="mpicomp-tests-") as folder:
        junit = Path(folder) / "junit.xml"
        command = [*mpiexec, sys.executable, "-m", "pytest", f"--junit-xml={junit}", *arguments]
        status = run(command, limit_s, launcher()[1])
        total = results(junit) if junit.exists() else Counter()
    if status not in (0, 5) and not total["failed"]:  # 5: no test was selected, which is no failure of a test
        total["failed"] = 1
    return total


def results(junit: Path) -> Counter[str]:
    """Return what a run's report counts: passed, failed, skipped, xfailed."""
    total: Counter[str] = Counter()
    for case in ET.parse(junit).iter("testcase"):
        kinds = {child.tag: child.get("type", "") for child in case}
        if "failure" in kinds or "error" in kinds:
            total["failed"] += 1
        elif "skipped" in kinds:
            total["xfailed" if kinds["skipped"] == "pytest.xfail" else "skipped"] += 1
        else:
            total["passed"] += 1
    return total


def parallel(arguments: list[str], ranks: str) -> Counter[str]:
    """Run pytest in jobs of these numbers of ranks and count its results."""
    total: Counter[str] = Counter()
    for number in ranks.split(","):
        mpiexec = [*launcher()[0], "-n", number]
        total += pytest(["-p", "no:cacheprovider", *arguments], LIMIT_S["parallel"], mpiexec)
    return total


def main() -> int:
    """Run what was asked for and return the exit status."""
    parser = argparse.ArgumentParser(description="Run lint, types, the serial tests and the parallel tests.")
    parser.add_argument("--quick", action="store_true", help="run the tests marked quick only")
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow, too")
    parser.add_argument("-k", metavar="EXPRESSION", help="only the tests that match, as for pytest")
    parser.add_argument("--ranks", default=RANKS, help="numbers of ranks, with commas")
    parser.add_argument("--only", default="lint,serial,parallel", help="lint, serial, parallel, with commas")
    parser.add_argument("paths", nargs="*", help="files and folders of tests; all when none is given")
    arguments = parser.parse_args()
    parts = set(arguments.only.split(","))
    if not parts <= {"lint", "serial", "parallel"}:
        parser.error(f"--only takes lint, serial and parallel, got {arguments.only}")
    options = ["-r", "fE", *["--slow"] * arguments.slow, *(["-k", arguments.k] if arguments.k else [])]
    quick = " and quick" if arguments.quick else ""

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a limit from outside: the ranks end with this process
    total: Counter[str] = Counter()
    if "lint" in parts:
        for tool in (["ruff", "check"], ["ruff", "format", "--check"]):
            total += check([sys.executable, "-m", *tool])
        total += check(types_command())
    if "serial" in parts:
        serial = [*SIDE_BY_SIDE, *options, "-r", "s", "-m", f"not mpi{quick}", *arguments.paths]
        total += pytest(serial, LIMIT_S["serial"])
    if "parallel" in parts:
        total += parallel([*options, "-m", f"mpi{quick}", *(arguments.paths or ["tests"])], arguments.ranks)
    print(f"{total['skipped']} skipped, {total['xfailed']} failed as expected")
    print(f"{total['passed']} passed, {total['failed']} failed", flush=True)
    return 1 if total["failed"] else 0


if __name__ == "__main__":
    sys.exit(main())
