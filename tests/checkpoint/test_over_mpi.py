"""The same among real processes."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import about, check_same, file_of, gradients, names, write_before

import mpicomp
from mpicomp.checkpoint import rounds
from mpicomp.errors import CheckpointError, ConfigurationError


def shared(comm, tmp_path):
    return Path(comm.bcast(str(tmp_path)))


@pytest.mark.mpi
def test_each_rank_gets_its_own(comm, tmp_path):
    folder = shared(comm, tmp_path) / "checkpoints"
    assert mpicomp.load_checkpoint(folder, comm) is None
    for epoch in range(3):
        mpicomp.save_checkpoint(folder, {"epoch": epoch, "rank": comm.rank, "w": np.full(comm.rank, 3.0)}, comm, keep=2)
    loaded = mpicomp.load_checkpoint(str(folder), comm)
    assert (loaded["epoch"], loaded["rank"], loaded["w"].tolist()) == (2, comm.rank, [3] * comm.rank)
    assert names(folder) == ["00000002", "00000003"]
    assert len(names(folder / "00000003")) == comm.size


@pytest.mark.mpi
def test_errors_of_the_last_rank_reach_all(comm, tmp_path, monkeypatch):
    folder, last = shared(comm, tmp_path), comm.size - 1
    mpicomp.save_checkpoint(folder, {"epoch": 1}, comm)
    with pytest.raises(CheckpointError, match=r"state\['x'\] is a object and cannot be stored"):
        mpicomp.save_checkpoint(folder, {"x": object() if comm.rank == last else 0}, comm)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if comm.rank == last:
        monkeypatch.setattr(rounds, "write_file", full)
    with pytest.raises(CheckpointError, match=f"cannot write the file of rank {last}: .* No space left"):
        mpicomp.save_checkpoint(folder, {"epoch": 2}, comm)
    comm.Barrier()
    assert names(folder) == ["00000001"]
    assert mpicomp.load_checkpoint(folder, comm) == {"epoch": 1}
    comm.Barrier()
    if comm.rank == 0:
        path = folder / "00000001" / f"rank-{last:05d}.safetensors"
        path.write_bytes(path.read_bytes()[:-1])
    comm.Barrier()
    with pytest.raises(CheckpointError, match=f"rank-{last:05d}.safetensors' is torn"):
        mpicomp.load_checkpoint(folder, comm)


@pytest.mark.mpi
@pytest.mark.parametrize("damage", ["flipped", "token", "deep header", "deep tree", "ranks"])
def test_a_damaged_file_is_one_error_of_all_ranks(comm, tmp_path, damage):
    folder, last = shared(comm, tmp_path), comm.size - 1
    mpicomp.save_checkpoint(folder, {"w": np.arange(9.0) + comm.rank}, comm)
    if comm.rank == 0:
        path = file_of(folder, last)
        deep = "[" * 100_000 + "]" * 100_000
        value = about(ranks=comm.size, rank=last)
        match damage:
            case "flipped":
                whole = path.read_bytes()
                path.write_bytes(whole[:-20] + bytes([whole[-20] ^ 4]) + whole[-19:])
            case "token":
                write_before(path, value | {"token": 2**63})
            case "deep header":
                write_before(path, deep)
            case "deep tree":
                write_before(path, value, deep)
            case "ranks":
                write_before(file_of(folder, 0), value | {"ranks": 2**40, "rank": 0})
    comm.Barrier()
    with pytest.raises(CheckpointError, match=r"rank-[0-9]+.safetensors'") as raised:
        mpicomp.load_checkpoint(folder, comm)
    assert set(comm.allgather(str(raised.value))) == {str(raised.value)}
    comm.Barrier()
    mpicomp.save_checkpoint(folder, {"epoch": 2}, comm)
    assert mpicomp.load_checkpoint(folder, comm) == {"epoch": 2}


@pytest.mark.mpi
def test_folders_of_others_are_left_alone(comm, tmp_path):
    folder = shared(comm, tmp_path)
    others = ["20240511", "20240511.part", "99999999999999999999"]
    if comm.rank == 0:
        for name in others:
            (folder / name).mkdir()
            (folder / name / "results.csv").write_text("1,2")
    comm.Barrier()
    for epoch in range(3):
        mpicomp.save_checkpoint(folder, {"epoch": epoch}, comm)
        assert mpicomp.load_checkpoint(folder, comm) == {"epoch": epoch}
    assert names(folder) == ["00000003", *others]
    assert [(folder / name / "results.csv").read_text() for name in others] == ["1,2"] * 3


@pytest.mark.mpi
def test_a_folder_that_is_none_on_one_rank(comm, tmp_path):
    folder = shared(comm, tmp_path)
    folder = folder if comm.rank < comm.size - 1 else None
    with pytest.raises(ConfigurationError, match="save_checkpoint: folder must be a str or a path, got None"):
        mpicomp.save_checkpoint(folder, {}, comm)
    with pytest.raises(ConfigurationError, match="load_checkpoint: folder must be a str or a path, got None"):
        mpicomp.load_checkpoint(folder, comm)


@pytest.mark.mpi
def test_a_run_that_was_stopped_goes_on_as_if_it_was_not(comm, tmp_path):
    folder = shared(comm, tmp_path)

    def make():
        return mpicomp.Reducer(mpicomp.TopK(ratio=0.1), "allgather", comm=comm)

    straight, means = make(), []
    for step in range(6):
        mean = straight.reduce(gradients(step, comm.rank))
        means.append({name: array.copy() for name, array in mean.items()})
        if step == 2:
            mpicomp.save_checkpoint(folder, {"reducer": straight.state_dict()}, straight.transport)
    resumed = make()
    resumed.load_state_dict(mpicomp.load_checkpoint(folder, resumed.transport)["reducer"])
    for step in range(3, 6):
        check_same(resumed.reduce(gradients(step, comm.rank)), means[step])
    straight.close()
    resumed.close()


@pytest.mark.mpi
def test_fewer_and_more_ranks(comm, tmp_path):
    few = comm.Split(int(comm.rank >= max(1, comm.size - 1)), comm.rank)  # all but the last one, and the last one
    alone = comm.size > 1 and comm.rank == comm.size - 1
    residual = np.arange(5, dtype=np.float32) + 10 * comm.rank

    def state(array):
        return {"mpicomp": {"schema": 1, "step": 3, "residuals": {"w": array}, "velocities": {}}}

    def mean(array, among):
        total = np.empty_like(array)
        among.Allreduce(array, total)
        return total / among.size

    folder = shared(comm, tmp_path)
    mpicomp.save_checkpoint(folder / "all", state(residual), comm)
    expected = mean(residual, comm)
    if not alone:
        loaded = mpicomp.load_checkpoint(folder / "all", few)["mpicomp"]["residuals"]["w"]
        np.testing.assert_allclose(mean(loaded, few), expected, rtol=1e-6)
        mpicomp.save_checkpoint(folder / "few", state(residual), few)
        expected = mean(residual, few)
    comm.Barrier()
    expected = comm.bcast(expected)
    loaded = mpicomp.load_checkpoint(folder / "few", comm)["mpicomp"]["residuals"]["w"]
    np.testing.assert_allclose(mean(loaded, comm), expected, rtol=1e-6)
    few.Free()
