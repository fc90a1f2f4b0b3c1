"""Folders and files: crashes, errors of one rank, and files that are missing, torn or mixed."""

import errno
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from checkpoints import caught, content, file_of, load, load_errors, names, save, save_errors, the_one
from safetensors.numpy import load_file, save_file

import mpicomp
from mpicomp import checkpoint
from mpicomp.checkpoint import load_rounds, save_rounds
from mpicomp.errors import ConfigurationError, DisagreementError
from mpicomp.mpi import LocalWorld

FIRST, SECOND, THIRD = (f"checkpoint-{number:08d}" for number in (1, 2, 3))


@pytest.fixture
def two_ranks(tmp_path):
    """Return a folder with a checkpoint of two ranks."""
    folder = tmp_path / "two"
    save(folder, [{"w": np.full(50, rank), "name": f"rank {rank}"} for rank in range(2)])
    return folder


def test_a_file_is_what_other_tools_can_read(tmp_path):
    save(tmp_path, [{"w": np.arange(3.0), 0: (np.zeros(2, "f4"),)}])
    arrays = load_file(file_of(tmp_path, 0))
    assert sorted(arrays) == ["state['w']", "state[0][0]"]
    assert arrays["state['w']"].tolist() == [0, 1, 2]


def test_save_syncs_files_before_it_renames_the_folder(tmp_path, monkeypatch):
    events = []

    def fsync(handle):
        events.append((os.fstat(handle).st_ino, os.fstat(handle).st_size))

    rename = Path.rename
    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", lambda path, to: (events.append("rename"), rename(path, to))[1])
    save(tmp_path, [{"w": np.ones(1000)}, {"w": np.ones(10)}])
    written = [(path.stat().st_ino, path.stat().st_size) for path in sorted((tmp_path / FIRST).iterdir())]
    assert len(written) == 2
    assert set(written) <= set(events[: events.index("rename")])
    inodes = [event[0] for event in events if event != "rename"]
    assert inodes.index((tmp_path / FIRST).stat().st_ino) < events.index("rename")
    assert tmp_path.stat().st_ino in inodes[events.index("rename") :]


def test_newest_ones_are_kept_and_what_is_no_checkpoint_stays(tmp_path):
    (tmp_path / "checkpoint-12").mkdir()
    (tmp_path / "model.part").write_text("mine")
    for epoch in range(1, 5):
        save(tmp_path, [{"epoch": epoch}], keep=2)
        assert load(tmp_path) == [{"epoch": epoch}]
    assert names(tmp_path) == [THIRD, "checkpoint-00000004", "checkpoint-12", "model.part"]


def test_where_there_is_none_none_is_loaded(tmp_path):
    assert load(tmp_path / "nowhere", 3) == [None] * 3
    (tmp_path / f"{THIRD}.part").mkdir()
    assert load(tmp_path, 2) == [None] * 2
    assert names(tmp_path) == [f"{THIRD}.part"]


CHILD = """
import os, pathlib, shutil, signal, sys
import numpy as np
import mpicomp
from mpicomp import checkpoint
from mpicomp.mpi import LocalWorld

folder, moment = sys.argv[1:]
alone = LocalWorld(1).transports[0]
mpicomp.save_checkpoint(folder, {"epoch": 1, "w": np.full(10_000, 1.0), "v": np.zeros(3)}, alone)

def die(*args, **settings):
    os.kill(os.getpid(), signal.SIGKILL)

def half(value):
    checkpoint._bytes_of = die
    return bytes_of(value)

bytes_of = checkpoint._bytes_of
match moment:
    case "half written":
        checkpoint._bytes_of = half
    case "not renamed":
        pathlib.Path.rename = die
    case "renamed":
        checkpoint._drop_older = die
    case "half removed":
        shutil.rmtree = lambda path, **settings: (next(path.iterdir()).unlink(), die())
mpicomp.save_checkpoint(folder, {"epoch": 2, "w": np.full(10_000, 2.0), "v": np.zeros(3)}, alone)
"""


