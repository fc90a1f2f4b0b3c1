"""Mutated messages and files: an error of mpicomp or a result of the right shape, and never a byte out of bounds."""

import numpy as np
import pytest
from faults import fuzz
from faults.fence import Fence
from faults.messages import Case
from lockstep import drive
from mpicomp.kernels import cpu

import mpicomp
from mpicomp.collectives import Context, bind
from mpicomp.collectives.scheme import check_counts
from mpicomp.errors import MessageError
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import Group
from mpicomp.policies.surveys import Spectra, SpectrumSurvey
from mpicomp.testing import mean_of
from mpicomp.testing.examples import accumulated

LIMIT_S = 600


def total(done):
    return sum(report["decoded"] + report["refused"] for report in done)


@pytest.mark.timeout(LIMIT_S)
def test_every_decoder_survives_some_mutations():
    """The slow ones and the command send more."""
    done, faults = fuzz.fuzz(20, 1)
    assert faults == []
    assert len(done) > 80
    assert total(done) == 20 * len(done)
    assert all(report["decoded"] > 0 for report in done if "allgather" in report["decoder"])
    assert sum(report["refused"] for report in done) > 200


@pytest.mark.slow
@pytest.mark.timeout(3 * LIMIT_S)
@pytest.mark.parametrize(("patterns", "messages"), [(["exchange/*"], 100), ([], 3000)], ids=["exchanges", "decoders"])
def test_mutations_touch_no_index_out_of_bounds(patterns, messages, monkeypatch, tmp_path):
    monkeypatch.setenv("NUMBA_BOUNDSCHECK", "1")
    monkeypatch.setenv("NUMBA_CACHE_DIR", str(tmp_path))
    done, faults = fuzz.fuzz(messages, 2, patterns)
    assert faults == []
    assert total(done) == messages * len(done) > 0


@pytest.mark.parametrize("decode", [lambda m: {}[7], lambda m: bytearray(1 << 50)], ids=["exception", "memory"])
def test_fuzz_reports_faults_of_a_decoder(decode):
    [*faults, counts] = fuzz.decode_mutations("x", lambda rng, fence: Case(b"12345678", decode), 5, 0, Fence())
    assert len(faults) == counts["faults"] == 5
    assert faults[3]["fault"] == "x, message 3 of seed 0"


# What it has found, one by one.


def first_of(compressor, collective, answers, numel=40, ranks=2):
    """Run an exchange of the first of some ranks, whose rounds are answered by these functions of what they ask."""
    scheme, replies = bind(compressor, collective), iter(answers)

    def answer(task):
        task.recv[:] = next(replies)(task)
        return task.recv

    array = np.random.default_rng(0).normal(size=numel).astype(np.float32)
    return drive(scheme.exchange(accumulated(array), Context(Group(0, ranks))), answer)


@pytest.mark.parametrize("count", [-1, 41, 2**31, 2**63 - 1, -(2**63)])
def test_false_count_is_one_error_before_allocation(count):
    with pytest.raises(MessageError, match="allgather: a damaged number") as raised:
        first_of(mpicomp.Threshold(limit=1.5), "allgather", [lambda task: [task.send[0], count]])
    assert str(raised.value.__cause__) == (
        f"allgather: from rank 1: a number of elements must be from 0 to 40, got {count}"
    )


def test_rank_whose_number_comes_back_changed_raises():
    assert check_counts("x", np.array([3, 4]), 0, 9, (1, 4)) == [3, 4]
    with pytest.raises(MessageError) as raised:
        check_counts("x", [3, 4], 0, 9, (0, 2))
    assert str(raised.value.__cause__) == "x: rank 0 has sent the number 2 and received 3"


def test_oktopk_finishes_its_rounds_before_it_raises():
    """Only this rank has received what is wrong: it says so in its next message, and all raise."""

    def worlds(count):
        world = LocalWorld(2)
        scheme = bind(mpicomp.TopK(ratio=0.2), "oktopk")
        arrays = [np.random.default_rng(rank).normal(size=40).astype(np.float32) for rank in range(2)]

        def first():
            exchange, reply = scheme.exchange(accumulated(arrays[0]), Context(world.transports[0].group)), None
            while True:
                try:
                    asked = exchange.send(reply)
                except StopIteration as stop:
                    return stop.value
                reply = yield asked
                if asked.operation == "alltoallv" and asked.dtype == np.int64:
                    reply[3] = count

        runs = [first(), scheme.exchange(accumulated(arrays[1]), Context(world.transports[1].group))]
        return world.run(runs)

    assert np.isfinite(mean_of(worlds(8)[0], np.empty(40, np.float32))).all()
    with pytest.raises(MessageError, match="oktopk: some rank was sent a damaged message") as raised:
        worlds(2**40)
    assert str(raised.value.__cause__) == (
        "oktopk: from rank 1: a number of elements must be from 0 to 40, got 1099511627776"
    )


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_magnitude_of_more_elements_than_there_are_is_zero(dtype):
    """It read in front of its counters until it met something large."""
    array = np.array([1, -2, 3], dtype)
    assert cpu.kth_magnitude(array, 3) == cpu.magnitude_bits(1.0, array.dtype)
    assert cpu.kth_magnitude(array, 2**40) == 0


@pytest.mark.parametrize("name", ["onebit", "qsgd", "uniform"])
@pytest.mark.parametrize("size", [0, 8, -8, 1])
def test_packed_message_of_another_length_is_refused(name, size):
    compressor, array = mpicomp.get_compressor(name), np.ones(200, np.float32)
    length = compressor.packed_bytes(200)
    message = np.zeros(size + length if size else 0, np.uint8)
    for act in (lambda: compressor.unpack(message, array), lambda: compressor.unpack_add(message, 1.0, array)):
        with pytest.raises(MessageError, match=f"{name}: 200 elements are packed into {length} bytes, got"):
            act()


@pytest.mark.parametrize("first", [-1, 2**30, np.nan, np.inf, 0.5])
def test_spectrum_of_impossible_bins_is_refused(first):
    surveys = SpectrumSurvey().measure(np.ones(9, np.float32), None, [4, 5], 0).reshape(1, -1).repeat(2, axis=0)
    assert Spectra([4, 5], surveys).energies.tolist() == [8, 10]
    surveys[1, surveys.shape[1] // 2] = first
    with pytest.raises(MessageError, match="survey: from rank 1: bins must begin at one from 0 to"):
        Spectra([4, 5], surveys)
