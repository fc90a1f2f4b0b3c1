"""A crash leaves a checkpoint, and an error of one rank is raised on all."""

import errno
import os
import subprocess
import sys
from pathlib import Path

import pytest
from checkpoints import content, load, names, save, save_errors, the_one

from mpicomp.checkpoint import rounds

CHILD = """
import os, pathlib, shutil, signal, sys
import numpy as np
import mpicomp
from mpicomp.checkpoint import file, rounds
from mpicomp.transport import LocalWorld

folder, moment, keep = sys.argv[1], sys.argv[2], int(sys.argv[3])
alone = LocalWorld(1).transports[0]
mpicomp.save_checkpoint(folder, {"epoch": 1, "w": np.full(10_000, 1.0), "v": np.zeros(3)}, alone, keep)

def die(*args, **settings):
    os.kill(os.getpid(), signal.SIGKILL)

def half(value):
    file._bytes_of = die
    return bytes_of(value)

bytes_of = file._bytes_of
match moment:
    case "nothing written":
        rounds.write_file = die
    case "half written":
        file._bytes_of = half
    case "not synced":
        os.fsync = die
    case "not renamed":
        pathlib.Path.rename = die
    case "renamed":
        rounds.drop_older = die
    case "half removed":
        shutil.rmtree = lambda path, **settings: (next(path.iterdir()).unlink(), die())
mpicomp.save_checkpoint(folder, {"epoch": 2, "w": np.full(10_000, 2.0), "v": np.zeros(3)}, alone, keep)
"""


@pytest.mark.parametrize(
    ("moment", "epoch", "left"),
    [
        ("nothing written", 1, ["00000001", "00000002.part"]),
        ("half written", 1, ["00000001", "00000002.part"]),
        ("not synced", 1, ["00000001", "00000002.part"]),
        ("not renamed", 1, ["00000001", "00000002.part"]),
        ("renamed", 2, ["00000001", "00000002"]),
        ("half removed", 2, ["00000001.part", "00000002"]),
    ],
)
def test_a_job_killed_at_any_moment_leaves_a_checkpoint(tmp_path, moment, epoch, left):
    command = [sys.executable, "-c", CHILD, str(tmp_path), moment, "1"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-9, "")
    assert names(tmp_path) == left
    (loaded,) = load(tmp_path)
    assert loaded["epoch"] == epoch
    assert loaded["w"].tolist() == [epoch] * 10_000
    assert names(tmp_path) == left
    save(tmp_path, [{"epoch": 3}])
    assert names(tmp_path) == ["00000003"]


JOB = """
import os, signal, sys
from mpi4py import MPI
import mpicomp
from mpicomp.checkpoint import rounds

mpicomp.save_checkpoint(sys.argv[1], {"epoch": 1, "rank": MPI.COMM_WORLD.rank})
if MPI.COMM_WORLD.rank == 1:
    rounds.write_file = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
mpicomp.save_checkpoint(sys.argv[1], {"epoch": 2, "rank": MPI.COMM_WORLD.rank})
"""


def test_a_rank_that_dies_while_it_saves(mpiexec, tmp_path):
    assert mpiexec(3, "-c", JOB, tmp_path, timeout=60).returncode != 0
    assert names(tmp_path) == ["00000001", "00000002.part"]
    assert load(tmp_path, 3) == [{"epoch": 1, "rank": rank} for rank in range(3)]
    save(tmp_path, [{}])
    assert names(tmp_path) == ["00000003"]


FULL = """
import resource, sys
import numpy as np
from mpicomp import checkpoint, errors
from mpicomp.transport import LocalWorld

world = LocalWorld(3)
resource.setrlimit(resource.RLIMIT_FSIZE, (20_000, resource.RLIM_INFINITY))
states = [{"w": np.ones(10_000 if rank == 1 else 10)} for rank in range(3)]
def caught(asked):
    try:
        yield from asked
    except errors.CheckpointError as error:
        return str(error)
for text in world.run([
    caught(checkpoint.save_rounds(sys.argv[1], state, 1, end.group)) for state, end in zip(states, world.transports)
]):
    print(text)
"""


def test_a_file_that_the_system_does_not_take(two_ranks):
    before = content(two_ranks)
    done = subprocess.run(
        [sys.executable, "-c", FULL, str(two_ranks)], capture_output=True, text=True, timeout=60, check=True
    )
    lines = done.stdout.splitlines()
    assert len(lines) == 3
    assert len(set(lines)) == 1
    assert lines[0].startswith("save_checkpoint: cannot write the file of rank 1: ")
    assert os.strerror(errno.EFBIG) in lines[0]
    assert lines[0].endswith("Those before are as they were (on rank 1)")
    assert content(two_ranks) == before
    assert names(two_ranks) == ["00000001"]


@pytest.mark.parametrize("bad", [0, 2])
def test_save_with_an_error_on_one_rank_raises_on_all(two_ranks, monkeypatch, bad):
    write = rounds.write_file

    def full(path, header, *rest):
        if header.rank == bad:
            path.write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(path, header, *rest)

    before = content(two_ranks)
    monkeypatch.setattr(rounds, "write_file", full)
    text = the_one(save_errors(two_ranks, [{}] * 3))
    assert f"cannot write the file of rank {bad}: [Errno 28] No space left on device; the folder must be" in text
    assert content(two_ranks) == before
    assert names(two_ranks) == ["00000001"]
    monkeypatch.undo()
    save(two_ranks, [{}] * 3)


def test_an_error_of_rank_0_in_the_end_is_raised_on_all(two_ranks, monkeypatch):
    def rename(path, to):
        raise OSError(errno.EROFS, os.strerror(errno.EROFS))

    before = content(two_ranks)
    monkeypatch.setattr(Path, "rename", rename)
    assert "Read-only file system" in the_one(save_errors(two_ranks, [{}] * 2))
    assert content(two_ranks) == before
    assert names(two_ranks) == ["00000001"]


def test_a_folder_that_ranks_do_not_share(tmp_path, monkeypatch):
    write = rounds.write_file
    monkeypatch.setattr(
        rounds, "write_file", lambda path, header, *rest: header.rank == 1 or write(path, header, *rest)
    )
    text = the_one(save_errors(tmp_path, [{}] * 2))
    assert "rank 0 does not see the file of rank 1" in text
    assert "must be on a file system that all ranks share" in text
    assert names(tmp_path) == []