@pytest.mark.parametrize(
    ("moment", "epoch", "left"),
    [
        ("half written", 1, [FIRST, f"{SECOND}.part"]),
        ("not renamed", 1, [FIRST, f"{SECOND}.part"]),
        ("renamed", 2, [FIRST, SECOND]),
        ("half removed", 2, [f"{FIRST}.part", SECOND]),
    ],
)
def test_a_job_killed_at_any_moment_leaves_a_checkpoint(tmp_path, moment, epoch, left):
    command = [sys.executable, "-c", CHILD, str(tmp_path), moment]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (-9, "")
    assert names(tmp_path) == left
    (loaded,) = load(tmp_path)
    assert loaded["epoch"] == epoch
    assert loaded["w"].tolist() == [epoch] * 10_000
    save(tmp_path, [{"epoch": 3}])
    assert names(tmp_path) == [f"checkpoint-{epoch + 1:08d}"]


JOB = """
import os, signal, sys
from mpi4py import MPI
import mpicomp
from mpicomp import checkpoint

mpicomp.save_checkpoint(sys.argv[1], {"epoch": 1, "rank": MPI.COMM_WORLD.rank})
if MPI.COMM_WORLD.rank == 1:
    checkpoint._write = lambda *args: os.kill(os.getpid(), signal.SIGKILL)
mpicomp.save_checkpoint(sys.argv[1], {"epoch": 2, "rank": MPI.COMM_WORLD.rank})
"""


def test_a_rank_that_dies_while_it_saves(mpiexec, tmp_path):
    assert mpiexec(3, "-c", JOB, tmp_path, timeout=60).returncode != 0
    assert names(tmp_path) == [FIRST, f"{SECOND}.part"]
    assert load(tmp_path, 3) == [{"epoch": 1, "rank": rank} for rank in range(3)]


@pytest.mark.parametrize("bad", [0, 2])
def test_save_with_an_error_on_one_rank_raises_on_all(two_ranks, monkeypatch, bad):
    write = checkpoint._write

    def full(folder, header, *rest):
        if header.rank == bad:
            (folder / "half").write_bytes(b"half")
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
        write(folder, header, *rest)

    before = content(two_ranks)
    monkeypatch.setattr(checkpoint, "_write", full)
    text = the_one(save_errors(two_ranks, [{}] * 3))
    assert f"cannot write the file of rank {bad}: [Errno 28] No space left on device; the folder must be" in text
    assert content(two_ranks) == before
    assert names(two_ranks) == [FIRST]
    monkeypatch.undo()
    save(two_ranks, [{}] * 3)


def test_a_folder_that_ranks_do_not_share(tmp_path, monkeypatch):
    write = checkpoint._write
    monkeypatch.setattr(checkpoint, "_write", lambda path, header, *rest: header.rank or write(path, header, *rest))
    text = the_one(save_errors(tmp_path, [{}] * 2))
    assert "rank 0 does not see the file of rank 1" in text
    assert "must be on a file system that all ranks share" in text
    assert names(tmp_path) == []


@pytest.mark.parametrize("keep", [0, True])
def test_keep_is_a_number_of_checkpoints(tmp_path, keep):
    text = the_one(save_errors(tmp_path, [{}, {}], keep), ConfigurationError)
    assert text == f"save_checkpoint: keep must be at least 1, got {keep!r}"
    assert names(tmp_path) == []


@pytest.mark.parametrize("folder", [3, "a\0b", __file__])
def test_a_folder_that_cannot_be(folder):
    errors = [*save_errors(folder, [{}, {}]), *load_errors(folder, 2)]
    assert all(type(error) in (ConfigurationError, mpicomp.errors.CheckpointError) for error in errors)
    assert len({str(error) for error in errors}) == 2


