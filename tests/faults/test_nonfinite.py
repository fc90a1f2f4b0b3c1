"""A NaN or an infinity on one rank, whatever chooses the plans."""

import numpy as np
import pytest

import mpicomp
from mpicomp.errors import NonFiniteError
from mpicomp.policies import list_policies, policy_class
from mpicomp.policies.warmup import with_warmup

POLICIES = ["static", "auto", "accordion", "flexible", "gravac", "lgreco", "schedule"]


def test_every_policy_is_here():
    registered = {name for name in list_policies() if policy_class(name).__module__.startswith("mpicomp.")}
    assert registered == set(POLICIES)


def gradients(rank, step, bad=None):
    rng = np.random.default_rng([rank, step])
    arrays = {name: rng.normal(size=size).astype(np.float32) for name, size in (("a", 4000), ("b", 300))}
    if bad is not None:
        arrays["b"][7] = bad
    return arrays


@pytest.mark.mpi
@pytest.mark.parametrize("mode", ["raise", "skip"])
@pytest.mark.parametrize("policy", POLICIES)
def test_all_ranks_have_one_end_and_go_on(comm, policy, mode, monkeypatch):
    monkeypatch.setenv("MPICOMP_PROBE", "0")
    compressor = None if policy == "auto" else "topk"
    reducer = mpicomp.Reducer(compressor, policy=with_warmup(policy, 0), nonfinite=mode, comm=comm)
    for step in range(8):
        bad = {3: np.nan, 6: np.inf}.get(step)
        given = gradients(comm.rank, step, bad if comm.rank == comm.size - 1 else None)
        before = {name: reducer.residual(name) for name in given} if step else {}
        if bad is not None and mode == "raise":
            with pytest.raises(NonFiniteError, match=f"got NaN or infinity on some rank at step {step}"):
                reducer.reduce(given)
            means = {}
        else:
            means = {name: mean.copy() for name, mean in reducer.reduce(given).items()}
        assert len(set(comm.allgather(tuple(mean.tobytes() for mean in means.values())))) == 1
        if bad is not None:
            assert all(reducer.residual(name).tobytes() == before[name].tobytes() for name in given)
            assert not any(mean.any() for mean in means.values())
        else:
            assert all(np.isfinite(mean).all() for mean in means.values())
            assert any(mean.any() for mean in means.values())
    reducer.close()
