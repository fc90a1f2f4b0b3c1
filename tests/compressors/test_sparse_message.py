import struct

import numpy as np
import oracle
import pytest
from mpicomp.kernels import cpu

from mpicomp.compressors.wire import (
    BITS,
    SHARING,
    Selection,
    Wire,
    capacity_bytes,
    compact,
    read_sparse,
    sparse_bytes,
    write_sparse,
)
from mpicomp.errors import ConfigurationError, MessageError
from mpicomp.workspace import Workspace

pytestmark = pytest.mark.quick

NUMEL = 5000
PLAIN = Wire()
WIRES = [Wire(values, indices) for values in (None, "fp16", "bf16", "signs") for indices in ("plain", "elias-fano")]
WIRES += [Wire("q8"), Wire("q4"), Wire("q4", "elias-fano"), Wire("q2", "elias-fano")]
DTYPES = [np.float32, np.float64]
GUARD = 64  # bytes around a message

wires = pytest.mark.parametrize("wire", WIRES, ids=[f"{wire.values or 'full'}-{wire.indices}" for wire in WIRES])
dtypes = pytest.mark.parametrize("dtype", DTYPES)


def selection_of(count, dtype, numel=NUMEL):
    rng = np.random.default_rng(count)
    indices = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
    return Selection(indices, rng.normal(size=count).astype(dtype))


def message(count=3, dtype=np.float32, wire=PLAIN):
    """Write a message between guards; give it, what was selected, and what was rounded away."""
    selection = selection_of(count, dtype)
    size = sparse_bytes(count, NUMEL, np.dtype(dtype), wire)
    memory = np.full(size + 2 * GUARD, 0xA5, np.uint8)
    rounding = write_sparse(memory[GUARD:-GUARD], selection, NUMEL, wire, flags=2, energy=1e4, kept=9e3)
    assert (memory[:GUARD] == 0xA5).all()
    assert (memory[-GUARD:] == 0xA5).all()
    return memory[GUARD:-GUARD], selection, rounding


def read(out, dtype=np.float32, numel=NUMEL):
    return read_sparse(out, numel, np.dtype(dtype), Workspace())


def rounded(values, wire):
    """What receivers see of values of ordinary size, in float64: NumPy's half, or arithmetic."""
    if wire is None:
        return values.astype(np.float64)
    if wire == "signs":
        magnitude = np.float32(np.abs(values.astype(np.float64)).mean()) if values.size else 0
        return np.copysign(np.float64(magnitude), values)
    if wire in BITS:
        return oracle.few_bits(values, BITS[wire])
    single = values.astype(np.float32)
    if wire == "fp16":
        return single.astype(np.float16).astype(np.float64)
    fraction, exponent = np.frexp(single.astype(np.float64))
    return np.ldexp(np.rint(fraction * 2**8), exponent - 8)


@wires
@dtypes
@pytest.mark.parametrize("count", [0, 1, 2, 3, 5, 1000, NUMEL])
def test_message_round_trip(count, dtype, wire):
    exact = selection_of(count, dtype)
    out, selection, rounding = message(count, dtype, wire)
    assert out.size % 8 == 0
    sparse = read(out, dtype)
    np.testing.assert_array_equal(sparse.selection.indices, exact.indices)
    np.testing.assert_array_equal(selection.indices, exact.indices)
    assert sparse.selection.values.dtype == dtype
    # Scales of few bits follow from sums, whose last bits depend on their order.
    np.testing.assert_allclose(
        sparse.selection.values, rounded(exact.values, wire.values), rtol=3e-7 if wire.values in BITS else 0
    )
    np.testing.assert_array_equal(selection.values, sparse.selection.values)
    assert (sparse.flags, sparse.energy) == (2, 1e4)
    expected = np.sum((exact.values.astype(np.float64) - sparse.selection.values.astype(np.float64)) ** 2)
    # That of signs follows from sums, which differ by little where magnitudes are alike.
    tolerance = {"rtol": 1e-6, "atol": 1e-12} if wire.values == "signs" else {"rtol": 1e-12}
    np.testing.assert_allclose(rounding, expected, **tolerance)
    if wire.values not in SHARING or count > 2:  # the mean of one magnitude is that, and two have a level each
        assert (rounding > 0) == (wire.values is not None and count > 0)
    assert sparse.lost == 1e3 + rounding


@pytest.mark.parametrize("numel", [1, 2, 63, 64, 65, 300, 1000])
def test_capacity_holds_all_shorter_messages(numel):
    for wire in WIRES:
        longest = 0
        for count in range(numel + 1):
            longest = max(longest, sparse_bytes(count, numel, np.dtype(np.float32), wire))
            assert longest <= capacity_bytes(count, numel, np.dtype(np.float32), wire) <= longest + 16


