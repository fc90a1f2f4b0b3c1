import numpy as np
import oracle
import pytest
from lockstep import gradients, run
from marks import slow
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind, variants
from mpicomp.errors import NonFiniteError
from mpicomp.rounds import Group

TIGHT = {"rtol": 1e-11, "atol": 1e-13}
HEADER = 24  # bytes


def drawn(ranks, numel, steps, seed=0):
    """Gradients that have something in common."""
    rng = np.random.default_rng(seed)
    for _ in range(steps):
        common = rng.standard_t(3, numel)
        yield [common + rng.laplace(size=numel) for _ in range(ranks)]


@pytest.mark.parametrize("ranks", [1, 2, 3, 5, 8])
@pytest.mark.parametrize("numel", [1, 3, 64, 1000])
def test_with_feedback_it_is_what_the_oracle_says(ranks, numel):
    together = Ranks(ranks, mpicomp.OneBit(block=64), "two-phase")
    residuals = [np.zeros(numel) for _ in range(ranks)]
    for arrays in drawn(ranks, numel, steps=5):
        mean, residuals = oracle.two_phase_step(arrays, residuals, block=64)
        for own in together.reduce([{"w": array} for array in arrays]):
            np.testing.assert_allclose(own["w"], mean, **TIGHT)
        for held, residual in zip(together.residuals("w"), residuals, strict=True):
            np.testing.assert_allclose(held, residual, **TIGHT)


@pytest.mark.slow
@pytest.mark.parametrize("ranks", [2, slow(1), slow(4), slow(8)])
def test_what_is_kept_back_stays_bounded(ranks):
    """A thousand steps: the residuals' energy settles at a small multiple of the gradients'."""
    numel = 512
    together = Ranks(ranks, mpicomp.OneBit(block=64), "two-phase")
    put_in, delivered, energies = np.zeros(numel), np.zeros(numel), []
    for step, arrays in enumerate(drawn(ranks, numel, steps=1000)):
        mean = together.reduce([{"w": array.astype(np.float32)} for array in arrays])[0]["w"]
        put_in += np.sum(arrays, axis=0) / ranks
        delivered += mean
        if step % 100 == 99:
            energies.append(sum(np.square(own).sum() for own in together.residuals("w")))
    gradient = sum(np.square(array).sum() for array in arrays)
    assert max(energies) < 20 * gradient
    assert np.mean(energies[5:]) < 1.5 * np.mean(energies[1:5])
    # What a thousand steps have delivered is what was put in, but for what is still kept back.
    left = together.residual_sum("w") / ranks
    np.testing.assert_allclose(delivered + left, put_in, rtol=0, atol=1e-3 * np.abs(put_in).max())
    assert np.square(left).sum() < 0.05 * np.square(put_in).sum()


def test_an_owner_keeps_nothing_but_the_second_error():
    """What is packed exactly by the owner leaves nothing with it, however badly others have packed theirs."""
    ranks, numel = 4, 256
    rng = np.random.default_rng(1)
    arrays = [rng.laplace(size=numel) for _ in range(ranks)]
    owned = slice(64, 128)
    # Rank 1 has just what makes its part of the mean one magnitude.
    others = sum(oracle.scaled_signs(array[owned], 64) for rank, array in enumerate(arrays) if rank != 1)
    arrays[1][owned] = 8 * np.where(rng.random(64) < 0.5, -1, 1) - others
    outcome = run(mpicomp.OneBit(), "two-phase", arrays)
    np.testing.assert_allclose(outcome.results[0].mean[owned], (arrays[1][owned] + others) / 4, rtol=1e-6)
    np.testing.assert_allclose(outcome.results[1].sent[owned], arrays[1][owned], atol=1e-6)
    assert np.abs(outcome.results[0].sent[owned] - arrays[0][owned]).max() > 0.1


