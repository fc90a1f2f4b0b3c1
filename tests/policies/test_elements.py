"""What is learned of a bucket's elements, against gradients whose scales and signal are known."""

import json

import numpy as np
import pytest

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


@pytest.mark.parametrize("numel", [0, 300])
def test_elements_that_are_zero_or_none_cost_nothing(numel):
    survey, elements = ElementSurvey((numel,), [mpicomp.OneBit()]), ElementStatistics(numel, 1)
    for step in range(20):
        elements.observe(survey.measure(np.zeros(numel, np.float32), None, (numel,), step)[None])
    assert elements.known
    assert elements.is_zero
    assert elements.quantiser_penalty(0, RANKS, 100) == 0
    assert not np.any(elements.selection_penalties(np.array([0.1, 0.01]), RANKS, 100))


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


def test_what_is_known_survives():
    elements = learned(0.1, np.linspace(0.01, 1, NUMEL))
    again = ElementStatistics(NUMEL)
    again.load_state_dict(json.loads(json.dumps(elements.state_dict())))
    ratios = np.array([0.3, 0.01])
    np.testing.assert_allclose(again.selection_penalties(ratios, 4, 50), elements.selection_penalties(ratios, 4, 50))
    other = ElementStatistics(NUMEL, quantisers=2)
    other.load_state_dict(elements.state_dict())
    assert not other.known
