import numpy as np
import pytest

SIZES = [0, 1, 63, 64, 65, 1000, 30_011]


def bits_of(words, size):
    return np.unpackbits(words.view(np.uint8), bitorder="little")[:size].astype(bool)


def test_votes_are_sign_bits(kernels, dtype):
    for size in SIZES:
        array = np.random.default_rng(size).normal(size=size).astype(dtype)
        array[::5] = 0
        words = np.full(-(-size // 64), 0xDEADBEEFDEADBEEF, np.uint64)
        kernels.pack_votes(array, words)
        np.testing.assert_array_equal(bits_of(words, size), array < 0)
        assert not bits_of(words, 64 * words.size)[size:].any()
        out = np.full(size, np.nan, dtype)
        kernels.unpack_votes(words, 0.1, out)
        np.testing.assert_array_equal(out, np.where(array < 0, -dtype(0.1), dtype(0.1)))


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5, 7, 8, 9, 31, 32, 33, 100, 4095, 4096])
def test_the_majority_of_votes_wins_and_ties_are_plus(kernels, ranks):
    rng = np.random.default_rng(ranks)
    likely = rng.choice([0.0, 0.1, 0.49, 0.5, 0.51, 0.9, 1.0], 200)  # among few ranks all counts occur
    negative = rng.random((ranks, 200)) < likely
    votes = np.zeros((ranks, 4), np.uint64)
    for rank in range(ranks):
        padded = np.concatenate([negative[rank], np.zeros(56, bool)])
        votes[rank] = np.packbits(padded, bitorder="little").view(np.uint64)
    out = np.full(4, 0xDEADBEEFDEADBEEF, np.uint64)
    kernels.majority(votes, out)
    minus = negative.sum(axis=0)
    np.testing.assert_array_equal(bits_of(out, 200), minus > ranks - minus)
    assert not bits_of(out, 256)[200:].any()
