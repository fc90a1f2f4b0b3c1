"""What is learned of a bucket's elements, against gradients whose scales and signal are known."""

import json

import numpy as np
import oracle
import pytest
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.policies.convergence_penalty import ElementStatistics, ElementSurvey

NUMEL, RANKS = 6000, 3


def gradients(signal, steps, scales, rank=0):
    """Yield gradients of scales of their own, of which a share of the energy stays the same."""
    common = np.random.default_rng(99).choice([-1.0, 1.0], scales.size)
    random = np.random.default_rng(rank)
    for _ in range(steps):
        noise = random.standard_normal(scales.size)
        yield (scales * (signal**0.5 * common + (1 - signal) ** 0.5 * noise)).astype(np.float32)


def learned(signal, scales, steps=60, quantisers=(), feedback=False, normalises=True):
    """Return what ranks learn that look at all gradients, and their surveys of the last step."""
    surveys = [ElementSurvey((scales.size,), quantisers) for _ in range(RANKS)]
    elements = ElementStatistics(scales.size, len(quantisers), normalises)
    for step, entry in enumerate(zip(*(gradients(signal, steps, scales, rank) for rank in range(RANKS)), strict=True)):
        residual = np.float32(step) * np.ones_like(entry[0]) if feedback else None
        given = entry if residual is None else [array + residual for array in entry]
        measured = np.array(
            [
                survey.measure(array, residual, (scales.size,), step)
                for survey, array in zip(surveys, given, strict=True)
            ]
        )
        elements.observe(measured)
    return elements


