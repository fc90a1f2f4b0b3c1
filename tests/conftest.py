"""Options and fixtures of the test suite, and what a parallel run needs so that a failure ends it.

Parallel tests are marked ``@pytest.mark.mpi`` and take the `comm` fixture. They run where a launcher of MPI has started
pytest, ``mpiexec -n 3 python -m pytest -m mpi tests``, and only they do; without one all others run. ``min_size=``:
needs as many ranks; ``max_size=``: more than three show nothing new, so that these are for ``--slow``. A parallel test
must run the same on all ranks; where it cannot run at all, say so with ``skipif``.
"""

import contextlib
import faulthandler
import gc
import hashlib
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from functools import cache, partial
from pathlib import Path

import hypothesis
import pytest
import run
from xdist.scheduler import LoadScopeScheduling

from mpicomp.job import launcher

for name, value in (run.ALONE | run.WAITING).items():  # for plain commands; MPI has not begun yet
    os.environ.setdefault(name, value)

# How long a failing rank waits before it ends the job: its peers mostly fail at the same place, and their
# reports are worth having too.
LAST_WORDS_S = 0.3

ROOT = Path(__file__).resolve().parents[1]

_launch = launcher.detect()
PARALLEL = _launch is not None and _launch.name in ("hydra", "openmpi", "slurm", "pmi", "pmix")
ENOUGH = 3  # ranks: more are for tests that need them, or show something new
QUICK = ("mark.quick", "everywhere(")  # texts of files with quick tests

# A first call compiles, which takes as long as it takes.
# The kernels of a device, which a fixture returns, have no state that examples change.
for profile, examples in (("quick", 40), ("slow", 400)):
    hypothesis.settings.register_profile(
        profile,
        deadline=None,
        max_examples=examples,
        suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture],
    )


def pytest_addoption(parser):
    group = parser.getgroup("mpicomp")
    group.addoption("--slow", action="store_true", help="run the tests marked slow, too")


def pytest_ignore_collect(collection_path, config):
    """Leave out what the tests share: looking for doctests there would import it a second time.

    Files without a test that may run are not imported: all of them take 10 s in each process.
    """
    if collection_path.suffix != ".py":
        return None
    quick = "quick" in config.option.markexpr and "not quick" not in config.option.markexpr
    if not collection_path.name.startswith("test_"):
        return True if Path(__file__).parent in collection_path.parents or PARALLEL or quick else None
    text = collection_path.read_text()
    wanted = (not PARALLEL or "mark.mpi" in text) and (not quick or any(word in text for word in QUICK))
    return None if wanted else True


def _world(config):
    """Return the world communicator in a parallel run, else None; a serial run must not initialise MPI."""
    if not PARALLEL or config.getoption("--collect-only"):
        return None
    from mpi4py import MPI

    return MPI.COMM_WORLD


@pytest.hookimpl(tryfirst=True)  # before the plugin that opens the report file
def pytest_configure(config):
    hypothesis.settings.load_profile("slow" if config.getoption("--slow") else "quick")
    world = _world(config)
    if world is None:
        return
    # tests/run.py asks for the stacks before it kills a run that takes too long.
    faulthandler.register(signal.SIGUSR1, file=os.dup(2), all_threads=True)
    # Ranks that share pytest's folder clean it up at the same time, and one fails where another was faster.
    config.option.basetemp = tempfile.mkdtemp(prefix=f"mpicomp-rank-{world.rank}-")
    config.add_cleanup(partial(shutil.rmtree, config.option.basetemp, ignore_errors=True))
    if world.rank != 0:
        config.option.xmlpath = None  # the ranks would all write the same file
        config.pluginmanager.set_blocked("lfplugin")  # the same, of the failed tests
        config.pluginmanager.set_blocked("nfplugin")


@pytest.hookimpl(tryfirst=True)  # before the header is printed
def pytest_sessionstart(session):
    world = _world(session.config)
    if world is not None and world.rank != 0:
        # One rank reports on the run. What fails elsewhere is printed by _give_up.
        reporter = session.config.pluginmanager.getplugin("terminalreporter")
        reporter._tw._file = open(os.devnull, "w")  # noqa: SIM115 (it lives as long as the run)


def pytest_report_header(config):
    world = _world(config)
    if world is None:
        return "parallel tests are deselected: mpiexec -n 3 python -m pytest -m mpi tests"
    from mpi4py import MPI

    vendor, version = MPI.get_vendor()
    return f"MPI: {vendor} {'.'.join(map(str, version))}, rank {world.rank} of {world.size}"


@pytest.hookimpl(tryfirst=True)
def pytest_pycollect_makeitem(collector, name, obj):
    """Make no cases of serial tests in ranks, which would drop them: there are thousands, in every rank."""
    if not PARALLEL or not name.startswith("test") or isinstance(obj, type):
        return None
    marks = [*getattr(obj, "pytestmark", []), *collector.iter_markers()]
    return None if any(mark.name == "mpi" for mark in marks) else []


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(config, items):
    world = _world(config)
    ranks = 0 if world is None else world.size
    dropped = [item for item in items if not _runs(item, ranks, config.getoption("--slow"))]
    config.hook.pytest_deselected(items=dropped)
    gone = set(dropped)
    items[:] = [item for item in items if item not in gone]
    items.sort(
        key=lambda item: not _starts_processes(item.nodeid.partition("::")[0])
    )  # they take longest: the worker that has them begins