def test_folders_that_differ_between_ranks_are_refused(tmp_path):
    world = LocalWorld(2)
    ends = list(zip("ab", world.transports, strict=True))
    saved = world.run([caught(save_rounds(tmp_path / name, {1: {2}}, 1, end.group)) for name, end in ends])
    assert "cannot be stored" in the_one(saved)
    saved = world.run([caught(save_rounds(tmp_path / name, {}, 1, end.group)) for name, end in ends])
    loaded = world.run([caught(load_rounds(tmp_path / name, end.group)) for name, end in ends])
    for verb, errors in (("save", saved), ("load", loaded)):
        text = the_one(errors, DisagreementError)
        assert text.startswith(f"{verb}_checkpoint: folder must be the same on all ranks, got ")
    assert names(tmp_path) == []


def refused(folder, message, ranks=2):
    before = content(folder)
    text = the_one(load_errors(folder, ranks))
    assert text.startswith("load_checkpoint: '")
    assert message in text
    assert content(folder) == before
    return text


def test_torn_and_missing_files_are_named(two_ranks):
    path = file_of(two_ranks, 1)
    whole = path.read_bytes()
    for size in range(0, len(whole), 97):
        path.write_bytes(whole[:size])
        text = refused(two_ranks, f"'{path}' is torn, or no file of a checkpoint", 1 + size % 2)
        assert "moving this folder away loads that one" in text
    path.unlink()
    refused(two_ranks, f"'{path}' is missing; where an older checkpoint was kept")
    file_of(two_ranks, 0).unlink()
    refused(two_ranks, "rank-00000.safetensors' is missing")


def test_files_of_different_saves_are_not_mixed(two_ranks, tmp_path):
    other = tmp_path / "other"
    save(other, [{"w": np.zeros(50)}] * 2)
    shutil.copy(file_of(other, 1), file_of(two_ranks, 1))  # the same number, rank and ranks
    text = refused(two_ranks, "rank-00001.safetensors' is the file of rank 1 of 2 of checkpoint 00000001-")
    assert "where that of rank 1 of 2 of checkpoint 00000001-" in text
    shutil.copy(file_of(two_ranks, 0), file_of(two_ranks, 1))
    refused(two_ranks, "is the file of rank 0 of 2")


def test_files_of_others_are_refused(two_ranks):
    foreign = "is torn, or no file of a checkpoint"
    about = {"schema": 1, "mpicomp": "0", "number": 1, "token": 0, "ranks": 2, "rank": 0}
    tree = {"state": "null"}
    too_large = {"mpicomp": json.dumps(about | {"token": 1 << 63})} | tree
    for metadata in [None, {"mpicomp": "[1]"}, {"mpicomp": json.dumps(about)}, too_large]:
        for rank in (1, 0):
            save_file({"w": np.zeros(3)}, file_of(two_ranks, rank), metadata)
            refused(two_ranks, foreign)
    many = {"mpicomp": json.dumps(about | {"ranks": 1 << 40})}
    for rank in range(2):
        save_file({"w": np.zeros(3)}, file_of(two_ranks, rank), many | tree)
    refused(two_ranks, f"rank-{(1 << 40) - 1}.safetensors' is missing")
    save_file({"w": np.zeros(3)}, file_of(two_ranks, 0), {"mpicomp": '{"schema": 2, "mpicomp": "9.1"}'} | tree)
    text = refused(two_ranks, "has schema 2 of mpicomp 9.1, and mpicomp")
    assert text.endswith("load it with that version (on rank 0)")


def test_tensors_need_torch(tmp_path):
    torch = pytest.importorskip("torch")
    save(tmp_path, [{"w": torch.ones(3)}])
    code = f"""if True:
        import sys, mpicomp
        from mpicomp.mpi import LocalWorld
        try:
            mpicomp.load_checkpoint({str(tmp_path)!r}, LocalWorld(1).transports[0])
        except mpicomp.MpicompError as error:
            print(error, "torch" in sys.modules)"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip().endswith("holds torch tensors; import torch before it False")
