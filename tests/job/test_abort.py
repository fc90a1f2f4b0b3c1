"""Each way for one rank of several to fail, as a real job. The others wait in a collective meanwhile."""

import subprocess
import sys

import pytest
from marks import slow

PROGRAM = """
import os, signal, sys, threading, time
from mpi4py import MPI
from mpicomp.job import abort

abort.install()
abort.install()
comm, rank = MPI.COMM_WORLD, MPI.COMM_WORLD.Get_rank()


def fail():
    raise ValueError("what went wrong")


def wait():
    comm.Barrier()
    print("passed the barrier", flush=True)

"""


@pytest.fixture
def job(mpiexec, tmp_path):
    def start(body, ranks=3, **options):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM + body)
        return mpiexec(ranks, program, **options)

    return start


def one_fails(statement):
    return f"if rank == 1:\n    {statement}\nwait()\n"


IN_A_THREAD = "if rank == 1:\n    threading.Timer(0.3, fail).start()\nelse:\n    time.sleep(30)\nwait()\n"
WRONG = "ValueError: what went wrong"
LEFT = "rank 1 of 3: left with status {} while other ranks go on"


@pytest.mark.parametrize(
    ("body", "status", "said"),
    [
        (one_fails("fail()"), 1, ["rank 1 of 3: uncaught exception, ending the job", WRONG]),
        (IN_A_THREAD, 1, ["rank 1 of 3: uncaught exception in thread", WRONG]),
        slow(one_fails("sys.exit('gone wrong')"), 1, [LEFT.format(1), "gone wrong"]),
        slow(one_fails("exit(4)"), 4, [LEFT.format(4)]),
        (one_fails("import argparse; argparse.ArgumentParser().error('wrong')"), 2, [LEFT.format(2)]),
        (
            one_fails("import atexit; atexit.register(print, 'tidied', file=sys.stderr); sys.exit(3)"),
            3,
            [LEFT.format(3), "tidied"],
        ),
        slow(one_fails("threading.Thread(target=time.sleep, args=(60,)).start(); sys.exit(3)"), 3, []),
        (one_fails("os.kill(os.getpid(), signal.SIGKILL)"), None, []),
    ],
)
def test_rank_that_fails_ends_the_job(job, body, status, said):
    ended = job(body)
    assert ended.returncode == status or (status is None and ended.returncode != 0)
    assert all(text in ended.stderr for text in said), ended.stderr
    assert ended.stderr.count("Traceback") == (WRONG in said)
    assert "passed" not in ended.stdout


def test_exit_looked_up_before_mpi_ends_the_job(mpiexec, tmp_path):
    program = tmp_path / "program.py"
    body = PROGRAM.replace("from mpi4py import MPI\n", "") + one_fails("return 3")
    head, _, rest = body.partition("\nabort.install()")
    inside = ("from mpi4py import MPI\nabort.install()" + rest).replace("\n", "\n    ")
    program.write_text(f"{head}\ndef main():\n    {inside}\n\nsys.exit(main())\n")
    ended = mpiexec(3, program)
    assert ended.returncode == 3, ended.stderr
    assert "passed" not in ended.stdout


CAUGHT = """
import copy, pickle
if rank == 1:
    try:
        fail()
    except ValueError:
        pass
    try:
        sys.exit(3)
    except SystemExit as error:
        assert error.code == 3 and repr(error) == "SystemExit(3)"
        assert type(pickle.loads(pickle.dumps(error))) is SystemExit
        kept = error
    try:
        sys.exit((4,))
    except SystemExit as error:
        assert error.code == 4
    thread = threading.Thread(target=sys.exit, args=(3,))
    thread.start()
    thread.join()
wait()
"""
FORKED = """
if rank == 1:
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        sys.excepthook(ValueError, ValueError("in the child"), None)
        os._exit(0)
    os.waitpid(child, 0)
wait()
"""
OPTED_OUT = "assert not abort.install() and sys.excepthook is sys.__excepthook__\nwait()\n"


@pytest.mark.parametrize(
    ("body", "status", "passed", "env"),
    [
        ("print('passed', flush=True)\nsys.exit(0)\n", 0, 3, {}),
        ("print('passed', flush=True)\nsys.exit(3)\n", 3, 3, {}),
        (CAUGHT, 0, 3, {}),
        (FORKED, 0, 3, {}),
        (OPTED_OUT, 0, 3, {"MPICOMP_ABORT": "0"}),
    ],
    ids=["all leave", "all leave with a status", "caught", "a forked child", "opted out"],
)
def test_job_whose_ranks_end_well_is_left_alone(job, body, status, passed, env):
    ended = job(body, env=env)
    assert ended.returncode == status, ended.stderr
    assert ended.stdout.count("passed") == passed
    assert "mpicomp" not in ended.stderr
    assert "Traceback" not in ended.stderr


def test_earlier_hook_is_called(mpiexec, tmp_path):
    earlier = "import sys\nsys.excepthook = lambda *what: print('the earlier hook:', what[1], flush=True)\n"
    program = tmp_path / "program.py"
    program.write_text(earlier + PROGRAM + one_fails("fail()"))
    ended = mpiexec(3, program)
    assert ended.returncode == 1
    assert ended.stdout.count("the earlier hook: what went wrong") == 1


def test_single_rank_is_left_alone(job):
    body = "assert not abort.install() and sys.excepthook is sys.__excepthook__ and sys.exit.__module__ == 'sys'"
    assert job(body, ranks=1).returncode == 0


def test_import_does_not_initialize_mpi():
    code = (
        "import sys; from mpicomp.job.abort import communicator_alive; "
        "assert communicator_alive() is None; assert 'mpi4py.MPI' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_error_of_all_ranks_is_printed_once(mpiexec):
    same = mpiexec(3, "-c", "import mpicomp\nmpicomp.Reducer('topq')\n", timeout=60)
    assert same.returncode != 0
    assert same.stderr.count("Traceback") == 1
    assert same.stderr.count("unknown name 'topq'") == 1
    for rank in (1, 2):
        assert f"rank {rank} of 3: the same UnknownNameError as on rank 0, ending the job" in same.stderr


def test_errors_that_differ_are_all_printed(mpiexec):
    body = "import mpicomp\nfrom mpi4py import MPI\nmpicomp.Reducer(comm=MPI.COMM_WORLD.rank % 2)\n"
    differ = mpiexec(3, "-c", body, timeout=60)
    assert differ.returncode != 0
    assert differ.stderr.count("Traceback") == 2
    assert "rank 2 of 3: the same ConfigurationError as on rank 0" in differ.stderr
    assert "got 1 (int)" in differ.stderr
