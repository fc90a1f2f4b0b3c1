"""The test harness: what it does when a parallel test fails, hangs or is left out."""

import shutil
import subprocess
import sys
import time
from pathlib import Path

import pytest
import run
from marks import slow

HERE = Path(__file__).parent


@pytest.mark.mpi
def test_every_rank_takes_part(comm):
    from mpi4py import MPI

    assert comm.allreduce(1) == MPI.COMM_WORLD.size
    assert MPI.Comm.Compare(comm, MPI.COMM_WORLD) == MPI.CONGRUENT


@pytest.mark.mpi(min_size=2)
def test_minimum_of_ranks_is_respected(comm):
    assert comm.size >= 2


@pytest.fixture
def suite(tmp_path, monkeypatch):
    """Make a folder of tests of its own, with this one's conftest, and have the harness run in it."""
    for name in ("conftest.py", "run.py", "sharing.py"):
        shutil.copy(HERE / name, tmp_path)
    monkeypatch.setattr(run, "ROOT", tmp_path)

    def write(body):
        (tmp_path / "test_it.py").write_text("import pytest, time\n" + body)
        return tmp_path

    return write


PASSING = "@pytest.mark.mpi\ndef test_fine(comm):\n    comm.Barrier()\n"
FAILING = "@pytest.mark.mpi\ndef test_bad(comm):\n    assert comm.rank != 1, 'rank 1 is unhappy'\n    {}\n"


def pytest_of(mpiexec, folder, ranks, *arguments, **options):
    arguments = ("-m", "pytest", "--color=no", "-p", "no:cacheprovider", "--only-mpi", *arguments, folder)
    return mpiexec(ranks, *arguments, **options)


@pytest.mark.parametrize("others", ["comm.Barrier()", slow("pass")])
def test_failure_on_one_rank_ends_the_run(mpiexec, suite, others):
    folder = suite(FAILING.format(others) + PASSING)
    started = time.monotonic()
    ended = pytest_of(mpiexec, folder, 3)
    assert time.monotonic() - started < 15
    assert ended.returncode != 0
    assert "rank 1 of 3: call of " in ended.stderr
    assert "AssertionError: rank 1 is unhappy" in ended.stderr
    assert "test_bad" in ended.stderr


@pytest.mark.slow
def test_collection_error_on_one_rank_ends_the_run(mpiexec, suite):
    folder = suite("from mpi4py import MPI\nassert MPI.COMM_WORLD.rank != 1, 'not here'\n" + PASSING)
    ended = pytest_of(mpiexec, folder, 2)
    assert ended.returncode != 0
    assert "not here" in ended.stderr


def test_one_rank_reports(mpiexec, suite):
    ended = pytest_of(mpiexec, suite(PASSING), 3)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("1 passed") == 1
    assert "rank 0 of 3" in ended.stdout
    assert ended.stderr == ""


@pytest.mark.slow
def test_expected_failure_ends_nothing(mpiexec, suite):
    ended = pytest_of(mpiexec, suite("@pytest.mark.xfail\n" + FAILING.format("assert False") + PASSING), 2)
    assert ended.returncode == 0, ended.stdout + ended.stderr
    assert "1 passed, 1 xfailed" in ended.stdout


OUTCOMES = """
def test_fine():
    pass
@pytest.mark.xfail
def test_known():
    assert False
@pytest.mark.xfail(strict=True)
def test_known_and_strict():
    assert False
@pytest.mark.xfail(reason="but it does")
def test_better():
    pass
@pytest.mark.skip(reason="not today")
def test_never():
    pass
def test_not_here():
    pytest.skip("not here either")
@pytest.mark.slow
def test_slow():
    pass
"""