def _runs(item, ranks, slow):
    """Return whether a test runs in a job of so many ranks; 0 stands for a serial run."""
    if item.get_closest_marker("slow") and not slow:
        return False
    marks = [mark.kwargs for mark in item.iter_markers("mpi")]
    if not marks or not ranks:
        return bool(marks) == PARALLEL
    least = max(mark.get("min_size", 1) for mark in marks)
    most = min(mark.get("max_size", sys.maxsize) for mark in marks)
    return least <= ranks and (slow or ranks <= max(most, ENOUGH))


@cache
def _starts_processes(file):
    """Return whether tests of a file start processes: side by side they wait for each other."""
    path = ROOT / file
    folders = {"cli", "lab", "plugins", "slurm"}
    return bool(folders & set(Path(file).parts)) or (path.is_file() and "mpiexec" in path.read_text())


class ByFile(LoadScopeScheduling):
    """Gives pytest-xdist's workers files in their order, those that start processes as if they were one."""

    def _split_scope(self, nodeid):
        file = nodeid.partition("::")[0]
        return "processes" if _starts_processes(file) else file


def pytest_xdist_make_scheduler(config, log):
    return ByFile(config, log)


def pytest_collection_finish(session):
    # Benchmarks collect garbage before they time anything: without all that is here by now it takes no half second.
    gc.collect()
    gc.freeze()
    world = _world(session.config)
    if world is not None:
        _barrier(world)
        names = hashlib.sha256("\n".join(item.nodeid for item in session.items).encode()).hexdigest()
        if len(set(world.allgather(names))) > 1:
            pytest.exit("ranks have collected other tests", returncode=1)


def _give_up(config, report, when):
    """Print the report of this rank and end the job.

    Without that, the next barrier of this rank pairs with another one of its peers: tests then pass that
    should not, or everything hangs.
    """
    world = _world(config)
    if world is None:
        return
    capture = config.pluginmanager.getplugin("capturemanager")
    with capture.global_and_fixture_disabled() if capture else contextlib.nullcontext():
        lines = [f"rank {world.rank} of {world.size}: {when} failed", report.longreprtext]
        lines += [f"---- {title} ----\n{text}" for title, text in report.sections if text]
        print("\n" + "\n".join(lines), file=sys.stderr, flush=True)
        time.sleep(LAST_WORDS_S)
        sys.stdout.flush()
        world.Abort(1)
        # MPICH tells the launcher and returns. Until the launcher's signal comes, this rank must not go on.
        time.sleep(5)
        os._exit(1)


@pytest.hookimpl(wrapper=True, tryfirst=True)  # outermost: xfail has been taken into account
def pytest_runtest_makereport(item, call):
    report = yield
    if report.failed:
        _give_up(item.config, report, f"{report.when} of {report.nodeid}")
    return report


@pytest.hookimpl(wrapper=True, tryfirst=True)
def pytest_make_collect_report(collector):
    report = yield
    if report.failed:
        _give_up(collector.config, report, f"collection of {report.nodeid or 'the tests'}")
    return report


@pytest.fixture
def comm(request):
    """Give a duplicate of the world communicator, with a barrier before and after the test."""
    world = _world(request.config)
    if world is None:
        pytest.fail("the comm fixture is for tests marked mpi, which run under mpiexec")
    _barrier(world)
    duplicate = world.Dup()
    yield duplicate
    _barrier(duplicate)
    duplicate.Free()


def _barrier(comm):
    """Wait for all ranks without keeping a core busy: MPI's own Barrier yields it in a loop while others compile."""
    from mpicomp.mpi.transport import wait

    wait(comm.Ibarrier().Test)


# What launchers leave in the environment of what they start. A job that a test starts is no part of the job
# that the test may run in.
_LAUNCHERS = ("PMI", "PMIX_", "OMPI_COMM_", "OMPI_FILE_", "MPI_LOCAL", "HYD", "PRTE_", "SLURM_")


@pytest.fixture(scope="session")
def clean_environ():
    """Return this process's environment without a launcher's variables."""
    return {name: value for name, value in os.environ.items() if not name.startswith(_LAUNCHERS)}


@pytest.fixture(scope="session")
def mpiexec(clean_environ, tmp_path_factory):
    """Start a real job: ``mpiexec(ranks, arguments of Python ..., timeout=20, env={})``, for serial tests.

    It returns a CompletedProcess with stdout and stderr as text, and fails the test when the job takes
    longer. The job is given no chance to outlive the test.
    """
    if not Path(sys.executable).with_name("mpiexec").exists():
        pytest.skip("there is no mpiexec next to this Python")
    command, settings = run.launcher()

    def start(ranks, *arguments, timeout=20, env=None, cwd=None):
        if cwd is None and "MPICOMP_STALL" in (env or {}):
            cwd = tmp_path_factory.mktemp("stacks")  # ranks that wait leave a file where they are
        process = subprocess.Popen(
            [*command, "-n", str(ranks), sys.executable, *map(str, arguments)],
            env={**clean_environ, **settings, **(env or {})},
            cwd=cwd,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            start_new_session=True,
        )
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException as reason:
            run.kill(process.pid, stacks_s=0)
            out, err = process.communicate()
            if isinstance(reason, subprocess.TimeoutExpired):
                pytest.fail(f"no end after {timeout} s\n{out}\n{err}")
            raise
        return subprocess.CompletedProcess(arguments, process.returncode, out, err)

    return start


@pytest.fixture(scope="module")
def one_thread():
    """Have torch use one thread: several compute other bits."""
    torch = pytest.importorskip("torch")
    before = torch.get_num_threads()
    torch.set_num_threads(1)
    yield
    torch.set_num_threads(before)
