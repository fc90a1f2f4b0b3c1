"""Sums within a bound: their error by exact fractions, their messages by a slow reader, and wrong arguments."""

from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from hypothesis.extra import numpy as hnp
from mpicomp.kernels.cpu import bounded_blocks as blocks

import mpicomp
from mpicomp.bounded.allreduce import bounded_rounds
from mpicomp.bounded.bounded_sum import grid_of
from mpicomp.errors import ArrayTypeError, ConfigurationError, DisagreementError, MessageError
from mpicomp.mpi import LocalWorld
from mpicomp.mpi.rounds import observe

ONES = np.ones(5, np.float32)
SURE = {4: 2**23, 8: 2**50}
"""Numbers up to so many times the bound have numbers of their dtype close enough."""


def run(calls, observed=lambda rank, rounds: rounds):
    """Return what each rank's call with its arguments returns."""
    world = LocalWorld(len(calls))
    given = {"array": ONES, "compressor": None, "error": 0.1, "op": "mean", "out": None}
    ends = enumerate(zip(calls, world.transports, strict=True))
    return world.run([observed(rank, bounded_rounds(**given | call, group=end.group)) for rank, (call, end) in ends])


def reduce(arrays, error, op="mean", outs=None, relative=False):
    """Return the result, which has the same bits on all ranks."""
    pairs = zip(arrays, outs or [None] * len(arrays), strict=True)
    results = run(
        [{"array": array, "error": error, "op": op, "out": out, "relative": relative} for array, out in pairs]
    )
    assert {(result.tobytes(), result.dtype, result.shape) for result in results} == {
        (results[0].tobytes(), arrays[0].dtype.newbyteorder("="), np.shape(arrays[0]))
    }
    return results[0]


def range_of(array):
    """Return the range of the finite numbers of an array, read one by one."""
    numbers = [float(number) for number in array.ravel() if np.isfinite(number)]
    return max(numbers) - min(numbers) if numbers else 0.0


def check(arrays, error, op="mean", relative=False):
    """Compare each element with the exact one: see `mpicomp.allreduce`."""
    with np.errstate(all="ignore"):
        result = reduce(arrays, error, op, relative=relative)
        if relative:
            error *= sum(map(range_of, arrays)) / (len(arrays) if op == "mean" else 1)
        ieee = np.sum(np.array(arrays, np.float64), axis=0)
    largest = Fraction(float(np.finfo(result.dtype).max))
    sure = SURE[result.itemsize] * Fraction(error) / (len(arrays) if op == "sum" else 1)
    for place in np.ndindex(result.shape):
        values, found = [float(array[place]) for array in arrays], float(result[place])
        if not np.isfinite(values).all():
            assert found == ieee[place] or (np.isnan(found) and np.isnan(ieee[place]))
            continue
        exact = sum(map(Fraction, values)) / (len(arrays) if op == "mean" else 1)
        if abs(exact) > largest:  # rounded down to the largest number where no spacing lies between
            spacing = largest - Fraction(float(np.nextafter(result.dtype.type(largest), result.dtype.type(0))))
            assert abs(found) == np.inf or (abs(found) == largest and abs(exact) - largest <= spacing)
            continue
        allowed = Fraction(error)
        if max(map(abs, values)) > sure:
            allowed += abs(Fraction(found) - Fraction(float(np.nextafter(result[place], result.dtype.type(0)))))
        assert abs(Fraction(found) - exact) <= allowed, (values, found, float(exact))


def with_infinities(rng, limits, rank):
    array = rng.normal(size=150)
    array[rng.integers(0, 150, 4)] = [np.inf, -np.inf, np.inf, -np.inf]
    array[7] = {1: np.inf, 2: -np.inf}.get(rank, 1)
    return array


def huge_and_tiny(rng, limits, rank):
    place = np.arange(150)
    return np.where(place % 2, np.where(place % 4 == 1, -1, 1) * (limits.max / 3), limits.tiny)


HOSTILE = {
    "constant": lambda rng, limits, rank: np.full(130, 0.7),
    "negative zeros": lambda rng, limits, rank: np.full(70, -0.0),
    "subnormal": lambda rng, limits, rank: limits.smallest_subnormal * rng.integers(-9, 9, 100),
    "huge and tiny": huge_and_tiny,
    "largest": lambda rng, limits, rank: np.full(65, limits.max) * (1 if rank % 3 else -1),
    "nan": lambda rng, limits, rank: np.where(rng.random(150) < 0.01, np.nan, rng.normal(size=150)),
    "infinite": with_infinities,
    "walk": lambda rng, limits, rank: np.cumsum(rng.normal(size=150)),
    "outliers": lambda rng, limits, rank: rng.normal(size=150) * 10.0 ** (12 * (rng.random(150) < 0.02)),
    "rank of large": lambda rng, limits, rank: rng.normal(size=100) * (1e7 if rank == 1 else 1),
    "one": lambda rng, limits, rank: np.array([rank - 0.3]),
    "empty": lambda rng, limits, rank: np.empty(0),
    "scalar": lambda rng, limits, rank: np.array(rank + 0.1),
}


