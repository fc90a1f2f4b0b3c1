import numpy as np
import pytest
from lockstep import gradients, run
from marks import slow

from mpicomp import GlobalRandKMaxNorm, MaxNorm, TernGrad
from mpicomp.collectives import bind
from mpicomp.errors import ConfigurationError, IncompatiblePairError
from mpicomp.rounds import Group

DTYPES = [np.float32, slow(np.float64)]
SINGLE = np.dtype(np.float32)


def steps_of(arrays, bits):
    """Every element's distance of two points, from the words of the definition."""
    scales = [2 ** (each - 1) - 1 for each in bits]
    most = max(float(abs(value)) for array in arrays for value in array)
    steps = []
    for values in zip(*arrays, strict=True):
        inside = [s for s in scales[1:] if all(abs(float(value)) * s / most <= scales[0] for value in values)]
        steps.append(most / max(scales[:1] + inside))
    return np.array(steps)


@pytest.mark.parametrize("ranks", [1, slow(2), 3, slow(7)])
@pytest.mark.parametrize("bits", [[2], [4], [8], [16], [6, 10], [2, 3, 9]])
def test_integer_sum_is_the_mean_of_nearest_points(ranks, bits):
    for numel in (1, 5, 1000):
        arrays = gradients(ranks, numel, np.float64, seed=numel)
        results = run(MaxNorm(bits=bits, rounding="nearest"), "integer-sum", arrays).results
        steps = steps_of(arrays, bits)
        nearest = [np.round(array / steps) for array in arrays]
        np.testing.assert_allclose(results[0].mean, np.sum(nearest, axis=0) * steps / ranks, rtol=1e-12)
        for result, points in zip(results, nearest, strict=True):
            np.testing.assert_allclose(result.sent, points * steps, rtol=1e-12)
            assert result.mean.tobytes() == results[0].mean.tobytes()


@pytest.mark.parametrize(
    ("compressor", "bits"),
    [(MaxNorm(), [4]), (MaxNorm(bits=[3, 5, 12]), [3, 5, 12]), (TernGrad(clip=None), [2])],
    ids=str,
)
def test_integer_sum_is_unbiased_with_bounded_variance(compressor, bits):
    ranks, numel, draws, block = 3, 600, 1000, 50
    arrays = [array[np.argsort(-np.abs(array))] for array in gradients(ranks, numel, np.float32, seed=1)]
    steps = steps_of(arrays, bits)
    total, squares = np.zeros(numel), np.zeros(numel)
    for step in range(draws):
        results = run(compressor, "integer-sum", arrays, step=step).results
        error = results[0].mean - np.mean(np.float64(arrays), axis=0)
        total += error
        squares += error**2
        for array, result in zip(arrays, results, strict=True):
            assert (np.abs(array - result.sent) <= steps * (1 + 1e-5)).all()
    bias, variance = total / draws, squares / draws
    for start in range(0, numel, block):
        part = slice(start, start + block)
        deviation = np.sqrt(variance[part].sum() / draws)
        assert abs(bias[part].sum()) <= 4 * deviation + 1e-6 * np.abs(arrays).max()
    # A quarter of a squared step for each rank, of which the mean takes one over their number.
    assert (variance <= steps**2 / 4 / ranks * 1.25).all()
    assert variance.sum() <= (steps**2).sum() / 4 / ranks


def test_ranks_draw_different_rounding():
    """Equal draws on all ranks would not average out."""
    arrays = [np.full(5000, 0.5 / 7, np.float32)] * 8
    for array in arrays:
        array[0] = 1
    results = run(MaxNorm(), "integer-sum", arrays).results
    assert len({result.sent.tobytes() for result in results}) == 8
    mean = results[0].mean[1:] * 7
    assert np.var(mean) == pytest.approx(0.25 / 8, rel=0.1)


def test_values_behind_the_finer_grid_are_unbiased():
    """What is looked at after rounding is on the finer grid only where it was rounded down."""
    numel, draws = 400, 500
    array = np.full(numel, 31.5 / 511, np.float32)
    array[0] = 1
    total = sum(run(MaxNorm(bits=[6, 10]), "integer-sum", [array], step=step).results[0].mean for step in range(draws))
    coarse = 1 / 31
    deviation = coarse / 2 / np.sqrt(draws * numel)
    assert abs(np.mean(total[1:] / draws) - array[1]) < 4 * deviation