@pytest.mark.parametrize("signal", [0.02, 0.3])
def test_scales_and_signal(signal):
    scales = np.repeat([1.0, 0.06], NUMEL // 2)
    elements = learned(signal, scales)
    assert elements.known
    classes = elements.classes()
    shares, signals = classes.shares, classes.signals
    found = classes.scales * np.sqrt((scales**2).mean())  # they are relative
    assert shares.sum() == pytest.approx(1)
    for scale in (1.0, 0.06):
        near = (found > scale / 2) & (found < scale * 2)
        assert shares[near].sum() == pytest.approx(0.5, abs=0.01)
        assert (shares * signals)[near].sum() / shares[near].sum() == pytest.approx(signal, rel=0.25, abs=0.01)
    assert elements.signal == pytest.approx(signal, rel=0.1)


def test_what_ranks_have_of_their_own_is_signal():
    """Ranks whose data are of different kinds: each has a mean of its own, and no noise."""
    elements, surveys = ElementStatistics(NUMEL), [ElementSurvey((NUMEL,)) for _ in range(RANKS)]
    gradients = [np.random.default_rng(rank).standard_normal(NUMEL).astype(np.float32) for rank in range(RANKS)]
    for step in range(20):
        elements.observe(
            np.array([survey.measure(a, None, (NUMEL,), step) for survey, a in zip(surveys, gradients, strict=True)])
        )
    assert elements.signal > 0.9


def test_gradients_that_alternate_are_signal():
    """As at the edge of stability: successive gradients point against each other."""
    elements, survey = ElementStatistics(NUMEL), ElementSurvey((NUMEL,))
    for step, gradient in enumerate(gradients(0.3, 40, np.ones(NUMEL))):
        elements.observe(survey.measure(gradient * np.float32((-1) ** step), None, (NUMEL,), step)[None])
    assert elements.signal == pytest.approx(0.3, rel=0.1)


def test_residuals_are_no_signal():
    scales = np.ones(NUMEL)
    assert learned(0.05, scales, feedback=True).signal == pytest.approx(learned(0.05, scales).signal, rel=0.05)


def test_a_part_stands_for_a_large_bucket():
    scales = np.tile(np.repeat([1.0, 0.1], 512), 200)
    elements = learned(0.2, scales, steps=30)
    [some], _ = elements.selection_penalties(np.array([0.05]), RANKS, 1000)
    small = learned(0.2, np.tile(np.repeat([1.0, 0.1], 512), 20), steps=30)
    assert some == pytest.approx(small.selection_penalties(np.array([0.05]), RANKS, 1000)[0][0], abs=0.02)


def test_small_parameters_count_as_much_and_inactive_ones_by_their_active_elements():
    """Two dense layers, one with gradients a hundredth of the other's, and an embedding of which a tenth is active."""
    sizes, random = (2000, 2000, 12_000), np.random.default_rng(5)
    owner = np.repeat(np.arange(3), sizes)
    survey = ElementSurvey(sizes)
    for step in range(30):
        gradient = random.standard_normal(owner.size) + 0.5
        gradient[owner == 1] /= 100
        gradient[owner == 2] *= 10 * (random.random(sizes[2]) < 0.1)
        survey.measure(gradient.astype(np.float32), None, sizes, step)
    dense, small, embedding = np.bincount(owner, survey._importance())
    assert dense == pytest.approx(2000, rel=0.05)
    assert small == pytest.approx(dense, rel=0.05)
    assert 0.1 * sizes[2] < embedding < 0.2 * sizes[2]  # some surveys cannot tell one step of nineteen from one of ten


def test_what_quantisers_send():
    quantisers = [mpicomp.OneBit(block=64), mpicomp.QSGD(rounding="nearest")]
    scales, sent, whole = np.tile(np.repeat([1.0, 0.1], 256), 8), 0.0, 0.0
    elements = learned(0.1, scales, 40, quantisers)
    residuals = [np.zeros(scales.size) for _ in range(RANKS)]
    for rank, residual in enumerate(residuals):
        for gradient in gradients(0.1, 40, scales, rank):
            residual += gradient
            signs = oracle.scaled_signs(residual, 64)
            residual -= signs
            sent, whole = sent + (signs**2).sum(), whole + (gradient.astype(float) ** 2).sum()
    measured = elements._sums[5:7].sum(axis=1) / elements._sums[4].sum()
    assert measured[0] == pytest.approx(sent / whole, rel=0.1)
    left = sum((residual**2).sum() for residual in residuals) / (whole / 40)
    assert measured[1] == pytest.approx(left, rel=0.3)  # a mean over the last looks
    signs, bits = (elements.quantiser_penalty(place, RANKS, 100) for place in range(2))
    assert 0 <= bits < 0.1
    assert bits + 0.01 < signs < 0.7


def test_few_bits_suit_an_optimizer_that_does_not_normalise():
    """What waits with two bits is at most a step or so; Adam also divides by the root of the larger mean square."""
    quantisers = mpicomp.QSGD.suggested(normalises=False)
    scales = np.random.default_rng(1).choice([0.2, 1.0], 4096)
    adam, sgd = (
        [elements.quantiser_penalty(place, RANKS, 300) for place in range(len(quantisers))]
        for elements in (learned(0.05, scales, 40, quantisers, normalises=does) for does in (True, False))
    )
    assert [quantiser.bits for quantiser in quantisers] == [8, 4, 3, 2]
    assert adam == sorted(adam)
    assert adam[1] < 0.1
    assert adam[3] > 0.3
    assert max(sgd) < 0.05


def test_neighbours_share_a_grid_as_in_an_exchange():
    """Rows of very different scales lose what they lose by themselves, though the sample has some of each."""
    scales = np.tile(np.repeat([1.0, 0.1], 128), 400)
    elements = learned(0.1, scales, 40, [mpicomp.QSGD(rounding="nearest")])
    left, whole = 0.0, 0.0
    for rank in range(RANKS):
        residual = np.zeros(scales.size, np.float32)
        for gradient in gradients(0.1, 40, scales, rank):
            whole += np.square(gradient, dtype=float).reshape(-1, 2, 128).sum(axis=(0, 2)) / 40
            rows = (residual + gradient).reshape(-1, 128)
            steps = abs(rows).max(axis=1, keepdims=True) / 7
            residual = (rows - steps * np.rint(rows / steps)).reshape(-1)
        left += np.square(residual, dtype=float).reshape(-1, 2, 128).sum(axis=(0, 2))
    sums, is_large = elements._sums[:, elements._sums[2] > 0], elements.classes().scales > 0.45
    for kind, part in enumerate((is_large, ~is_large)):
        gradient, _, waiting = sums[4:, part].sum(axis=1)
        assert waiting / gradient == pytest.approx((left / whole)[kind], rel=0.2)


def test_what_is_not_finite_or_too_large_teaches_nothing():
    survey, elements = ElementSurvey((300,)), ElementStatistics(300)
    for bad in (np.nan, np.inf, 3e38):
        array = np.ones(300, np.float32)
        array[7] = bad
        elements.observe(survey.measure(array, None, (300,), 0)[None])
    assert not elements.known
    for _ in range(40):
        elements.observe(survey.measure(np.zeros(300, np.float32), None, (300,), 0)[None])
    assert not elements.known


@pytest.mark.parametrize("compressor", [None, "topk"])
def test_empty_arrays_are_reduced(compressor):
    ranks = Ranks(2, compressor, network=Link(1e-5, 1e8), bucket_bytes=4)
    for _ in range(15):
        gradients = [{"none": np.zeros(0, np.float32), "some": np.ones(300, np.float32)} for _ in range(2)]
        assert ranks.reduce(gradients)[0]["none"].size == 0


@pytest.mark.parametrize("numel", [0, 300])
def test_elements_that_are_zero_or_none_cost_nothing(numel):
    survey, elements = ElementSurvey((numel,), [mpicomp.OneBit()]), ElementStatistics(numel, 1)
    for step in range(20):
        elements.observe(survey.measure(np.zeros(numel, np.float32), None, (numel,), step)[None])
    assert elements.known
    assert elements.is_zero
    assert elements.quantiser_penalty(0, RANKS, 100) == 0
    assert not np.any(elements.selection_penalties(np.array([0.1, 0.01]), RANKS, 100))


def test_gradients_that_become_smaller():
    survey, fixed = ElementSurvey((NUMEL,)), ElementSurvey((NUMEL,))
    falling, steady = ElementStatistics(NUMEL), ElementStatistics(NUMEL)
    for step, gradient in enumerate(gradients(0.2, 100, np.repeat([1.0, 0.2], NUMEL // 2))):
        small = gradient * np.float32(0.97**step)
        falling.observe(survey.measure(small, None, (NUMEL,), step)[None])
        steady.observe(fixed.measure(gradient, None, (NUMEL,), step)[None])
    ratios = np.array([0.1, 0.01])
    np.testing.assert_allclose(
        falling.selection_penalties(ratios, 4, 1e3)[0], steady.selection_penalties(ratios, 4, 1e3)[0], atol=0.05
    )


@pytest.mark.parametrize(
    ("numel", "signal", "jumps"),
    [(NUMEL, 0.3, 0), (NUMEL, 0.2, 0), (NUMEL, 0.02, -1), (NUMEL, 0.8, 1), (30, 0.02, 0)],
)
def test_signal_jumps_by_more_than_noise_and_a_factor(numel, signal, jumps):
    elements = learned(0.3, np.ones(numel))
    surveys = [ElementSurvey((numel,)) for _ in range(RANKS)]
    of_ranks = [list(gradients(signal, 2, np.ones(numel), rank=10 + rank)) for rank in range(RANKS)]
    for step in range(2):
        pairs = zip(surveys, of_ranks, strict=True)
        measured = np.array([survey.measure(entry[step], None, (numel,), step) for survey, entry in pairs])
        assert elements.jump(measured) == (jumps if step == 1 else 0)


@pytest.mark.parametrize("scale", [1e-18, 1.0, 1e16])
def test_elements_of_any_scale_have_the_same_penalty(scale):
    one = learned(0.1, np.full(NUMEL, scale), 20)
    unit = learned(0.1, np.ones(NUMEL), 20)
    ratio = np.array([0.1])
    np.testing.assert_allclose(
        one.selection_penalties(ratio, RANKS, 100), unit.selection_penalties(ratio, RANKS, 100), atol=0.02
    )


def test_what_is_known_survives():
    elements = learned(0.1, np.linspace(0.01, 1, NUMEL))
    again = ElementStatistics(NUMEL)
    again.load_state_dict(json.loads(json.dumps(elements.state_dict())))
    ratios = np.array([0.3, 0.01])
    np.testing.assert_allclose(again.selection_penalties(ratios, 4, 50), elements.selection_penalties(ratios, 4, 50))
    other = ElementStatistics(NUMEL, quantisers=2)
    other.load_state_dict(elements.state_dict())
    assert not other.known