def hostile(name, dtype, rank):
    return np.asarray(HOSTILE[name](np.random.default_rng([rank, len(name)]), np.finfo(dtype), rank)).astype(dtype)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("name", HOSTILE)
def test_sum_of_hostile_arrays_is_within_its_bound(name, dtype):
    for ranks in (1, 2, 3, 4):
        arrays = [hostile(name, dtype, rank) for rank in range(ranks)]
        for number, error in enumerate((0.01, 1e-6, 1e-12, 1e-37, 1e37)):
            check(arrays, error, ("mean", "sum")[(number + ranks) % 2])
        if ranks == 1:
            assert reduce(arrays, 0.5).tobytes() == arrays[0].tobytes()


@pytest.mark.parametrize("op", ["mean", "sum"])
@pytest.mark.parametrize("name", ["huge and tiny", "infinite", "rank of large", "empty", "scalar"])
def test_relative_bound_is_a_share_of_the_mean_range(name, op):
    for ranks in (1, 2, 3, 4):
        arrays = [hostile(name, np.float32, rank) for rank in range(ranks)]
        for error in (1, 1e-3, 1e-6):
            check(arrays, error, op, relative=True)


@pytest.mark.parametrize(
    ("array", "error", "text"),
    [
        (ONES, 2, "error must be a number from 1e-16 to 1.0, got 2"),
        (np.array([0, 1e-36], np.float32), 0.01, "error times the range of the arrays must be at least 1e-37"),
    ],
)
def test_relative_bound_that_cannot_be_held_is_refused(array, error, text):
    with pytest.raises(ConfigurationError, match=text) as raised:
        reduce([array] * 3, error, relative=True)
    assert "3 of 3 ranks raised" in raised.value.__notes__


@given(st.data())
def test_sum_of_drawn_arrays_is_within_its_bound(data):
    dtype = data.draw(st.sampled_from([np.float32, np.float64]))
    error = data.draw(st.floats(1e-37, 1e30))
    numbers = st.floats(width=8 * np.dtype(dtype).itemsize)
    few = data.draw(hnp.arrays(dtype, st.tuples(st.integers(2, 4), st.just(5)), elements=numbers))
    rng = np.random.default_rng(data.draw(st.integers(0, 1000)))
    with np.errstate(all="ignore"):
        near = rng.uniform(-100, 100, few.shape) * error
    places = rng.integers(0, 10, data.draw(st.integers(1, 150)))
    check(np.hstack([few, near.astype(dtype)])[:, places], error, data.draw(st.sampled_from(["mean", "sum"])))


def packed_words(array, error):
    words = np.zeros(blocks.bounded_words(array.size, array.itemsize), np.uint64)
    grid = grid_of(error, "mean", array.dtype, 4)
    return blocks.pack_bounded(array, grid.step, grid.limit, words)


def test_constant_and_smooth_fields_take_few_bits_and_noise_no_more_than_its_own():
    assert packed_words(np.full(6400, 3.0), 0.4) == 13 + 4  # a byte a block, and 4 in the first block
    rng = np.random.default_rng(0)
    smooth = np.sin(np.linspace(0, 100, 64_000)).astype(np.float32)
    assert packed_words(smooth, 1e-3) * 64 / smooth.size < 3
    noise = rng.uniform(-1, 1, 64_000).astype(np.float32)
    assert packed_words(noise, 5.2e-4) * 64 / noise.size < 11.2  # 11 bits, and a byte for each 64
    for array in (noise, smooth.astype(np.float64)):
        assert packed_words(array, 1e-37) * 8 < 1.005 * array.nbytes + 8


@pytest.mark.parametrize(
    "make",
    [
        lambda: np.arange(24, dtype=np.float32).reshape(4, 6)[::-1, ::2],
        lambda: np.asfortranarray(np.arange(24.0).reshape(2, 3, 4)),
        lambda: np.arange(200, dtype=">f4"),
        lambda: (np.arange(12) * (1 - 3j)).reshape(3, 4).T,
        lambda: np.float32(3.3),
        lambda: np.empty((0, 3)),
    ],
)
def test_shapes_and_kinds_come_out_as_they_went_in(make):
    arrays = [(make() * (rank + 1)).astype(make().dtype) for rank in range(3)]
    before = [array.tobytes() for array in arrays]
    difference = reduce(arrays, 0.01) - np.asarray(make()) * 2
    assert max(np.abs(difference.real).max(initial=0), np.abs(difference.imag).max(initial=0)) <= 0.01
    assert [array.tobytes() for array in arrays] == before