def test_element_large_on_one_rank_is_coarse_on_all():
    small = np.full(100, 1 / 511, np.float64)
    arrays = [small.copy() for _ in range(3)]
    arrays[2][7], arrays[0][0] = 0.5, 1.0
    results = run(MaxNorm(bits=[6, 10], rounding="nearest"), "integer-sum", arrays).results
    assert results[0].sent[7] == 0
    assert results[0].sent[8] == pytest.approx(1 / 511)
    assert results[0].mean[7] == pytest.approx(round(0.5 * 31) / 31 / 3)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "compressor", [MaxNorm(), MaxNorm(bits=[6, 16]), MaxNorm(rounding="nearest"), TernGrad()], ids=str
)
@pytest.mark.parametrize("value", [0.0, -0.0, 1e-45, 1e-42, 1e-38, 3e-38, 1e38, -3.4e38], ids=str)
def test_extreme_numbers_stay_numbers(dtype, compressor, value):
    arrays = [np.full(70, value, dtype), np.zeros(70, dtype)]
    arrays[0][3] /= 4
    results = run(compressor, "integer-sum", arrays).results
    assert not results[0].nonfinite
    assert np.isfinite(results[0].mean).all()
    assert (np.abs(results[0].mean) <= max(abs(value), 1e-33)).all()
    np.testing.assert_array_equal(results[1].sent, 0)
    assert results[0].gain == 1 if value == 0 else np.isfinite(results[0].gain)


@pytest.mark.parametrize("bad", [np.nan, np.inf, -np.inf])
def test_bad_number_is_seen_by_all_and_makes_the_mean_nan(bad):
    for culprit in range(3):
        arrays = gradients(3, 100, np.float32)
        arrays[culprit][50] = bad
        for compressor in (MaxNorm(), MaxNorm(bits=[6, 10]), TernGrad()):
            for result in run(compressor, "integer-sum", arrays).results:
                assert result.nonfinite
                assert np.isnan(result.mean).all()


@pytest.mark.parametrize("ranks", [2, 3, 4, 8, 100, 1000, 4096])
@pytest.mark.parametrize("bits", [2, 4, 8, 16])
def test_fields_are_as_wide_as_the_sum(ranks, bits):
    numel, scale = 1_000_000, 2 ** (bits - 1) - 1
    width = len(bin(2 * scale * ranks)) - 2
    promised = 64 / (64 // width)
    rounds = bind(MaxNorm(bits=bits), "integer-sum").rounds(numel, SINGLE, Group(0, ranks))
    sent = sum(task.sent_bytes(Group(0, ranks)) for task in rounds)
    assert sent * 8 / numel == pytest.approx(promised, rel=0.02)
    assert promised <= width * 1.5
    *_, asked, _ = bind(MaxNorm(bits=[bits, 16][: 1 + (bits < 16)]), "integer-sum").rounds(
        numel, SINGLE, Group(0, ranks)
    )
    if bits < 16:
        objections = 64 / (64 // (len(bin(ranks)) - 2))
        assert asked.sent_bytes(Group(0, ranks)) * 8 / numel == pytest.approx(objections, rel=0.02)


def test_bytes_are_those_that_the_compressor_promises():
    for compressor in (MaxNorm(), MaxNorm(bits=8), MaxNorm(bits=[6, 10]), MaxNorm(bits=[3, 5, 12]), TernGrad()):
        rounds = bind(compressor, "integer-sum").rounds(1 << 20, SINGLE, Group(0, 4))
        sent = sum(task.sent_bytes(Group(0, 4)) for task in rounds) / (1 << 20)
        assert sent == pytest.approx(compressor.wire_bytes_per_element(4), rel=0.001)


def test_too_many_ranks_for_a_field_are_refused():
    scheme = bind(MaxNorm(bits=16), "integer-sum")
    assert scheme.rounds(10, SINGLE, Group(0, 32768))
    with pytest.raises(
        ConfigurationError, match=r"integer-sum: integers up to 32767 from 40000 ranks need fields of 32"
    ):
        scheme.rounds(10, SINGLE, Group(0, 40000))
    assert bind(MaxNorm(bits=4), "integer-sum").rounds(10, SINGLE, Group(0, 40000))


def test_integers_on_a_float_sum_are_refused():
    for compressor in (MaxNorm(), TernGrad(), GlobalRandKMaxNorm()):
        with pytest.raises(
            IncompatiblePairError, match=r"does not fit collective 'allreduce'.*use integer-sum or hier"
        ):
            bind(compressor, "allreduce")


@pytest.mark.parametrize("layout", [[0, 0, 1, 1], [0, 1, 2], [0, 0, 0, 1]], ids=str)
def test_integer_sum_on_hosts_counts_a_host_as_a_rank(layout):
    arrays = gradients(len(layout), 500, np.float64)
    sums = [np.sum([a for a, h in zip(arrays, layout, strict=True) if h == host], axis=0) for host in set(layout)]
    [result, *_] = run(MaxNorm(bits=16, rounding="nearest"), "hierarchical", arrays, hosts=layout).results
    step = np.abs(sums).max() / 32767
    np.testing.assert_allclose(result.mean, np.mean(arrays, axis=0), rtol=0, atol=step)
    assert result.gain > 1 - 1e-6
