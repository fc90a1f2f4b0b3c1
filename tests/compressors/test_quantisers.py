"""Quantisers that pack an array, whole or in the parts of a bucket, and votes."""

import math

import numpy as np
import oracle
import pytest
from lockstep import run
from marks import slow
from worlds import Ranks

from mpicomp import QSGD, MaxNorm, OneBit, SignSGD, TernGrad, Uniform
from mpicomp.compressors.kinds import packers

NAMES, SIZES = ["wide.weight", "wide.bias", "narrow.weight", "nothing"], [300, 7, 200, 0]
NUMEL = sum(SIZES)


def packed(compressor, array, key=0):
    sent = np.empty_like(array)
    lost = compressor.pack(array, np.empty(compressor.packed_bytes(array.size), np.uint8), sent, key)
    return sent, lost


@pytest.mark.parametrize("bits", [2, 3, 4])
@pytest.mark.parametrize("block", [64, None])
@pytest.mark.parametrize("numel", [1, 100, 1000])
def test_onebit_further_bits_are_those_of_the_rest(bits, block, numel):
    array = np.random.default_rng(numel).standard_t(3, numel)
    sent, lost = packed(OneBit(block=block, bits=bits), array)
    left = array.copy()
    for _ in range(bits):
        left -= oracle.scaled_signs(left, block or numel)
    np.testing.assert_allclose(array - sent, left, rtol=1e-5, atol=1e-6)
    np.testing.assert_allclose(lost, np.square(left).sum(), rtol=1e-5, atol=1e-9)
    assert packed(OneBit(block=block, bits=bits - 1), array)[1] >= lost


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("bucket", [64, 128, 512])
def test_qsgd_l2_variance_is_within_the_published_bound(bits, bucket):
    points = 2 ** (bits - 1) - 1
    bound = min(bucket / points**2, np.sqrt(bucket) / points)
    rng = np.random.default_rng(bits)
    for array in (rng.normal(size=100 * bucket), rng.standard_t(2, 100 * bucket), np.ones(100 * bucket)):
        lost = np.mean([packed(QSGD(bits=bits, bucket=bucket, norm="l2"), array, key)[1] for key in range(5)])
        assert lost <= bound * np.square(array).sum()
        assert lost <= bucket / (4 * points**2) * np.square(array).sum() * 1.02  # the bound of the docstring


def contracts(compressor):
    if isinstance(compressor, Uniform):
        return (compressor.bucket or math.inf) < 2 * (2**compressor.bits - 1) ** 2
    always = compressor.norm == "max" and compressor.rounding == "nearest"
    return always or (compressor.bucket or math.inf) < 4 * (2 ** (compressor.bits - 1) - 1) ** 2


BUCKETS = (64, 128, 192, 256, 512, 1024, 4096, 65536, 1 << 17, 1 << 20, None)
ROUNDINGS = [{"bucket": bucket, "rounding": rounding} for bucket in BUCKETS for rounding in ("stochastic", "nearest")]


@pytest.mark.parametrize("bits", range(1, 9))
def test_quantiser_declares_whether_it_contracts(bits):
    forms = [*(Uniform(bits=bits, **settings) for settings in ROUNDINGS)]
    if bits > 1:
        forms += [QSGD(bits=bits, norm=norm, **settings) for norm in ("max", "l2") for settings in ROUNDINGS]
    for compressor in forms:
        assert compressor.contractive == contracts(compressor)
        assert compressor.unbiased == (getattr(compressor, "rounding", "stochastic") == "stochastic")
        assert compressor.feedback == (not compressor.unbiased and compressor.contractive)
        assert compressor.contractive_variant.contractive
        assert (compressor.contractive_variant is compressor) == compressor.contractive


def test_quantiser_feedback_needs_all_layers_to_contract():
    assert Uniform(bits=8, bucket=64, layers={"a": 4}).feedback
    assert not Uniform(bits=8, bucket=64, layers={"a": 2}).feedback


def test_qsgd_ranks_and_steps_draw_different_numbers():
    """Errors of ranks that round the same array would otherwise add up, and not average out."""
    array = np.random.default_rng(0).normal(size=4096)
    ranks = Ranks(2, QSGD(), "packed-allgather")
    errors = [ranks.reduce([{"w": array}] * 2)[0]["w"] - array for _ in range(2)]
    assert np.square(errors[0]).sum() < 0.7 * np.square(packed(QSGD(), array)[0] - array).sum()
    assert abs(np.corrcoef(errors[0], errors[1])[0, 1]) < 5 / np.sqrt(array.size)


def nearest(array, bits, bucket):
    """Round to multiples of a bucket's largest magnitude over s."""
    out = np.empty_like(array)
    for start in range(0, array.size, bucket):
        part = array[start : start + bucket].astype(np.float64)
        step = np.float32(np.abs(part).max() / (2 ** (bits - 1) - 1))
        out[start : start + bucket] = step * np.round(part / step)
    return out


def delivered(packer, array, key=1):
    """Pack, check the lost energy and both ways to unpack, and return the values."""
    message, sent = np.zeros(packer.packed_bytes, np.uint8), np.empty_like(array)
    lost = packer.pack(array, message, sent, key)
    np.testing.assert_allclose(lost, np.square((array - sent).astype(np.float64)).sum(), rtol=1e-5)
    received = np.full_like(array, np.nan)
    packer.unpack(message, received)
    assert received.tobytes() == sent.tobytes()
    added = array.copy()
    packer.unpack_add_all(message[None], 0, 0.5, added)
    np.testing.assert_allclose(added, array + 0.5 * sent, rtol=1e-6, atol=1e-6)
    return sent


