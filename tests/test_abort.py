"""Each way for one rank of several to fail, as a real job. The others wait in a collective meanwhile."""

import subprocess
import sys

import pytest
from marks import slow

PROGRAM = """
import os, signal, sys, threading, time
from mpi4py import MPI
from mpicomp.system import abort

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


def test_an_uncaught_exception_ends_the_job_with_its_traceback(job):
    ended = job(one_fails("fail()"))
    assert ended.returncode == 1
    assert "rank 1 of 3: uncaught exception, ending the job" in ended.stderr
    assert "ValueError: what went wrong" in ended.stderr
    assert ended.stderr.count("Traceback") == 1
    assert "passed" not in ended.stdout


def test_an_exception_while_the_others_are_in_an_allreduce(job):
    body = "import numpy as np\nif rank == 2:\n    fail()\ncomm.Allreduce(np.ones(9), np.ones(9))\n"
    ended = job(body)
    assert ended.returncode == 1
    assert "rank 2 of 3" in ended.stderr
    assert "ValueError: what went wrong" in ended.stderr


def test_an_exception_in_a_thread_while_its_own_rank_waits_too(job):
    body = """
if rank == 1:
    threading.Timer(0.3, fail).start()
else:
    time.sleep(30)
wait()
"""
    ended = job(body)
    assert ended.returncode == 1
    assert "rank 1 of 3: uncaught exception in thread" in ended.stderr
    assert "ValueError: what went wrong" in ended.stderr


def test_an_exception_in_a_thread_that_is_waited_for(job):
    ended = job(one_fails("thread = threading.Thread(target=fail); thread.start(); thread.join()"))
    assert ended.returncode == 1
    assert "ValueError: what went wrong" in ended.stderr
    assert "passed" not in ended.stdout


@pytest.mark.parametrize(
    ("statement", "status"),
    [
        ("sys.exit(3)", 3),
        slow("sys.exit('gone wrong')", 1),
        slow("exit(4)", 4),
        ("import argparse; argparse.ArgumentParser().error('wrong')", 2),
    ],
)
def test_leaving_with_an_error_ends_the_job(job, statement, status):
    ended = job(one_fails(statement))
    assert ended.returncode == status
    assert f"rank 1 of 3: left with status {status} while other ranks go on" in ended.stderr
    assert "passed" not in ended.stdout
    if "gone wrong" in statement:
        assert "gone wrong" in ended.stderr


def test_exit_looked_up_before_mpi_was_initialised(mpiexec, tmp_path):
    program = tmp_path / "program.py"
    body = PROGRAM.replace("from mpi4py import MPI\n", "") + one_fails("return 3")
    head, _, rest = body.partition("\nabort.install()")
    inside = ("from mpi4py import MPI\nabort.install()" + rest).replace("\n", "\n    ")
    program.write_text(f"{head}\ndef main():\n    {inside}\n\nsys.exit(main())\n")
    ended = mpiexec(3, program)
    assert ended.returncode == 3, ended.stderr
    assert "passed" not in ended.stdout


def test_leaving_with_an_error_runs_the_exit_handlers(job):
    ended = job(one_fails("import atexit; atexit.register(print, 'tidied up'); sys.exit(3)"))
    assert ended.returncode == 3
    assert "tidied up" in ended.stdout


@pytest.mark.slow
def test_leaving_with_an_error_while_a_thread_goes_on(job):
    ended = job(one_fails("threading.Thread(target=time.sleep, args=(60,)).start(); sys.exit(3)"))
    assert ended.returncode == 3


@pytest.mark.parametrize("statement", ["os.kill(os.getpid(), signal.SIGKILL)", "os._exit(5)"])
def test_a_rank_that_dies_ends_the_job(job, statement):
    ended = job(one_fails(statement))
    assert ended.returncode != 0
    assert "passed" not in ended.stdout


@pytest.mark.parametrize("status", [0, 3])
def test_all_ranks_leave_together(job, status):
    ended = job(f"print('bye', flush=True)\nsys.exit({status})\n")
    assert ended.returncode == status
    assert ended.stdout.count("bye") == 3
    assert "mpicomp" not in ended.stderr


@pytest.mark.slow
def test_one_rank_leaves_early_without_an_error(job):
    ended = job("if rank == 1:\n    sys.exit(0)\ntime.sleep(1.5)\nprint('done', flush=True)\n")
    assert ended.returncode == 0
    assert ended.stdout.count("done") == 2


def test_what_is_caught_ends_nothing(job):
    body = """
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
    ended = job(body)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("passed") == 3
    assert ended.stderr == ""


def test_a_forked_child_does_not_end_the_job(job):
    body = """
if rank == 1:
    child = os.fork()
    if child == 0:
        sys.stderr = open(os.devnull, "w")
        sys.excepthook(ValueError, ValueError("in the child"), None)
        os._exit(0)
    os.waitpid(child, 0)
wait()
"""
    ended = job(body)
    assert ended.returncode == 0, ended.stderr
    assert ended.stdout.count("passed") == 3


def test_the_hook_that_was_there_is_called(mpiexec, tmp_path):
    earlier = "import sys\nsys.excepthook = lambda *what: print('the earlier hook:', what[1], flush=True)\n"
    program = tmp_path / "program.py"
    program.write_text(earlier + PROGRAM + one_fails("fail()"))
    ended = mpiexec(3, program)
    assert ended.returncode == 1
    assert ended.stdout.count("the earlier hook: what went wrong") == 1


def test_opting_out(job):
    ended = job("assert not abort.install() and sys.excepthook is sys.__excepthook__\n", env={"MPICOMP_ABORT": "0"})
    assert ended.returncode == 0, ended.stderr


def test_a_single_rank_is_left_alone(job):
    body = "assert not abort.install() and sys.excepthook is sys.__excepthook__ and sys.exit.__module__ == 'sys'"
    assert job(body, ranks=1).returncode == 0


def test_importing_it_does_not_initialise_mpi():
    code = "import sys, mpicomp.system.abort as a; assert a.running() is None; assert 'mpi4py.MPI' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=20)


def test_an_error_of_all_ranks_is_printed_once(mpiexec):
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
