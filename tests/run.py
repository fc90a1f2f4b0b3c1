"""Run everything that has to pass: lint, types, the serial suite, and the parallel tests at 1 to 3 ranks.

    python tests/run.py [--quick | --slow] [-k EXPRESSION] [--ranks 1,2,3] [--only lint,serial,parallel] [PATH ...]

``--quick`` is for the minute before a commit: lint, types, and the tests marked quick, those in parallel at 2 ranks.
``--slow`` adds the tests marked slow: what is left of products of which others run representatives, and long studies.

It uses the tools of the Python that runs it and the ``mpiexec`` next to it, of MPICH or of Open MPI. The last line is
``N passed, N failed``: tests over all runs, and each check that is no test counts as one. The line before it says what
is in neither number: ``N skipped, N failed as expected``. Parallel tests count as skipped that ran at no number of
ranks.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
import xml.etree.ElementTree as ET
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from typing import IO

ROOT = Path(__file__).resolve().parent.parent
RANKS = (1, 2, 3)  # 3 catches what only works for powers of two; --ranks 4 has what needs a mesh of 2 by 2
LIMIT_S = {"check": 600, "serial": 3300, "parallel": 900}
SIDE_BY_SIDE = ["-n", "auto", "--dist", "loadscope", "--no-loadscope-reorder"]  # the serial suite on all cores
# All cores have a process of their own: threads of the libraries would only take turns, and spin while they wait.
ALONE = {f"{name}_NUM_THREADS": "1" for name in ("OMP", "OPENBLAS", "MKL", "NUMBA")}
STACKS_S = 3  # how long a run that is to be killed has for dumping its stacks


@dataclass
class Count:
    """How many tests or checks passed and failed; and how many did not run, or failed as they are marked."""

    passed: int = 0
    failed: int = 0
    skipped: int = field(default=0, compare=False)
    xfailed: int = field(default=0, compare=False)

    def __add__(self, other: Count) -> Count:
        return Count(
            self.passed + other.passed,
            self.failed + other.failed,
            self.skipped + other.skipped,
            self.xfailed + other.xfailed,
        )


def say(text: str) -> None:
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
    say(" ".join(command))
    started = time.monotonic()
    # Compiled files are kept, whatever the shell says: every rank and every process of a test would compile them all.
    inherited = {name: value for name, value in os.environ.items() if name != "PYTHONDONTWRITEBYTECODE"}
    process = subprocess.Popen(
        command,
        cwd=ROOT,
        env={**inherited, **(env or {})},
        stdin=subprocess.DEVNULL,
        stdout=output,
        stderr=subprocess.STDOUT,  # what a rank says before it gives up belongs among the results
        start_new_session=True,
    )
    try:
        status = process.wait(limit_s)
    except subprocess.TimeoutExpired:
        say(f"no end after {limit_s:.0f} s: killing it, stacks follow")
        kill(process.pid)
        process.wait()
        status = 124
    except BaseException:
        kill(process.pid)
        raise
    say(f"status {status} after {time.monotonic() - started:.1f} s")
    return status


def lint() -> Count:
    """Run the linters, as the repository configures them."""
    total = Count()
    for step in (["ruff", "check"], ["ruff", "format", "--check"]):
        ok = run([sys.executable, "-m", *step], LIMIT_S["check"]) == 0
        total += Count(int(ok), int(not ok))
    return total


def types(output: IO[str]) -> Count:
    """Run the type checker, as the repository configures it."""
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
    command = [sys.executable, "-m", "mypy", *settings, str(package), str(studies)]
    ok = run(command, LIMIT_S["check"], output=output) == 0
    return Count(int(ok), int(not ok))


def files_with(*texts: str) -> list[str]:
    """Return the files of tests that hold one of these texts: collecting all of them takes 10 s for each process."""
    files = sorted((ROOT / "tests").rglob("test_*.py"))
    return [str(path.relative_to(ROOT)) for path in files if any(text in path.read_text() for text in texts)]


def results(junit: Path) -> Count:
    """Return what a run's report counts."""
    total = Count()
    for case in ET.parse(junit).iter("testcase"):
        kinds = {child.tag: child.get("type", "") for child in case}
        if "failure" in kinds or "error" in kinds:
            total += Count(failed=1)
        elif "skipped" in kinds:
            total += Count(xfailed=1) if kinds["skipped"] == "pytest.xfail" else Count(skipped=1)
        else:
            total += Count(passed=1)
    return total


def pytest(arguments: list[str], junit: Path, limit_s: float, prefix: list[str], env: dict[str, str]) -> Count:
    """Run pytest and return its counts; a run that fails without a failed test counts as one failure."""
    command = [*prefix, sys.executable, "-m", "pytest", f"--junit-xml={junit}", *arguments]
    status = run(command, limit_s, env)
    if not junit.exists():
        return Count(failed=1)
    total = results(junit)
    if status not in (0, 5) and total.failed == 0:  # 5: no test was selected, which is no failure of a test
        total += Count(failed=1)
    return total