@wires
@dtypes
def test_message_lost_is_the_energy_not_sent(dtype, wire):
    rng = np.random.default_rng(0)
    array = rng.normal(size=NUMEL).astype(dtype)
    array[7] = 1e6  # saturates in fp16
    indices = np.flatnonzero(np.abs(array) > 1.5).astype(np.uint32)
    selection = Selection(indices, array[indices])
    out = np.empty(sparse_bytes(indices.size, NUMEL, array.dtype, wire), np.uint8)
    write_sparse(out, selection, NUMEL, wire, 0, cpu.energy(array), cpu.energy(selection.values))
    sparse = read(out, dtype)
    residual = array.astype(np.float64)
    residual[sparse.selection.indices] -= sparse.selection.values
    # Energies near 1e12 are subtracted where the large element is sent as it is.
    np.testing.assert_allclose(sparse.lost, residual @ residual, rtol=1e-9, atol=1e-2)


def test_message_lost_is_never_negative_and_keeps_nan():
    out = np.empty(sparse_bytes(0, 1, np.dtype(np.float32), PLAIN), np.uint8)
    for energy, kept, lost in [(1.0, 1.0000001, 0.0), (np.nan, np.nan, np.nan), (np.inf, np.inf, np.nan)]:
        write_sparse(out, selection_of(0, np.float32), 1, PLAIN, 1, energy, kept)
        np.testing.assert_equal(read(out, numel=1).lost, lost)


@pytest.mark.parametrize("values", ["fp16", "bf16"])
def test_message_of_16_bits_keeps_nan_and_infinity(values):
    wire = Wire(values)
    selection = Selection(np.arange(3, dtype=np.uint32), np.array([np.nan, np.inf, -np.inf], np.float32))
    out = np.empty(sparse_bytes(3, 3, np.dtype(np.float32), wire), np.uint8)
    assert np.isnan(write_sparse(out, selection, 3, wire, 1, np.nan, np.nan))
    np.testing.assert_array_equal(read(out, numel=3).selection.values, [np.nan, np.inf, -np.inf])


def test_message_parts_in_full_are_views():
    out, _, _ = message(5)
    sparse = read(out)
    assert np.shares_memory(sparse.selection.indices, out)
    assert np.shares_memory(sparse.selection.values, out)


def test_message_bytes_are_those_of_the_table():
    """Each message by hand: header, values padded to 8 bytes, indices padded to 8 bytes."""
    header = {
        Wire(None, "plain"): "02010101",
        Wire("fp16", "plain"): "02010301",
        Wire("bf16", "elias-fano"): "02010402",
        Wire("signs", "plain"): "02010501",
        Wire("q8", "plain"): "02010601",
        Wire("q4", "plain"): "02010701",
        Wire("q2", "plain"): "02010801",
    }
    values = {
        None: struct.pack("<f4x", 1),
        "fp16": struct.pack("<e6x", 1),
        "bf16": struct.pack("<f4x", 1)[2:] + b"\0\0",
        "signs": struct.pack("<Qf4x", 0, 1),
        "q8": struct.pack("<Qff", 0, 1, 0),
        "q4": struct.pack("<Qff", 0, 1, 0),
        "q2": struct.pack("<Qff", 0, 1, 0),
    }
    # 258 below 1024 has 10 low bits: none is left for its high part, so the bitmap is one 1.
    indices = {"plain": struct.pack("<I4x", 258), "elias-fano": struct.pack("<QQ", 258, 1)}
    for wire, start in header.items():
        out = np.full(sparse_bytes(1, 1024, np.dtype(np.float32), wire), 0xFF, np.uint8)
        selection = Selection(np.array([258], np.uint32), np.array([1], np.float32))
        assert write_sparse(out, selection, 1024, wire, 1, 4.0, 3.0) == 0
        expected = bytes.fromhex(start) + struct.pack("<Idd", 1, 4.0, 1.0) + values[wire.values] + indices[wire.indices]
        assert out.tobytes() == expected


@pytest.mark.parametrize("indices", ["plain", "elias-fano"])
@pytest.mark.parametrize(("place", "index"), [(2, NUMEL), (2, 2**32 - 1), (1, 0), (0, NUMEL - 1)])
def test_message_with_wrong_indices_is_refused(indices, place, index):
    wire = Wire(None, indices)
    selection = Selection(np.array([0, 10, 20], np.uint32), np.ones(3, np.float32))
    selection.indices[place] = index
    out = np.empty(sparse_bytes(3, NUMEL, np.dtype(np.float32), wire), np.uint8)
    write_sparse(out, selection, NUMEL, wire, 0, 3.0, 3.0)
    with pytest.raises(MessageError, match=f"indices do not ascend below {NUMEL}"):
        read(out)


