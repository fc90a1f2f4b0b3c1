"""When a fork is dangerous with live MPI."""

import multiprocessing
import subprocess
import sys

import pytest

from mpicomp.doctor.forking import fork_notes, forking
from mpicomp.doctor.wires import Wires

RDMA, TCP, UNKNOWN = (Wires("ucx", "shared memory", between, "") for between in ("rdma", "tcp", "unknown"))


@pytest.mark.parametrize(
    ("method", "wires", "cards", "environ", "dangerous"),
    [
        ("fork", RDMA, ["mlx5_0"], {}, True),
        ("fork", RDMA, ["mlx5_0"], {"RDMAV_FORK_SAFE": "0"}, True),
        ("fork", RDMA, ["mlx5_0"], {"RDMAV_FORK_SAFE": "1"}, False),
        ("fork", RDMA, ["mlx5_0"], {"IBV_FORK_SAFE": "1"}, False),
        ("forkserver", RDMA, ["mlx5_0"], {}, False),
        ("spawn", RDMA, ["mlx5_0"], {}, False),
        ("fork", TCP, ["mlx5_0"], {}, False),
        ("fork", UNKNOWN, ["cxi0"], {}, True),  # a wrong no crashes, a wrong yes costs a look
        ("fork", UNKNOWN, [], {}, False),
    ],
)
def test_danger(method, wires, cards, environ, dangerous):
    found = forking(method, wires, cards, environ)
    assert (found.method, found.dangerous) == (method, dangerous)
    notes = fork_notes(found)
    assert len(notes) == dangerous
    assert all("forkserver" in note.fix for note in notes)


@pytest.mark.parametrize("method", multiprocessing.get_all_start_methods())
def test_the_method_is_the_one_that_was_set(method):
    program = (
        "import multiprocessing, sys\n"
        "from mpicomp.doctor.forking import default_method\n"
        f"multiprocessing.set_start_method({method!r})\n"
        "print(default_method())\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    assert told.stdout.strip() == method


def test_looking_at_the_method_does_not_settle_it():
    program = (
        "import multiprocessing\n"
        "from mpicomp.doctor.forking import default_method\n"
        "print(default_method())\n"
        "assert multiprocessing.get_start_method(allow_none=True) is None\n"
        "print(multiprocessing.get_start_method())\n"
    )
    told = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, check=True, timeout=60)
    found, real = told.stdout.split()
    assert found == real