@pytest.mark.parametrize("pieces", [[NUMEL], [254, 253], [301, 6, 200, 0], [1] * NUMEL], ids=len)
def test_packers_use_the_bits_of_each_part(pieces):
    compressor = QSGD(bits=3, bucket=64, rounding="nearest", layers={"wide.*": 6}).bind(NAMES, SIZES)
    array = np.random.default_rng(0).standard_normal(NUMEL).astype(np.float32)
    bits, ends = np.repeat([6, 3], [307, 200]), np.cumsum(pieces)[:-1]
    parts = zip(np.split(array, ends), np.split(bits, ends), strict=True)
    for packer, (part, part_bits) in zip(packers(compressor, pieces), parts, strict=True):
        expected = np.concatenate([nearest(part[part_bits == b], b, 64) for b in (6, 3)])
        np.testing.assert_allclose(delivered(packer, part), expected, rtol=1e-5, atol=1e-6)


def test_packers_of_onebit_send_a_magnitude_for_each_layer():
    array = np.random.default_rng(1).standard_normal(NUMEL).astype(np.float32) * np.repeat([1, 50, 3, 1], SIZES)
    [packer] = packers(OneBit(block=None).bind(NAMES, SIZES), [NUMEL])
    parts = np.split(array, np.cumsum(SIZES)[:-1])
    expected = np.concatenate([oracle.scaled_signs(part, part.size) for part in parts if part.size])
    np.testing.assert_allclose(delivered(packer, array), expected, rtol=1e-5)


def test_packers_draw_different_numbers_for_each_part():
    compressor = QSGD(bits=2, bucket=64, layers={"wide.bias": 3}).bind(["a", "wide.bias", "c"], [64, 64, 64])
    [packer] = packers(compressor, [192])
    sent = delivered(packer, np.tile(np.linspace(-1, 1, 64, dtype=np.float32), 3))
    assert sent[:64].tolist() != sent[128:].tolist()


def test_packers_of_another_array_pack_it_as_a_whole():
    [packer] = packers(Uniform(bits=4, layers={"wide.*": 6}).bind(NAMES, SIZES), [100])
    assert packer.packed_bytes == Uniform(bits=4).packed_bytes(100)


@pytest.mark.parametrize("ranks", [1, 2, 3, 4, 5])
@pytest.mark.parametrize("numel", [1, 63, 64, 65, 1000])
@pytest.mark.parametrize("dtype", [np.float32, slow(np.float64)])
def test_signsgd_majority_wins_and_ties_are_plus(ranks, numel, dtype):
    rng = np.random.default_rng([ranks, numel])
    arrays = [rng.normal(size=numel).astype(dtype) for _ in range(ranks)]
    arrays[0][::4] = 0
    votes = sum(np.where(array >= 0, 1, -1) for array in arrays)
    for result in run(SignSGD(scale=0.5), "packed-allgather", arrays).results:
        np.testing.assert_array_equal(result.mean, np.where(votes >= 0, 0.5, -0.5))
        np.testing.assert_array_equal(result.sent, result.mean)
        assert result.mean.dtype == dtype
        assert math.isnan(result.gain) or result.energy == 0


@pytest.mark.parametrize("numel", [1, 63, 64, 65, 3000])
def test_maxnorm_has_one_grid_for_the_whole_array(numel):
    array = np.random.default_rng(numel).standard_t(2, numel).astype(np.float32)
    sent, _ = packed(MaxNorm(bits=4, rounding="nearest"), array)
    step = np.abs(array).max() / 7
    np.testing.assert_allclose(sent, np.rint(array / step) * step, rtol=1e-5, atol=0.5001 * step)
    assert np.abs(sent - array).max() <= 0.5001 * step
    assert np.unique(np.abs(sent)).size <= 8
    assert MaxNorm(bits=4).packed_bytes(numel) == QSGD(bits=4, bucket=None).packed_bytes(numel)


NORMAL = np.random.default_rng(0).normal(size=10_000).astype(np.float32) + np.float32(0.01)
NORMAL[0] = 50
DEVIATION = np.sqrt(np.mean(np.float64(NORMAL) ** 2))


@pytest.mark.parametrize(
    ("compressor", "array", "reach"),
    [
        (TernGrad(), NORMAL, 2.5 * DEVIATION),
        (TernGrad(clip=1), NORMAL, DEVIATION),
        (TernGrad(clip=None), NORMAL, 50),
        (TernGrad(clip=1000), NORMAL, 50),
        # The standard deviation of equal elements is zero, but their mean square is not.
        *((TernGrad(), np.full(n, v, np.float32), abs(v)) for n in (1, 100) for v in (3.0, -3.0)),
    ],
)
def test_terngrad_sends_three_values_at_its_scale(compressor, array, reach):
    sent, lost = packed(compressor, array, key=5)
    assert (sent * array >= 0).all()
    np.testing.assert_allclose(np.abs(sent[sent != 0]), reach, rtol=1e-6)
    np.testing.assert_allclose(lost, np.square(np.float64(array) - sent).sum(), rtol=1e-5, atol=1e-5)
    expected = np.minimum(np.abs(array) / reach, 1)
    deviation = np.sqrt((expected * (1 - expected)).sum()) / array.size
    assert abs((sent != 0).mean() - expected.mean()) <= 4 * deviation + 1e-6
