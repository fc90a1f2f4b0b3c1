"""States of sharded models are put together by name and row, on other numbers of shards and replicas."""

import numpy as np
import pytest
from checkpoints import caught, check_same, load, load_errors, save, the_one
from hypothesis import given
from hypothesis import strategies as st

from mpicomp.checkpoint import load_rounds
from mpicomp.errors import DisagreementError
from mpicomp.mpi import LocalWorld

SHAPES = {"w": (7, 2), "b": (5,), "one": (1, 3)}  # "one" leaves all shards but the first without a row


def cut(shards, shard):
    """Return the rows of a shard, as torch cuts them: all shards but the last ones have as many."""
    rows = {}
    for name, (length, *_) in SHAPES.items():
        size = -(-length // shards)
        rows[name] = [min(length, shard * size), min(length, (shard + 1) * size), length]
    return rows


def whole(replica, kind):
    """Return all rows of the arrays of a replica, which differ in all elements."""
    rng = np.random.default_rng((replica, sum(kind.encode())))
    return {name: rng.normal(size=shape).astype(np.float32) for name, shape in SHAPES.items()}


def rows_of(arrays, rows):
    return {name: array[slice(*rows[name][:2])] for name, array in arrays.items()}


def state(rows, replica, **more):
    """Return the state of an optimizer that holds rows of a replica; moments of rank 0 are those of all replicas."""
    kinds = {kind: rows_of(whole(replica, kind), rows) for kind in ("residuals", "velocities")}
    # A bucket has no array without elements: these are zeros of another dtype, or missing.
    kinds["residuals"] = {n: a if a.size else np.zeros(a.shape) for n, a in kinds["residuals"].items()}
    kinds["velocities"] = {name: array for name, array in kinds["velocities"].items() if array.size}
    reducer = {"schema": 1, "step": 5, "memories": {"w": {"bound": 0.5}}} | kinds
    shared = rows_of(whole(0, "shared"), rows)
    return {"rows": rows, "fragments": [{"reducer": reducer, "shared": shared}], "replica": replica} | more


def write(folder, shards, replicas):
    save(folder, [state(cut(shards, shard), replica) for replica in range(replicas) for shard in range(shards)])


def slow_mean(replica, replicas, written, kind, name):
    """Return the mean of what one of several replicas continues, of arrays that are cut into many equal parts."""
    parts = [whole(old, kind)[name].astype(float) for old in range(written) for _ in range(replicas)]
    return np.mean(parts[replica * written : (replica + 1) * written], axis=0)


LAYOUTS = st.tuples(st.integers(1, 4), st.integers(1, 4))  # shards, replicas


@given(LAYOUTS, LAYOUTS)
def test_arrays_have_the_rows_of_their_shard(tmp_path_factory, written, read):
    folder = tmp_path_factory.mktemp("checkpoint")
    write(folder, *written)
    shards, replicas = read
    for shard in range(shards):
        rows = cut(shards, shard)
        for replica, loaded in enumerate(load(folder, replicas, rows)):
            assert loaded["rows"] == rows
            (fragment,) = loaded["fragments"]
            assert fragment["reducer"]["step"] == 5
            learned = {"w": {"bound": 0.5}} if shards == written[0] else {}  # from buckets with other rows: dropped
            assert fragment["reducer"]["memories"] == learned
            check_same(fragment["shared"], rows_of(whole(0, "shared"), rows))
            for kind in ("residuals", "velocities"):
                for name, (first, end, _) in rows.items():
                    found = fragment["reducer"][kind].get(name, np.zeros((0, *SHAPES[name][1:])))
                    expected = slow_mean(replica, replicas, written[1], kind, name)[first:end]
                    assert found.shape == expected.shape
                    np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-7)
                    assert found.dtype == np.float32 or not found.size


def test_whole_model_is_cut(tmp_path):
    save(tmp_path, [state({n: [0, *s[:1] * 2] for n, s in SHAPES.items()}, r) | {"rows": None} for r in range(2)])
    loaded = load(tmp_path, 2, cut(2, 1))
    for replica, one in enumerate(loaded):
        check_same(one["fragments"][0]["reducer"]["residuals"]["w"], whole(replica, "residuals")["w"][4:])


def test_rows_are_asked_for_on_other_ranks(tmp_path):
    write(tmp_path, 2, 2)
    assert len(load(tmp_path, 4)) == 4
    for ranks in (1, 2, 8):
        text = the_one(load_errors(tmp_path, ranks))
        assert f"was written by 4 ranks with shards of a model, and {ranks} load it" in text
        assert "pass comm=mpicomp.torch.replicas(model) and rows=" in text


@pytest.mark.parametrize(
    ("rows", "found"), [({"w": [0, 8, 8]}, "'w' has 7 rows in it, and 8"), ({"other": [0, 2, 2]}, "'other' has 0 rows")]
)
def test_rows_of_another_model_are_refused(tmp_path, rows, found):
    write(tmp_path, 2, 1)
    assert f"is of another model: {found}" in the_one(load_errors(tmp_path, 1, rows))


def test_ranks_with_different_rows_are_refused(tmp_path):
    write(tmp_path, 2, 1)
    world = LocalWorld(2)
    asked = [caught(load_rounds(tmp_path, end.group, cut(2, rank))) for rank, end in enumerate(world.transports)]
    text = the_one(world.run(asked), DisagreementError)
    assert "'w'" in text
    assert "rows 0 to 4" in text