def test_result_is_written_to_out_and_to_the_array_itself():
    arrays = [np.random.default_rng(rank).normal(size=(20, 30)).astype(np.float32) for rank in range(3)]
    expected = reduce(arrays, 0.01).tobytes()
    strided = [np.zeros((30, 40), np.float32).T[::2] for _ in range(3)]
    assert reduce(arrays, 0.01, outs=strided).tobytes() == expected == strided[2].tobytes()
    assert reduce(arrays, 0.01, outs=arrays).tobytes() == expected == arrays[1].tobytes()


@pytest.mark.parametrize(
    ("settings", "error", "text"),
    [
        ({"error": 0}, ConfigurationError, "error must be a number from 1e-37 to 1e\\+290, got 0 "),
        ({"error": float("nan")}, ConfigurationError, "got nan"),
        ({"error": None, "out": ONES.copy()}, ConfigurationError, "out and relative need error="),
        ({"error": None, "op": "sum", "compressor": "topk"}, ConfigurationError, "op='sum' adds arrays without a code"),
        ({"op": "max"}, ConfigurationError, "op must be 'mean' or 'sum', got 'max'"),
        ({"compressor": "topk"}, ConfigurationError, "got compressor 'topk'; pass one"),
        ({"array": [1.0, 2.0]}, ArrayTypeError, "needs a NumPy array, got list"),
        ({"array": np.ones(5, np.float16)}, ArrayTypeError, "got float16; cast it first"),
        ({"out": np.ones(5)}, ArrayTypeError, "float32 and shape \\(5,\\), got one of float64 and shape \\(5,\\)"),
        ({"out": np.broadcast_to(np.float32(1), 5)}, ArrayTypeError, "got a read-only one of float32"),
    ],
)
def test_wrong_argument_of_one_rank_is_an_error_of_all(settings, error, text):
    with pytest.raises(error, match=text) as raised:
        run([{}, settings, {}])
    assert "3 of 3 ranks raised" in raised.value.__notes__
    assert "rank 1" in str(raised.value)


@pytest.mark.parametrize(
    ("other", "text"),
    [
        ({"error": 0.2}, "error must be the same on all ranks, got 0.1 on rank 0 and 0.2 on rank 2"),
        ({"relative": True}, "relative must be the same on all ranks, got False on rank 0 and True on rank 2"),
        ({"op": "sum"}, "op must be the same on all ranks, got mean on rank 0 and sum on rank 2"),
        ({"array": ONES.astype(float)}, "same dtype on all ranks, got float32 on rank 0 and float64 on rank 2"),
    ],
)
def test_ranks_that_differ_get_one_error_before_data_moves(other, text):
    operations = set()

    def noting(rank, rounds):
        return observe(rounds, before=lambda task: operations.add(task.operation))

    with pytest.raises(DisagreementError, match=f"allreduce: .*{text}"):
        run([{}, {}, other], noting)
    assert operations == {"allgatherv"}


def damaged_run(value, operation):
    """Return what each rank returns or raises if rank 1 receives a damaged message."""

    def after(task):
        if task.operation == operation and task.dtype == np.uint64:
            task.recv.view(np.uint8)[0] = value

    def outcome(rank, rounds):
        try:
            return (yield from observe(rounds, after=after if rank == 1 else None))
        except MessageError as error:
            return error

    arrays = [np.random.default_rng(rank).normal(size=1000).astype(np.float32) for rank in range(3)]
    return run([{"array": array, "error": 0.01} for array in arrays], outcome)


@pytest.mark.parametrize("value", [0, 32, 192, 193])
def test_damaged_message_to_an_owner_is_an_error_of_all(value):
    outcomes = damaged_run(value, "alltoallv")
    assert [str(outcome) for outcome in outcomes] == [
        "allreduce with a bound: some rank was sent a damaged message"
    ] * 3
    assert "from rank 0: the blocks of a message" in str(outcomes[1].__cause__)


def test_damaged_sum_is_an_error_of_the_rank_that_got_it():
    outcomes = damaged_run(255, "allgatherv")
    assert isinstance(outcomes[1], MessageError)
    assert all(isinstance(outcomes[rank], np.ndarray) for rank in (0, 2))