def census(arguments: list[str], folder: Path) -> dict[str, tuple[int, int]]:
    """Return the parallel tests that a serial collection finds, each with its least and most number of ranks."""
    file = folder / "census.json"
    command = [sys.executable, "-m", "pytest", "--collect-only", "-qq", "--with-mpi", f"--mpi-census={file}"]
    collected = subprocess.run(
        [*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True, timeout=LIMIT_S["check"], check=False
    )
    if not file.exists():
        print(collected.stdout)
        return {}
    return {test: (least, most) for test, (least, most) in json.loads(file.read_text()).items()}


def launcher() -> tuple[list[str], dict[str, str]]:
    """Return how to start ranks with the MPI of this Python, and the environment for a small machine."""
    mpiexec = Path(sys.executable).with_name("mpiexec")
    command = [str(mpiexec) if mpiexec.exists() else "mpiexec"]
    env = ALONE | {"MPIR_CVAR_ENABLE_HEAVY_YIELD": "1"}  # MPICH's ranks that wait sleep, with more ranks than cores
    version = subprocess.run([*command, "--version"], capture_output=True, text=True, check=False).stdout
    if "open mpi" in version.lower() or "openrte" in version.lower() or "prte" in version.lower():
        # Bound ranks would all sit on the first cores, where another job's sit too.
        command += ["--oversubscribe", "--bind-to", "none"]
        # A rank that spins while it waits keeps the core from the one it waits for.
        env |= {
            "OMPI_ALLOW_RUN_AS_ROOT": "1",
            "OMPI_ALLOW_RUN_AS_ROOT_CONFIRM": "1",
            "OMPI_MCA_mpi_yield_when_idle": "1",
        }
    return command, env


def parallel(
    arguments: list[str], ranks: list[int], folder: Path, marked: str = "mpi", files: Sequence[str] = ()
) -> Count:
    """Run the parallel tests at each number of ranks, and check that none of them was left out.

    ``files`` are read only at numbers of ranks at which some of their tests run: every rank imports all it is given.
    """
    total, skipped = Count(), []
    expected: dict[str, tuple[int, int]] = {}
    try:
        mpiexec, env = launcher()
    except FileNotFoundError:
        say("there is no mpiexec: pip install mpich")
        return Count(failed=1)
    with ThreadPoolExecutor(1) as at_once:  # the first run mostly has one rank, which leaves a core
        counting = at_once.submit(census, [*arguments, *files, "-m", marked], folder)
        for size in ranks:
            junit = folder / f"parallel-{size}.xml"
            used = {test.partition("::")[0] for test, (least, most) in expected.items() if least <= size <= most}
            some = [file for file in files if file in used] or files
            options = ["--only-mpi", "-m", marked, "-p", "no:cacheprovider", "-r", "fE", *arguments, *some]
            counted = pytest(options, junit, LIMIT_S["parallel"], [*mpiexec, "-n", str(size)], env)
            expected = counting.result()
            if not expected:
                say("no parallel test was found")
                return Count(failed=1)
            wanted = sum(least <= size <= most for least, most in expected.values())
            if counted.failed == 0 and counted.passed + counted.xfailed != wanted:
                say(f"{counted.passed} parallel tests passed at {size} ranks, but {wanted} were to run")
                counted += Count(failed=1)
            skipped.append(counted.skipped)
            total += counted
            say(f"parallel, {size} ranks: {counted.passed} of {wanted} passed")
    total.skipped = min(skipped, default=0)  # at fewer ranks there are also those that ran at more
    if not any(least <= size <= most for size in ranks for least, most in expected.values()):
        say("no parallel test runs at these numbers of ranks")
        total += Count(failed=1)
    return total


def main() -> int:
    """Run what was asked for and return the exit status."""
    parser = argparse.ArgumentParser(description="Run lint, types, the serial suite and the parallel tests.")
    parser.add_argument("--quick", action="store_true", help="run the tests marked quick only, in parallel at 2 ranks")
    parser.add_argument("--slow", action="store_true", help="run the tests marked slow, too")
    parser.add_argument("-k", metavar="EXPRESSION", help="only the tests that match, as for pytest")
    parser.add_argument("--ranks", default=",".join(map(str, RANKS)), help="numbers of ranks, with commas")
    parser.add_argument("--only", default="lint,serial,parallel", help="lint, serial, parallel, with commas")
    parser.add_argument("paths", nargs="*", help="files and folders of tests; all when none is given")
    arguments = parser.parse_args()
    parts = set(arguments.only.split(","))
    if not parts <= {"lint", "serial", "parallel"}:
        parser.error(f"--only takes lint, serial and parallel, got {arguments.only}")
    passed_on = ["--slow"] * arguments.slow + (["-k", arguments.k] if arguments.k else [])
    marked = " and quick" if arguments.quick else ""
    if arguments.quick:
        arguments.ranks = "2"
    paths = arguments.paths or (files_with("mark.quick", "everywhere(") if arguments.quick else [])

    signal.signal(signal.SIGTERM, lambda *_: sys.exit(143))  # a limit from outside: the ranks end with this process
    total = Count()
    with tempfile.TemporaryDirectory(prefix="mpicomp-tests-") as name:
        folder = Path(name)
        at_once = contextlib.ExitStack()
        if "lint" in parts:
            total += lint()
            # It takes one core for half a minute, and tests that start processes leave one free.
            log = at_once.enter_context((folder / "types.log").open("w+"))
            typed = at_once.enter_context(ThreadPoolExecutor(1)).submit(types, log)
        if "serial" in parts:
            options = [*SIDE_BY_SIDE, "-r", "fEs", "-m", f"not mpi{marked}", *passed_on, *paths]
            total += pytest(options, folder / "serial.xml", LIMIT_S["serial"], [], ALONE)
        if "lint" in parts:
            total += typed.result()
            log.seek(0)
            print(log.read(), flush=True)
        at_once.close()
        if "parallel" in parts:
            ranks = [int(size) for size in arguments.ranks.split(",")]
            files = [] if paths else files_with("mark.mpi")
            total += parallel([*passed_on, *paths], ranks, folder, f"mpi{marked}", files)
    print(f"{total.skipped} skipped, {total.xfailed} failed as expected")
    print(f"{total.passed} passed, {total.failed} failed", flush=True)
    return 1 if total.failed else 0


if __name__ == "__main__":
    sys.exit(main())