def outcome(folder, *arguments):
    """Run the harness in a process of its own; give its status and the lines that it ends with."""
    command = [sys.executable, str(folder / "run.py"), *arguments, str(folder)]
    environ = {name: value for name, value in run.os.environ.items() if not name.startswith(("PMI", "OMPI_", "PRTE_"))}
    done = subprocess.run(command, capture_output=True, text=True, timeout=200, check=False, env=environ)
    return done.returncode, done.stdout.splitlines()


def test_skips_and_expected_failures_are_said_and_are_not_passed(suite):
    status, lines = outcome(suite(OUTCOMES), "--only", "serial")
    assert (status, lines[-2:]) == (0, ["2 skipped, 2 failed as expected", "2 passed, 0 failed"])
    assert any("not today" in line for line in lines)
    status, lines = outcome(suite(OUTCOMES + "def test_bad():\n    assert False\n"), "--only", "serial", "--slow")
    assert (status, lines[-2:]) == (1, ["2 skipped, 2 failed as expected", "3 passed, 1 failed"])


PARALLEL = (
    PASSING
    + """
@pytest.mark.mpi(min_size=2)
def test_two(comm):
    pass
@pytest.mark.mpi(min_size=9)
def test_nine(comm):
    pass
@pytest.mark.mpi
@pytest.mark.xfail
def test_known(comm):
    assert False
@pytest.mark.mpi
@pytest.mark.skipif(True, reason="never")
def test_never(comm):
    pass
"""
)


@pytest.mark.slow
def test_parallel_tests_without_a_fitting_size_are_skipped(suite):
    status, lines = outcome(suite(PARALLEL), "--only", "parallel", "--ranks", "1,2")
    assert (status, lines[-2:]) == (0, ["2 skipped, 2 failed as expected", "3 passed, 0 failed"])


@pytest.mark.slow
def test_parallel_tests_are_counted(suite, tmp_path, monkeypatch):
    for name in [name for name in run.os.environ if name.startswith(("PMI", "OMPI_COMM_", "PMIX_"))]:
        monkeypatch.delenv(name)
    body = (
        PASSING + "@pytest.mark.mpi(min_size=2)\ndef test_two(comm):\n    pass\n"
        "@pytest.mark.mpi(max_size=1)\ndef test_alone(comm):\n    assert comm.size == 1\n"
        "@pytest.mark.mpi\n@pytest.mark.skipif(True, reason='never')\ndef test_never(comm):\n    pass\n"
        "def test_serial():\n    pass\n"
    )
    folder = suite(body)
    counts = sorted(run.census([str(folder)], tmp_path).values())
    assert [(least, min(most, 9)) for least, most in counts] == [(1, 1), (1, 9), (2, 9)]
    assert run.parallel([str(folder)], [1, 2], tmp_path) == run.Count(4, 0)
    assert run.parallel(["--slow", str(folder)], [1, 2], tmp_path).failed > 0


@pytest.mark.parametrize(
    ("body", "count"),
    [
        ("def test_serial():\n    pass\n", run.Count(0, 1)),  # none at all
        slow(PASSING + "    pytest.skip('in silence')\n", run.Count(0, 1)),
        slow(PASSING + "    assert False\n", run.Count(0, 1)),
    ],
)
def test_parallel_tests_that_did_not_run_are_a_failure(suite, tmp_path, body, count):
    assert run.parallel([str(suite(body))], [2], tmp_path) == count


@pytest.mark.slow
def test_run_that_hangs_is_killed_with_its_stacks(suite, capfd):
    folder = suite("@pytest.mark.mpi\ndef test_hang(comm):\n    time.sleep(600 * (comm.rank == 1))\n")
    mpiexec, env = run.launcher()
    command = [*mpiexec, "-n", "2", sys.executable, "-m", "pytest", "--only-mpi", str(folder)]
    started = time.monotonic()
    assert run.run(command, 15, env) == 124  # a machine with other work needs seconds before the test begins
    assert time.monotonic() - started < 60
    output = capfd.readouterr()
    assert "killing it" in output.out
    assert "in test_hang" in output.out + output.err