@pytest.mark.parametrize(("numel", "ranks"), [(1_000_000, 8), (1000, 3), (2, 5)])
def test_two_bits_an_element_leave_a_rank(numel, ranks):
    compressor = mpicomp.OneBit()
    scheme = bind(compressor, "two-phase")
    parts = [numel // ranks + (rank < numel % ranks) for rank in range(ranks)]
    counts = [HEADER + compressor.packed_bytes(part) for part in parts]
    for rank in range(ranks):
        group = Group(rank, ranks)
        tasks = scheme.rounds(numel, np.dtype(np.float32), group)
        assert [(task.operation, list(task.counts)) for task in tasks] == [
            ("alltoallv", counts),
            ("allgatherv", counts),
        ]
        assert [task.sent_bytes(group) for task in tasks] == [sum(counts) - counts[rank], counts[rank]]
        wire = sum(task.wire_bytes(group) for task in tasks)
        if numel > 10_000:
            assert wire / numel < 1.05 * 2 / 8


def test_sums_beyond_the_largest_number_are_seen():
    """No rank holds anything that is not finite, and still the owner's rest would be."""
    arrays = [np.full(100, 3e38, np.float32) for _ in range(4)]
    for array in arrays:
        array[::2] = 1e30
    results = run(mpicomp.OneBit(), "two-phase", arrays).results
    finite = all(np.isfinite(own - result.sent).all() for own, result in zip(arrays, results, strict=True))
    assert finite != results[0].nonfinite
    assert len({result.nonfinite for result in results}) == 1


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_large_numbers_wait_for_their_turn(dtype):
    together = Ranks(2, "onebit", "two-phase")
    largest = 1e300 if dtype == np.float64 else 1e30
    gradient = np.array([largest, -1.0, 2.0], dtype)
    mean = together.reduce([{"w": gradient}] * 2)[0]["w"]
    assert np.isfinite(mean).all()
    for own in together.residuals("w"):
        assert np.isfinite(own).all()


@pytest.mark.parametrize("policy", ["raise", "skip", "pass"])
def test_bad_gradients(policy):
    together = Ranks(3, "onebit", "two-phase", nonfinite=policy)
    good = gradients(3, 300, np.float32)
    together.reduce([{"w": array} for array in good])
    before = together.residuals("w")
    bad = [array.copy() for array in good]
    bad[2][250] = np.nan
    if policy == "raise":
        with pytest.raises(NonFiniteError):
            together.reduce([{"w": array} for array in bad])
    else:
        mean = together.reduce([{"w": array} for array in bad])[0]["w"]
        assert np.isnan(mean).any() == (policy == "pass")
    if policy != "pass":
        for held, own in zip(together.residuals("w"), before, strict=True):
            assert held.tobytes() == own.tobytes()
    assert all(np.isfinite(held).all() for held in together.residuals("w"))
    assert np.isfinite(together.reduce([{"w": array} for array in good])[0]["w"]).all()


def test_several_dtypes_and_empty_arrays():
    together = Ranks(3, "onebit", "two-phase")
    rng = np.random.default_rng(0)
    for _ in range(3):
        arrays = [
            {
                "half": rng.normal(size=(5, 7)).astype(np.float16),
                "none": np.zeros((0, 3), np.float32),
                "double": rng.normal(size=11),
            }
            for _ in range(3)
        ]
        means = together.reduce(arrays)
        for own in means:
            for name, array in arrays[0].items():
                assert (own[name].dtype, own[name].shape) == (array.dtype, array.shape)
                assert own[name].tobytes() == means[0][name].tobytes()


def test_auto_chooses_among_it_and_the_dense_ones():
    names = variants(mpicomp.OneBit())
    assert names[0] == "two-phase"
    assert "hierarchical:two-phase" in names


def batch(rank, step):
    return np.random.default_rng([rank, step]).laplace(size=5000).astype(np.float32)


@pytest.mark.mpi
def test_over_mpi_it_is_the_same_as_in_one_process(comm):
    reducer = mpicomp.Reducer(mpicomp.OneBit(), "two-phase", comm=comm)
    together = Ranks(comm.size, mpicomp.OneBit(), "two-phase")
    for step in range(5):
        mean = reducer.reduce({"w": batch(comm.rank, step)})["w"]
        expected = together.reduce([{"w": batch(rank, step)} for rank in range(comm.size)])[comm.rank]["w"]
        assert mean.tobytes() == expected.tobytes()
        assert reducer.residual("w").tobytes() == together.residuals("w")[comm.rank].tobytes()
    reducer.close()


@pytest.mark.mpi
def test_auto_over_mpi(comm):
    reducer = mpicomp.Reducer(mpicomp.OneBit(), comm=comm, policy={"warmup": 0})
    for step in range(20):
        mean = reducer.reduce({"w": batch(comm.rank, step)})["w"]
        everyones = comm.allgather(mean.tobytes())
        assert everyones.count(everyones[0]) == comm.size
    reducer.close()
