"""Values of selections in eight, four or two bits: who carries them, and what becomes of the errors."""

import numpy as np
import oracle
import pytest
from mpicomp.kernels import sizes
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind, fitting
from mpicomp.compressors.wire import BITS, Wire, sparse_bytes
from mpicomp.errors import IncompatiblePairError, MessageError
from mpicomp.mpi.rounds import observe

CARRIERS = ["allgather", "hierarchical"]
NUMEL, RATIO = 2000, 0.3  # some blocks of 256, the last one not full


def gradients(step, ranks):
    rngs = [np.random.default_rng((step, rank)) for rank in range(ranks)]
    return [{"w": (10.0 ** (rank % 3) * rng.standard_t(2, NUMEL)).astype(np.float32)} for rank, rng in enumerate(rngs)]


@pytest.mark.parametrize("wire", BITS)
def test_few_bits_are_carried_whole_only(wire):
    assert fitting(mpicomp.TopK(wire=wire)) == CARRIERS
    assert set(fitting(mpicomp.TopK())) > set(CARRIERS)
    for other in sorted(set(fitting(mpicomp.TopK())) - set(CARRIERS)):
        text = (
            rf"TopK\(wire='{wire}'\): does not fit collective '{other}', which cuts messages or adds to them, whose "
            "values share scales here; use allgather or hierarchical"
        )
        with pytest.raises(IncompatiblePairError, match=text):
            bind(mpicomp.TopK(wire=wire), other)
        with pytest.raises(IncompatiblePairError, match=text):
            bind(mpicomp.TopK(wire=wire), f"hierarchical:{other}")


@pytest.mark.parametrize("collective", CARRIERS)
@pytest.mark.parametrize("wire", BITS)
def test_step_of_few_bits_matches_oracle(wire, collective):
    ranks = 2
    compressor = mpicomp.TopK(ratio=RATIO, wire=wire)
    world = Ranks(ranks, compressor, collective, hosts=[0, 1])
    arrays = gradients(0, ranks)
    means = world.reduce(arrays)
    expected = np.zeros(NUMEL)
    for array, left in zip(arrays, world.residuals("w"), strict=True):
        chosen = oracle.largest(array["w"], round(RATIO * NUMEL))
        sent = oracle.few_bits(array["w"][chosen], BITS[wire])
        expected[chosen] += sent / ranks
        kept = array["w"].astype(np.float64)
        kept[chosen] -= sent
        np.testing.assert_allclose(left, kept, rtol=0, atol=1e-6 * np.abs(sent).max())
    np.testing.assert_allclose(means[0]["w"], expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("scale", [np.nan, -1.0, np.inf])
def test_damaged_scales_are_one_error_on_all_ranks(scale):
    """They arrive so on all ranks that read them, of the last rank's message, and residuals are what they were."""
    world = Ranks(3, mpicomp.TopK(ratio=RATIO, wire="q4", indices="plain"), "allgather")
    world.reduce(gradients(0, 3))
    before = [residual.copy() for residual in world.residuals("w")]
    count = round(RATIO * NUMEL)
    end, size = 24 + sizes.code_bytes(count, 4), sparse_bytes(count, NUMEL, np.dtype(np.float32), Wire("q4"))

    def spoil(task):
        if task.recv is not None and task.operation == "allgatherv" and task.counts[-1] == size:
            task.recv[-size:][end + 8 : end + 12].view(np.float32)[:] = scale

    def outcome(rounds):
        try:
            return (yield from observe(rounds, after=spoil))
        except MessageError as error:
            return error

    steps = zip(world.reducers, gradients(1, 3), strict=True)
    outcomes = world.world.run([outcome(reducer.rounds(array)) for reducer, array in steps])
    assert {type(error) for error in outcomes} == {MessageError}
    texts = [f"{error}{error.__cause__}" for error in outcomes]
    wrong = "from rank 2: message: scales of values are negative, or no finite numbers"
    assert any(wrong in text for text in texts)
    np.testing.assert_array_equal(world.residuals("w"), before)
