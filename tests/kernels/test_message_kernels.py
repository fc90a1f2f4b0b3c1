import struct
import warnings

import numpy as np
import pytest
from mpicomp.kernels import cpu


@pytest.mark.parametrize("finite", [True, False])
@pytest.mark.parametrize(
    ("energy", "kept", "rounding", "lost"),
    [
        (5.0, 3.0, 0.25, 2.25),
        (3.0, 3.0 + 1e-9, 0.25, 0.25),
        (0.0, 0.0, 0.0, 0.0),
        (np.inf, 1.0, 0.5, np.inf),
        (np.inf, np.inf, 0.5, np.nan),
        (np.nan, 1.0, 0.5, np.nan),
        (1.0, np.nan, 0.0, np.nan),
    ],
)
def test_the_header_is_what_struct_packs(finite, energy, kept, rounding, lost):
    message = np.full(40, 7, np.uint8)
    lead = 2**63 + 2**40 + 3
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu.write_header(message, lead, finite, np.float64(energy), np.float64(kept), rounding)
    word, first, second = struct.unpack("<Qdd", message[:24].tobytes())
    assert word == lead + (0 if finite else 256)
    np.testing.assert_array_equal([first, second], [energy, lost])
    assert (message[24:] == 7).all()


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("size", [0, 1, 1000])
def test_values_stand_for_their_norm(dtype, size):
    values = np.random.default_rng(size).laplace(size=size).astype(dtype)
    alone, told = np.zeros(24, np.uint8), np.zeros(24, np.uint8)
    cpu.write_header(alone, 5, True, 1e4, cpu.energy(values), 0.25)
    cpu.write_header(told, 5, True, 1e4, values, 0.25)
    np.testing.assert_array_equal(told, alone)
    cpu.write_header(told, 5, True, 1e4, np.float64(cpu.energy(values)).reshape(()), 0.25)
    np.testing.assert_array_equal(told, alone)


def test_a_bit_that_is_set_stays_set():
    message = np.empty(24, np.uint8)
    for finite in (True, False):
        cpu.write_header(message, 256 + 5, finite, 1.0, 1.0, 0.0)
        assert message[:8].view(np.uint64)[0] == 256 + 5


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_the_tail_is_numbers(dtype):
    out = np.empty(4, dtype)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        cpu.write_tail(out, np.True_, False, 1e300, 0.1)
        assert out.tolist() == [0, 0, np.inf if dtype == np.float32 else 1e300, dtype(0.1)]
        cpu.write_tail(out, False, True, np.nan, -np.inf)
    np.testing.assert_array_equal(out, np.array([1, 1, np.nan, -np.inf], dtype))


def laid_out(rng, counts, stored, numel):
    """Give one array of bytes with all selections, where their parts are, and the selections themselves."""
    parts, values_at, indices_at, selections = [], [], [], []
    size = 0
    for count in counts:
        indices = np.sort(rng.choice(numel, count, replace=False)).astype(np.uint32)
        if stored == "bf16":
            bits = (rng.normal(size=count).astype(np.float32).view(np.uint32) >> 16).astype(np.uint16)
            raw, values = bits, (bits.astype(np.uint32) << 16).view(np.float32)
        else:
            raw = values = rng.normal(size=count).astype("float16" if stored == "fp16" else stored)
        padded = np.zeros(-(-raw.nbytes // 8) * 8, np.uint8)
        padded[: raw.nbytes] = raw.view(np.uint8)
        values_at.append(size + 24)
        indices_at.append(size + 24 + padded.size)
        parts += [np.zeros(24, np.uint8), padded, indices.view(np.uint8), np.zeros(-indices.nbytes % 8, np.uint8)]
        size = sum(part.size for part in parts)
        selections.append((indices, values))
    return np.concatenate(parts), values_at, indices_at, selections


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("stored", ["as out", "fp16", "bf16"])
@pytest.mark.parametrize("counts", [(), (0,), (100,), (5, 0, 99), (7, 7, 7)])
def test_selections_are_added_in_their_order(dtype, stored, counts):
    rng, numel = np.random.default_rng(len(counts)), 120
    stored = np.dtype(dtype).name if stored == "as out" else stored
    messages, values_at, indices_at, selections = (
        laid_out(rng, counts, stored, numel) if counts else (np.zeros(8, np.uint8), [], [], [])
    )
    out = rng.normal(size=numel).astype(dtype)
    expected = out.copy()
    for indices, values in selections:
        expected[indices] += dtype(1 / 3) * values.astype(dtype)
    assert cpu.sparse_add(messages, values_at, messages, indices_at, counts, stored, 1 / 3, out)
    np.testing.assert_array_equal(out, expected)


@pytest.mark.parametrize("wrong", [[3, 3], [5, 2], [0, 10], [9, 2**32 - 1]])
def test_indices_that_do_not_ascend_below_the_size(wrong):
    indices = np.array([1, 2, *wrong], np.uint32)
    values = np.ones(4, np.float32).view(np.uint8)
    memory = np.zeros(12, np.float32)
    assert not cpu.sparse_add(values, (0, 8), indices, (0, 8), (2, 2), "float32", 1.0, memory[1:11])
    assert memory[0] == memory[11] == 0


@pytest.mark.parametrize("right", [True, np.True_, False, np.False_])
def test_what_was_wrong_before_stays_wrong(right):
    values, indices, out = np.ones(2, np.float32).view(np.uint8), np.array([0, 2], np.uint32), np.zeros(3, np.float32)
    assert cpu.sparse_add(values, (0,), indices, (0,), (2,), "float32", 1.0, out, right) is bool(right)
    assert cpu.sparse_add(values, (), indices, (), (), "float32", 1.0, out, right) is bool(right)


@pytest.mark.parametrize("stored", ["float64", "int8"])
def test_values_of_another_dtype_are_refused(stored):
    nothing = np.empty(0, np.uint8)
    with pytest.raises(ValueError, match=f"stored as float32, fp16 or bf16, got '{stored}'"):
        cpu.sparse_add(nothing, (), nothing, (), (), stored, 1.0, np.empty(1, np.float32))
