import os
import subprocess
import sys
from pathlib import Path

import pytest
from marks import slow

from mpicomp import cli
from mpicomp.cli import main

HEAVY = ("mpi4py.MPI", "torch", "numba", "cupy", "sklearn")

# A command of the given behavior, in the place of a real one.
PROGRAM = """
import sys, types, importlib.machinery
from mpicomp import cli

fake = types.ModuleType("mpicomp.cli.fake")
fake.__spec__ = importlib.machinery.ModuleSpec("mpicomp.cli.fake", None)
fake.HELP = "do what the test wants"
fake.add_arguments = lambda parser: parser.add_argument("--number", type=int)
sys.modules["mpicomp.cli.fake"] = fake
cli.COMMANDS["fake"] = "mpicomp.cli"


def fake_run(arguments):
    from mpicomp.errors import MpicompError
    {body}
    return 0


fake.run = fake_run
sys.exit(cli.main(["fake", *sys.argv[1:]]))
"""


@pytest.fixture
def fake(mpiexec, tmp_path):
    def start(ranks, body, *arguments):
        program = tmp_path / "program.py"
        program.write_text(PROGRAM.replace("{body}", body.replace("\n", "\n    ")))
        return mpiexec(ranks, program, *arguments)

    return start


WORLD = "from mpi4py.MPI import COMM_WORLD as world\n"


def test_help_of_every_command_loads_nothing_heavy():
    code = (
        "import sys\n"
        "from mpicomp import cli\n"
        "assert cli.main(['--help']) == 0\n"
        "assert all(cli.main([name, '--help']) == 0 for name in cli.COMMANDS)\n"
        f"assert not (loaded := set({HEAVY}) & set(sys.modules)), loaded\n"
    )
    ended = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=30, check=False)
    assert ended.returncode == 0, ended.stderr
    assert "doctor" in cli.COMMANDS
    for name in cli.COMMANDS:
        assert f"\n    {name} " in ended.stdout
        assert f"usage: mpicomp {name}" in ended.stdout


@pytest.mark.parametrize("arguments", [["--help"], ["doctor", "--help"], ["--version"]])
def test_help_needs_no_package(arguments, tmp_path):
    # -S leaves out site-packages: the package stands alone, with bench/ inside as installed.
    package = Path(cli.__file__).parents[1]
    (tmp_path / "mpicomp").mkdir()
    for part in [*package.iterdir(), package.parent / "bench"]:
        (tmp_path / "mpicomp" / part.name).symlink_to(part)
    ended = subprocess.run(
        [sys.executable, "-S", "-m", "mpicomp", *arguments],
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=30,
        check=False,
    )
    assert ended.returncode == 0, ended.stderr
    assert "mpicomp" in ended.stdout


def test_version_is_printed(capsys):
    from mpicomp import __version__

    assert main(["--version"]) == 0
    assert capsys.readouterr().out == f"mpicomp {__version__}\n"


def test_wrong_command_names_the_nearest(capsys):
    assert main(["docter"]) == 2
    assert capsys.readouterr().err == "mpicomp: unknown command 'docter'; did you mean 'doctor'?\n"
    assert main(["zzzz"]) == 2
    assert "there are tour, doctor" in capsys.readouterr().err


def test_wrong_option_is_refused(capsys):
    assert main([]) == 2
    assert "COMMAND" in capsys.readouterr().err
    assert main(["doctor", "--jsn"]) == 2
    assert "--jsn" in capsys.readouterr().err


def test_mpicomp_error_is_one_line(fake):
    ended = fake(1, "raise MpicompError('topk: ratio must be in (0, 1], got 0.0')")
    assert ended.returncode == 2
    assert "mpicomp: topk: ratio must be in (0, 1], got 0.0\n" in ended.stderr
    assert "Traceback" not in ended.stderr


@pytest.mark.parametrize("before", [slow(""), WORLD])
def test_error_of_all_ranks_is_printed_once(fake, before):
    ended = fake(3, before + "raise MpicompError('the same everywhere')")
    assert ended.returncode == 2
    assert ended.stderr.count("the same everywhere") == 1
    assert "mpicomp: the same everywhere\n" in ended.stderr
    assert "Traceback" not in ended.stderr


# Without MPI up, the others wait in MPI_Init, and no launcher notices that one is missing.
ALONE = "import os\nif os.environ.get('PMI_RANK', os.environ.get('OMPI_COMM_WORLD_RANK')) == '1':\n    {}\n"


@pytest.mark.parametrize("before", [True, slow(False)])
@pytest.mark.parametrize(
    ("statement", "status", "shown"),
    [
        ("raise MpicompError('only here')", 2, "mpicomp: rank 1 of 3: only here"),
        ("raise ZeroDivisionError('a bug')", 1, "rank 1 of 3: uncaught exception, ending the job"),
        slow("return 7", 7, "rank 1 of 3: left with status 7"),
        ("raise KeyboardInterrupt", 130, "rank 1 of 3: left with status 130"),
    ],
)
def test_end_of_one_rank_ends_all(fake, before, statement, status, shown):
    alone, wait = ALONE.format(statement), "world.Barrier()\nprint('passed')\n"
    ended = fake(3, WORLD + alone + wait if before else alone + WORLD + wait)
    assert ended.returncode == status
    assert shown in ended.stderr
    assert ended.stderr.count("Traceback") == ended.stderr.count("ZeroDivisionError: a bug") == (status == 1)
    assert "passed" not in ended.stdout


def test_same_status_of_all_ranks_is_an_ordinary_end(fake):
    ended = fake(3, WORLD + "world.Barrier()\nreturn 7")
    assert ended.returncode == 7
    assert "mpicomp" not in ended.stderr


def test_bug_of_one_process_is_an_ordinary_traceback(fake):
    ended = fake(1, "1 / 0")
    assert ended.returncode == 1
    assert "ZeroDivisionError" in ended.stderr


@pytest.mark.parametrize("arguments", [["--help"], ["doctor"]])
def test_reader_that_leaves_early_is_no_error(arguments, clean_environ):
    reading, writing = os.pipe()
    os.close(reading)
    try:
        ended = subprocess.run(
            [sys.executable, "-m", "mpicomp", *arguments],
            env=clean_environ,
            stdout=writing,
            stderr=subprocess.PIPE,
            text=True,
            timeout=30,
            check=False,
        )
    finally:
        os.close(writing)
    # argparse itself passes over a pipe that is closed when it writes, but not when it is flushed.
    assert ended.returncode == cli.BROKEN_PIPE or arguments == ["--help"]
    assert ended.stderr == ""


def test_closed_output_is_no_error(clean_environ):
    command = 'exec "$0" -m mpicomp --help >&-'
    ended = subprocess.run(
        ["bash", "-c", command, sys.executable], env=clean_environ, capture_output=True, timeout=30, check=False
    )
    assert ended.returncode == 0, ended.stderr