@pytest.mark.parametrize(
    ("place", "value", "text"),
    [
        (0, 9, "version must be 2, got 9"),
        (0, 1, "version must be 2, got 1; run one mpicomp on all ranks"),
        (2, 0, "values are stored in an unknown way, 0"),
        (2, 2, "values must be float32 or have at most 16 bits, got float64"),
        (2, 9, "values are stored in an unknown way, 9"),
        (2, 3, "3 values make 48 bytes, got 56"),
        (3, 0, "indices are stored in an unknown way, 0"),
        (3, 3, "indices are stored in an unknown way, 3"),
        (4, 200, "200 values make"),
        (7, 255, f"values do not come from {NUMEL} elements"),
    ],
)
def test_message_with_a_corrupted_header_is_refused(place, value, text):
    out, _, _ = message()
    out[place] = value
    with pytest.raises(MessageError, match=text):
        read(out)


@pytest.mark.parametrize("length", [0, 8, 23])
def test_message_that_is_torn_is_refused(length):
    with pytest.raises(MessageError, match="at least 24 bytes"):
        read(message()[0][:length])
    with pytest.raises(MessageError, match="values make"):
        read(message()[0][:32])


@pytest.mark.parametrize("numel", [1, 63, 64, 1000, 10**6, 25_600_000, 2**32 - 1])
def test_compact_codes_indices_that_become_shorter(numel):
    for count in {0, 1, 63, 64, 1000, numel // 1000, numel // 100, numel // 2, numel}:
        if count <= min(numel, 2**32 - 1):
            coded = compact(count, numel) == "elias-fano"
            assert coded == (count >= 64 and cpu.index_bytes(count, numel) <= 0.75 * 4 * count)
            if coded:
                sizes = [
                    sparse_bytes(count, numel, np.dtype(np.float32), Wire(None, w)) for w in ("plain", "elias-fano")
                ]
                assert sizes[1] < sizes[0]


@dtypes
@pytest.mark.parametrize("values", BITS)
@pytest.mark.parametrize("count", [255, 256, 257, 1024])
@pytest.mark.parametrize("scale", [np.nan, np.inf, -1.0])
def test_message_with_impossible_scales_is_refused(values, count, scale, dtype):
    out, _, _ = message(count, dtype, Wire(values))
    end = 24 + 8 * -(-count * BITS[values] // 64)
    for place in range(-(-count // 256)):
        damaged = out.copy()
        damaged[end + 8 * place : end + 8 * place + 4].view(np.float32)[:] = scale
        with pytest.raises(MessageError, match="scales of values are negative, or no finite numbers"):
            read(damaged, dtype)
        damaged[1] |= 1  # somebody's elements are not finite, and that is what the header says
        assert read(damaged, dtype).selection.values.size == count


@pytest.mark.parametrize("values", BITS)
def test_message_in_few_bits_reads_infinity_as_nan(values):
    selection = selection_of(600, np.float32)
    selection.values[300] = np.inf
    out = np.empty(sparse_bytes(600, NUMEL, np.dtype(np.float32), Wire(values)), np.uint8)
    assert np.isnan(write_sparse(out, selection, NUMEL, Wire(values), 0, np.nan, np.nan, finite=False))
    assert np.flatnonzero(np.isnan(read(out).selection.values)).tolist() == list(range(256, 512))


def test_wire_with_a_bad_setting_is_refused():
    with pytest.raises(ConfigurationError, match=r"values must be None, 'fp16', .* 'q4' or 'q2', got 'fp8'"):
        Wire("fp8")
    with pytest.raises(ConfigurationError, match="indices must be 'plain' or 'elias-fano', got 'rice'"):
        Wire(None, "rice")


def test_arrays_that_do_not_fit_are_an_error_of_the_caller():
    out = np.empty(sparse_bytes(3, NUMEL, np.dtype(np.float32), PLAIN), np.uint8)
    with pytest.raises(ValueError, match="the message has 56 bytes, out has 48"):
        write_sparse(out[:48], selection_of(3, np.float32), NUMEL, PLAIN, 0, 1.0, 1.0)
    with pytest.raises(ValueError, match="2 indices do not fit 3 values"):
        write_sparse(out, Selection(np.arange(2, dtype=np.uint32), np.ones(3, np.float32)), NUMEL, PLAIN, 0, 1.0, 1.0)
