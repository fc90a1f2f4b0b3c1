"""Values of selections in eight, four or two bits: who carries them, and what becomes of the errors."""

import numpy as np
import oracle
import pytest
from marks import slow
from mpicomp.kernels import sizes
from worlds import Ranks

import mpicomp
from mpicomp.collectives import bind, fitting
from mpicomp.compressors.wire_format import BITS, Wire, message_bytes
from mpicomp.errors import IncompatiblePairError, MessageError
from mpicomp.rounds import observe

CARRIERS = ["allgather", "parameter-server", "hierarchical"]
NUMEL, RATIO = 2000, 0.3  # some blocks of 256, the last one not full
WIRES = ["q4", slow("q8"), slow("q2")]


def gradients(step, ranks, dtype=np.float32):
    rngs = [np.random.default_rng((step, rank)) for rank in range(ranks)]
    return [{"w": (10.0 ** (rank % 3) * rng.standard_t(2, NUMEL)).astype(dtype)} for rank, rng in enumerate(rngs)]


@pytest.mark.parametrize("wire", BITS)
def test_who_carries_them(wire):
    assert fitting(mpicomp.TopK(wire=wire)) == CARRIERS
    assert set(fitting(mpicomp.TopK())) > set(CARRIERS)
    for other in sorted(set(fitting(mpicomp.TopK())) - set(CARRIERS)):
        text = (
            rf"TopK\(wire='{wire}'\): does not fit collective '{other}', which cuts messages or adds to them, whose "
            "values share scales here; use allgather, parameter-server or hierarchical"
        )
        with pytest.raises(IncompatiblePairError, match=text):
            bind(mpicomp.TopK(wire=wire), other)
        with pytest.raises(IncompatiblePairError, match=text):
            bind(mpicomp.TopK(wire=wire), f"hierarchical:{other}")


@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
@pytest.mark.parametrize("ranks", [2, 3, slow(4), 5])
@pytest.mark.parametrize("collective", CARRIERS)
@pytest.mark.parametrize("wire", WIRES)
def test_errors_stay_in_residuals(wire, collective, ranks, dtype):
    """Over some steps nothing is lost, and residuals stay below what one step brings, heavy tails or not."""
    hosts = [rank % 2 for rank in range(ranks)] if collective == "hierarchical" else 1
    few = Ranks(ranks, mpicomp.TopK(ratio=RATIO, wire=wire), collective, hosts=hosts)
    before = np.zeros(NUMEL)
    for step in range(6):
        given = gradients(step, ranks, dtype)
        means = few.reduce(given)
        assert all(own["w"].tobytes() == means[0]["w"].tobytes() for own in means)
        after = few.residual_sum("w")
        entered = before + sum(own["w"].astype(np.float64) for own in given)
        left = ranks * means[0]["w"].astype(np.float64) + after
        np.testing.assert_allclose(left, entered, rtol=0, atol=50 * np.finfo(dtype).eps * np.abs(entered).max())
        before = after
    assert any(np.any(own) for own in few.residuals("w"))
    assert np.square(after).sum() < np.square([own["w"] for own in given], dtype=np.float64).sum()


@pytest.mark.parametrize("collective", CARRIERS)
@pytest.mark.parametrize("wire", BITS)
def test_one_step_is_what_the_oracle_says(wire, collective):
    ranks = 2
    compressor = mpicomp.TopK(ratio=RATIO, wire=wire)
    world = Ranks(ranks, compressor, collective, hosts=[0, 1])
    given = gradients(0, ranks)
    means = world.reduce(given)
    expected = np.zeros(NUMEL)
    for own, left in zip(given, world.residuals("w"), strict=True):
        chosen = oracle.largest(own["w"], round(RATIO * NUMEL))
        sent = oracle.few_bits(own["w"][chosen], BITS[wire])
        expected[chosen] += sent / ranks
        kept = own["w"].astype(np.float64)
        kept[chosen] -= sent
        np.testing.assert_allclose(left, kept, rtol=0, atol=1e-6 * np.abs(sent).max())
    np.testing.assert_allclose(means[0]["w"], expected, rtol=1e-5, atol=1e-6 * np.abs(expected).max())


@pytest.mark.parametrize("wire", BITS)
def test_a_gain_tells_of_what_rounding_took(wire):
    few, exact = (Ranks(3, mpicomp.TopK(ratio=RATIO, wire=own), "allgather") for own in (wire, None))
    given = gradients(0, 3)
    gains = []
    for own in (few, exact):
        own.reduce(given)
        gains.append(own.reducers[0].last_step.buckets[0].gain)
    energy = sum(np.square(own["w"].astype(np.float64)).sum() for own in given)
    left = sum(np.square(own.astype(np.float64)).sum() for own in few.residuals("w"))
    assert gains[0] == pytest.approx(1 - left / energy, abs=1e-6)
    assert gains[0] < gains[1]


@pytest.mark.parametrize("scale", [np.nan, -1.0, np.inf])
@pytest.mark.parametrize("collective", ["allgather", "parameter-server"])
def test_damaged_scales_are_one_error_on_all_ranks(collective, scale):
    """They arrive so on all ranks that read them, of the last rank's message, and residuals are what they were."""
    ranks = Ranks(3, mpicomp.TopK(ratio=RATIO, wire="q4", indices="plain"), collective)
    ranks.reduce(gradients(0, 3))
    before = [own.copy() for own in ranks.residuals("w")]
    count = round(RATIO * NUMEL)
    end, size = 24 + sizes.code_bytes(count, 4), message_bytes(count, NUMEL, np.dtype(np.float32), Wire("q4"))

    def spoil(task):
        if task.recv is not None and task.operation in ("allgatherv", "gatherv") and task.counts[-1] == size:
            task.recv[-size:][end + 8 : end + 12].view(np.float32)[:] = scale

    def outcome(rounds):
        try:
            return (yield from observe(rounds, after=spoil))
        except MessageError as error:
            return error

    given = gradients(1, 3)
    outcomes = ranks.world.run([outcome(r.rounds(own)) for r, own in zip(ranks.reducers, given, strict=True)])
    assert {type(own) for own in outcomes} == {MessageError}
    told = [str(own) + str(own.__cause__) for own in outcomes]
    assert any("from rank 2: message: scales of values are negative, or no finite numbers" in own for own in told)
    for rank, own in enumerate(ranks.residuals("w")):
        np.testing.assert_array_equal(own, before[rank])
