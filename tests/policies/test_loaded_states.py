"""Ranks that load different states: what policies have learned has to be the same on all of them."""

import copy

import numpy as np
import pytest
from worlds import Ranks

import mpicomp
from mpicomp.errors import DisagreementError

STEPS = 30
CHANGES = {
    "schedule": lambda state: state.update(steps=900),
    "accordion": lambda state: state.update(quiet=[] if state["quiet"] else ["w"]),
    "gravac": lambda state: state.update(candidate=4, floor=4),
    "flexible": lambda state: state.update(current=[0.001, "allgather"]),
    "lgreco": lambda state: state.update(adjusted=True, chosen={"w": 0.5}, instead={"w": 0.01}),
    "auto": lambda state: state.update(age=100_000),
}


def gradients(size, step, numel=2000):
    return [{"w": np.random.default_rng((step, rank)).laplace(size=numel).astype(np.float32)} for rank in range(size)]


def trained(policy, size=3):
    ranks = Ranks(size, "topk", "allgather", policy)
    for step in range(STEPS):
        ranks.reduce(gradients(size, step), 0.1)
    return ranks, [copy.deepcopy(reducer.state_dict()) for reducer in ranks.reducers]


@pytest.mark.parametrize("policy", CHANGES)
@pytest.mark.parametrize("in_new_reducers", [False, True])
def test_another_state_on_one_rank_is_one_error_on_all(policy, in_new_reducers):
    """Over MPI ranks with other plans would wait for each other."""
    ranks, states = trained(policy)
    CHANGES[policy](states[1]["policy"])
    if in_new_reducers:
        ranks = Ranks(3, "topk", "allgather", policy)
    for reducer, state in zip(ranks.reducers, states, strict=True):
        reducer.load_state_dict(state)
    with pytest.raises(
        DisagreementError, match="values that the policy learned must be the same on all ranks"
    ) as caught:
        ranks.reduce(gradients(3, STEPS), 0.1)
    assert "3 of 3 ranks raised" in caught.value.__notes__


@pytest.mark.parametrize("policy", [*CHANGES, "static"])
def test_a_state_that_one_rank_alone_loads_is_one_error_on_all(policy):
    ranks, states = trained(policy)
    ranks.reducers[1].load_state_dict(states[1])
    with pytest.raises(DisagreementError, match="whether a state was loaded must be the same on all ranks") as caught:
        ranks.reduce(gradients(3, STEPS), 0.1)
    assert "3 of 3 ranks raised" in caught.value.__notes__


@pytest.mark.mpi(min_size=2)
@pytest.mark.parametrize("policy", ["schedule", "auto"])
def test_over_mpi_another_state_on_one_rank_is_one_error_on_all(comm, policy):
    reducer = mpicomp.Reducer("topk", "allgather", policy, comm=comm)
    for step in range(5):
        reducer.reduce(gradients(comm.size, step)[comm.rank], 0.1)
    state = reducer.state_dict()
    if comm.rank == comm.size - 1:
        CHANGES[policy](state["policy"])
    reducer.load_state_dict(state)
    with pytest.raises(DisagreementError, match="values that the policy learned must be the same on all ranks"):
        reducer.reduce(gradients(comm.size, 5)[comm.rank], 0.1)
    reducer.close()
