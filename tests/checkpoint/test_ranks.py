"""Residuals are redistributed among another number of ranks."""

import numpy as np
import pytest
from checkpoints import check_same, gradients, load, names, save, save_errors, the_one
from hypothesis import given
from hypothesis import strategies as st
from worlds import Ranks

import mpicomp
from mpicomp.checkpoint import folder as folders
from mpicomp.checkpoint import rounds, weights
from mpicomp.errors import DisagreementError


@pytest.mark.parametrize(
    ("written", "ranks", "by_hand"),
    [
        (4, 2, [{0: 1 / 2, 1: 1 / 2}, {2: 1 / 2, 3: 1 / 2}]),
        (2, 4, [{0: 1}, {0: 1}, {1: 1}, {1: 1}]),
        (3, 2, [{0: 2 / 3, 1: 1 / 3}, {1: 1 / 3, 2: 2 / 3}]),
        (1, 3, [{0: 1}, {0: 1}, {0: 1}]),
        (2, 3, [{0: 1}, {0: 1 / 2, 1: 1 / 2}, {1: 1}]),
        (3, 3, [{0: 1}, {1: 1}, {2: 1}]),
    ],
)
def test_the_shares_by_hand(written, ranks, by_hand):
    for rank in range(ranks):
        found = weights(rank, ranks, written)
        assert found.keys() == by_hand[rank].keys()
        assert found == pytest.approx(by_hand[rank])


def slow(residuals, ranks):
    """Cut every old rank's residual into as many parts as there are new ranks, and give each new rank its share."""
    parts = [residual for residual in residuals for _ in range(ranks)]
    written = len(residuals)
    return [np.mean(parts[rank * written : (rank + 1) * written], axis=0) for rank in range(ranks)]


@given(st.integers(1, 40), st.integers(1, 40), st.integers(0, 2**32 - 1))
def test_the_mean_over_ranks_is_conserved(written, ranks, seed):
    residuals = np.random.default_rng(seed).normal(size=(written, 3))
    shares = [weights(rank, ranks, written) for rank in range(ranks)]
    new = [sum(share * residuals[source] for source, share in by_source.items()) for by_source in shares]
    np.testing.assert_allclose(np.mean(new, axis=0), residuals.mean(axis=0), atol=1e-12)
    np.testing.assert_allclose(new, slow(residuals, ranks), atol=1e-12)
    assert all(share > 0 for by_source in shares for share in by_source.values())


@pytest.mark.parametrize(("written", "ranks"), [(1, 1), (4, 4), (4, 2), (2, 4), (3, 2), (1, 3), (5, 1)])
def test_residuals_and_velocities_are_distributed_anew(tmp_path, written, ranks):
    settings = {"compressor": mpicomp.DGC(ratio=0.05, momentum=0.9), "collective": "allgather"}
    old = Ranks(written, **settings)
    for step in range(4):
        old.reduce([gradients(step, rank) for rank in range(written)])
    states = [reducer.state_dict() for reducer in old.reducers]
    assert all(state["velocities"]["w"].any() for state in states)
    save(tmp_path, [{"deep": [({7: state}, rank)]} for rank, state in enumerate(states)])
    loaded = load(tmp_path, ranks)
    for rank, tree in enumerate(loaded):
        ((element, nearest),) = tree["deep"]
        assert nearest == rank * written // ranks
        rest = {key: value for key, value in element[7].items() if key not in ("residuals", "velocities")}
        check_same(rest, {key: states[nearest][key] for key in rest})
        assert rest["step"] == 4
    for kind in ("residuals", "velocities"):
        for name in states[0][kind]:
            before = [state[kind][name] for state in states]
            after = [tree["deep"][0][0][7][kind][name] for tree in loaded]
            assert {(item.dtype, item.shape, type(item)) for item in after} == {
                (before[0].dtype, before[0].shape, np.ndarray)
            }
            np.testing.assert_allclose(after, slow([item.astype("f8") for item in before], ranks), rtol=1e-6, atol=1e-7)
            if written == ranks:
                assert [entry.tobytes() for entry in after] == [item.tobytes() for item in before]
    new = Ranks(ranks, **settings)
    for reducer, tree in zip(new.reducers, loaded, strict=True):
        reducer.load_state_dict(tree["deep"][0][0][7])
    new.reduce([gradients(9, rank) for rank in range(ranks)])
    assert new.reducers[0].last_step.step == 4


def test_only_the_files_that_are_needed_are_read(tmp_path, monkeypatch):
    opened = []

    class Counting(rounds.RankFile):
        def __init__(self, path):
            opened.append(int(path.stem.removeprefix("rank-")))
            super().__init__(path)

    states = Ranks(4, "topk")
    states.reduce([gradients(0, rank) for rank in range(4)])
    save(tmp_path, [{"reducer": reducer.state_dict()} for reducer in states.reducers])
    monkeypatch.setattr(rounds, "RankFile", Counting)
    monkeypatch.setattr(folders, "RankFile", Counting)
    load(tmp_path, 4)
    assert sorted(opened) == [0, 0, 1, 2, 3]  # rank 0 looks which checkpoint it is, first
    opened.clear()
    load(tmp_path, 8)
    assert sorted(opened) == [0, 0, 0, 1, 1, 2, 2, 3, 3]
    opened.clear()
    load(tmp_path, 2)
    assert set(opened[1:]) == {0, 1, 2, 3}
    assert len(opened) == 7


def test_reducers_that_differ_between_ranks_are_refused(tmp_path):
    def state(**arrays):
        return {"optimizer": {"mpicomp": {"schema": 1, "step": 0, "residuals": arrays, "velocities": {}}}}

    for other, message in [
        (
            {"v": np.zeros(3)},
            r"'state\['optimizer'\]\['mpicomp'\]\['residuals'\]\['w'\]' is on rank 0 but not on rank 1",
        ),
        ({"w": np.zeros(4)}, "must have the same shape on all ranks"),
        ({"w": np.zeros(3, "f4")}, "must have the same dtype on all ranks"),
    ]:
        text = the_one(save_errors(tmp_path, [state(w=np.zeros(3)), state(**other)]), DisagreementError)
        with pytest.raises(AssertionError, match=message):
            raise AssertionError(text)
    assert names(tmp_path) == []


def test_what_is_no_reducer_s_state_is_not_mixed(tmp_path):
    states = [
        {
            "a": {"residuals": {"w": np.full(3, rank)}, "velocities": {}},
            "b": {"schema": 1, "residuals": np.full(3, rank)},
        }
        for rank in range(2)
    ]
    save(tmp_path, states)
    check_same(load(tmp_path, 1)[0], states[0])
