"""Residuals are redistributed over another number of ranks."""

import errno
import os
from pathlib import Path

import numpy as np
import pytest
from checkpoints import check_same, file_of, gradients, load, names, save, save_errors, the_one
from hypothesis import given
from hypothesis import strategies as st
from worlds import Ranks

import mpicomp
from mpicomp import checkpoint
from mpicomp.checkpoint import weights
from mpicomp.errors import CheckpointError, DisagreementError


def slow(residuals, ranks):
    """Cut every old rank's residual into as many parts as there are new ranks, and average each new rank's share."""
    parts = [residual for residual in residuals for _ in range(ranks)]
    written = len(residuals)
    return [np.mean(parts[rank * written : (rank + 1) * written], axis=0) for rank in range(ranks)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_mean_over_ranks_is_conserved(written, ranks, seed):
    residuals = np.random.default_rng(seed).normal(size=(written, 3))
    shares = [weights(rank, ranks, written) for rank in range(ranks)]
    new = [sum(weight * residuals[source] for source, weight in share.items()) for share in shares]
    np.testing.assert_allclose(np.mean(new, axis=0), residuals.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(new, slow(residuals, ranks), atol=1e-12)
    assert all(weight > 0 for share in shares for weight in share.values())


@pytest.mark.parametrize(("written", "ranks"), [(3, 3), (4, 2), (3, 2), (1, 3)])
def test_residuals_and_velocities_are_redistributed(tmp_path, written, ranks):
    settings = {"compressor": mpicomp.DGC(ratio=0.05, momentum=0.9), "collective": "allgather"}
    old = Ranks(written, **settings)
    for step in range(4):
        old.reduce([gradients(step, rank) for rank in range(written)])
    states = [reducer.state_dict() for reducer in old.reducers]
    assert all(state["velocities"]["w"].any() for state in states)
    save(tmp_path, [{"deep": [({7: state}, rank)]} for rank, state in enumerate(states)])
    loaded = load(tmp_path, ranks)
    for rank, tree in enumerate(loaded):
        ((state, nearest),) = tree["deep"]
        assert nearest == rank * written // ranks
        rest = {key: value for key, value in state[7].items() if key not in ("residuals", "velocities")}
        check_same(rest, {key: states[nearest][key] for key in rest})
        assert rest["step"] == 4
    for kind in ("residuals", "velocities"):
        for name in states[0][kind]:
            before = [state[kind][name] for state in states]
            after = [tree["deep"][0][0][7][kind][name] for tree in loaded]
            assert {(array.dtype, array.shape, type(array)) for array in after} == {
                (before[0].dtype, before[0].shape, np.ndarray)
            }
            expected = slow([array.astype("f8") for array in before], ranks)
            np.testing.assert_allclose(after, expected, rtol=1e-6, atol=1e-7)
            if written == ranks:
                assert [array.tobytes() for array in after] == [array.tobytes() for array in before]
    new = Ranks(ranks, **settings)
    for reducer, tree in zip(new.reducers, loaded, strict=True):
        reducer.load_state_dict(tree["deep"][0][0][7])
    new.reduce([gradients(9, rank) for rank in range(ranks)])
    assert new.reducers[0].last_step.step == 4


def test_reducers_that_differ_between_ranks_are_refused(tmp_path):
    def state(**arrays):
        return {"optimizer": {"mpicomp": {"schema": 1, "step": 0, "residuals": arrays, "velocities": {}}}}

    for other, message in [
        ({"v": np.zeros(3)}, "'state['optimizer']['mpicomp']['residuals']['w']' is on rank 0 but not on rank 1"),
        ({"w": np.zeros(4)}, "must have the same shape on all ranks"),
    ]:
        assert message in the_one(save_errors(tmp_path, [state(w=np.zeros(3)), state(**other)]), DisagreementError)
    assert names(tmp_path) == []


def shared(comm, tmp_path):
    return Path(comm.bcast(str(tmp_path)))


@pytest.mark.mpi
def test_errors_of_the_last_rank_reach_all(comm, tmp_path, monkeypatch):
    folder, last = shared(comm, tmp_path), comm.size - 1
    mpicomp.save_checkpoint(folder, {"epoch": 1, "rank": comm.rank}, comm)
    with pytest.raises(CheckpointError, match=r"state\['x'\] is a object and cannot be stored"):
        mpicomp.save_checkpoint(folder, {"x": object() if comm.rank == last else 0}, comm)

    def full(*args):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    if comm.rank == last:
        monkeypatch.setattr(checkpoint, "_write", full)
    with pytest.raises(CheckpointError, match=f"cannot write the file of rank {last}: .* No space left"):
        mpicomp.save_checkpoint(folder, {"epoch": 2}, comm)
    comm.Barrier()
    assert names(folder) == ["checkpoint-00000001"]
    assert mpicomp.load_checkpoint(folder, comm) == {"epoch": 1, "rank": comm.rank}
    comm.Barrier()
    if comm.rank == 0:
        path = file_of(folder, last)
        path.write_bytes(path.read_bytes()[:-1])
    comm.Barrier()
    with pytest.raises(CheckpointError, match=f"rank-{last:05d}.safetensors' is torn"):
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