@given(st.integers(0, 300), st.sampled_from([4, 8]), st.binary(max_size=600))
def test_bytes_that_pass_the_check_are_read_within_bounds(count, itemsize, content):
    """Any bytes are refused, or read and added without touching what is not theirs."""
    size = -(-count // 64)
    heads = np.frombuffer(content[:size].ljust(size, b"\0"), np.uint8)
    lengths = [8 * itemsize if head == 192 else head % 64 for head in heads.tolist()]
    known = all(head == 192 or (head < 192 and head % 64 <= (31 if itemsize == 4 else 62)) for head in heads.tolist())
    words = np.zeros(-(-size // 8) + sum(lengths) + 2, np.uint64)
    words.view(np.uint8)[:size] = heads
    rest = np.frombuffer(content[size:][: 8 * sum(lengths)], np.uint8)
    words.view(np.uint8)[-(-size // 8) * 8 :][: rest.size] = rest
    message = words[:-2]
    assert blocks.check_bounded(message, count, itemsize) == known
    assert not blocks.check_bounded(words, count, itemsize)
    if size:
        assert not blocks.check_bounded(message[:-1], count, itemsize)
    if known:
        dtype = np.dtype(f"f{itemsize}")
        out = np.full(count + 2, 7, dtype)
        with np.errstate(all="ignore"):
            blocks.unpack_bounded(message, 0.5, out[:count])
        assert (out[count:] == 7).all()
        most = blocks.bounded_words(count, itemsize)
        total = np.full(most + 2, 7, np.uint64)
        starts = np.array([0, message.size, 2 * message.size])
        length = blocks.add_bounded(np.tile(message, 2), starts, count, 0.5, 2, total[:most].view(dtype))
        assert blocks.check_bounded(total[:length], count, itemsize)
        assert (total[most:] == 7).all()


@pytest.mark.parametrize("identical", [True, False])
@pytest.mark.parametrize("dtype", [np.float32, np.complex128])
def test_a_sum_without_a_bound_is_that_of_the_arrays(identical, dtype):
    world = LocalWorld(3, identical)
    arrays = [np.arange(12.0).reshape(3, 4).astype(dtype).T + rank for rank in range(3)]
    outs = [None, np.empty((4, 3), dtype), arrays[2]]
    rounds = [
        bounded_rounds(array, None, None, "sum", out, end.group)
        for array, out, end in zip(arrays, outs, world.transports, strict=True)
    ]
    expected = sum(arrays)
    results = world.run(rounds)
    assert results[1] is outs[1]
    assert results[2] is arrays[2]
    for result in results:
        np.testing.assert_array_equal(result, expected)


@pytest.mark.mpi
def test_a_sum_over_mpi(comm):
    array = np.full(5, comm.rank + 1.0, np.float32)
    result = mpicomp.allreduce(array, op="sum", comm=comm)
    assert result.tolist() == [comm.size * (comm.size + 1) / 2] * 5
    assert mpicomp.allreduce(array, op="sum", out=array) is array


@pytest.mark.mpi(min_size=2)
def test_sums_of_known_arrays_are_still_compared(comm):
    """Ranks that have added such arrays before send a digest that they have: it has to differ from another array's."""
    size = comm.size
    for number in range(3):  # the first one is not known
        for array in (np.full((2, 3), number + 1.0, np.float32), np.float64(number)):
            out = np.empty_like(array) if number == 2 else None
            assert (mpicomp.allreduce(array, op="sum", out=out) == size * array).all()
    mpicomp.allreduce(np.ones(3), op="sum")
    for other in (np.ones(4), np.ones((2, 3), np.float32), np.ones(3, np.int64)):
        with pytest.raises((DisagreementError, ArrayTypeError)):
            mpicomp.allreduce(other if comm.rank else np.ones(3), op="sum")
    with pytest.raises(DisagreementError):
        mpicomp.allreduce(np.ones(3), op="sum" if comm.rank else "mean", error=0.1)
    assert mpicomp.allreduce(np.ones(3), op="sum").tolist() == [size] * 3


@pytest.mark.mpi
@pytest.mark.parametrize("op", ["mean", "sum"])
def test_bounded_sum_over_mpi_has_the_bits_of_one_process(comm, op):
    rngs = [np.random.default_rng(rank) for rank in range(comm.size)]
    arrays = [np.cumsum(rng.normal(size=(50, 61)), axis=1).astype(np.float32) for rng in rngs]
    arrays[0][3, 5] = np.inf
    result = mpicomp.allreduce(arrays[comm.rank], error=1e-3, op=op, comm=comm)
    assert result.tobytes() == reduce(arrays, 1e-3, op).tobytes()
    assert mpicomp.allreduce(arrays[comm.rank], error=1e-3, op=op, out=arrays[comm.rank]) is arrays[comm.rank]
    assert arrays[comm.rank].tobytes() == result.tobytes()


@pytest.mark.mpi(min_size=2)
def test_ranks_with_and_without_a_bound_get_an_error(comm):
    with pytest.raises(DisagreementError):
        mpicomp.allreduce(ONES, error=0.1 if comm.rank else None, comm=comm)
    with pytest.raises(ArrayTypeError, match="on rank 1"):
        mpicomp.allreduce(ONES if comm.rank != 1 else ONES.astype(np.float16), error=0.1, comm=comm)
