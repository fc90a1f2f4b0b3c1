"""How far training falls behind: the formulas against optimizers and residuals that are simulated step by step."""

import numpy as np
import pytest
from marks import slow
from trainings import Adam

from mpicomp.policies.convergence_penalty import (
    ElementClasses,
    delay_penalty,
    mean_waits,
    quantiser_penalty,
    random_penalties,
    selection_penalties,
)

RANKS, ELEMENTS, STEPS = 4, 3000, 500
CLASSES = [(1.0, 0.05), (0.3, 0.2), (0.1, 0.02)]  # scale, and share of signal
FACTOR = 1.5  # what is lost counts so many times
ONE = np.ones(1)


def progress_lost(select, seed=0):
    """Return the share of progress that is lost in the second half, and the steps between two sends in each class.

    Progress is what the mean gradient gains along the steps of Adam, times the root of its scale. ``select`` gives what
    is sent of what all ranks have accumulated, shape (ranks, elements).
    """
    random = np.random.default_rng(seed)
    scale, signal = (np.repeat(entry, ELEMENTS) for entry in np.array(CLASSES).T)
    mean, noise = scale * np.sqrt(signal), scale * np.sqrt(1 - signal)
    waiting = np.zeros((RANKS, scale.size))
    late, dense = Adam(), Adam()
    gained, whole, sends = 0.0, 0.0, np.zeros(scale.size)
    for step in range(STEPS):
        gradients = mean + noise * random.standard_normal(waiting.shape)
        waiting += gradients
        sent = select(waiting, random)
        waiting -= sent
        moved, moved_dense = late.step(sent.mean(axis=0)), dense.step(gradients.mean(axis=0))
        if step >= STEPS // 2:
            gained, whole = gained + (scale**0.5 * mean) @ moved, whole + (scale**0.5 * mean) @ moved_dense
            sends += (sent != 0).mean(axis=0)
    rates = sends.reshape(len(CLASSES), -1).mean(axis=1) / (STEPS - STEPS // 2)
    return 1 - gained / whole, 1 / np.maximum(rates, 1e-9)


def classes(share=1.0):
    """Classes as above, which have a share of all elements; others never change."""
    scales, signals = np.array(CLASSES).T
    return ElementClasses(np.full(len(CLASSES), share / len(CLASSES)), scales, signals, scales**1.5 * signals)


def one_class(signal):
    return ElementClasses(ONE, ONE, np.full(1, signal), ONE)


def top(ratio):
    def select(waiting, random):
        kept = round(ratio * waiting.shape[1])
        threshold = -np.partition(-np.abs(waiting), kept - 1, axis=1)[:, kept - 1 : kept]
        return np.where(np.abs(waiting) >= threshold, waiting, 0)

    return select


@pytest.mark.parametrize("ratio", [0.3, slow(0.1), 0.03])
def test_what_selections_lose(ratio):
    lost, _ = progress_lost(top(ratio))
    [predicted], _ = selection_penalties(classes(), np.array([ratio]), RANKS, 1e9)
    assert predicted == pytest.approx(min(1, FACTOR * lost), abs=0.07)


@pytest.mark.parametrize("ratio", [slow(0.3), 0.1])
def test_what_a_selection_at_random_loses(ratio):
    def select(waiting, random):
        return np.where(random.random(waiting.shape[1]) < ratio, waiting, 0)

    lost, _ = progress_lost(select)
    [predicted] = random_penalties(classes(), np.array([ratio]), RANKS, 1e9)
    assert predicted == pytest.approx(min(1, FACTOR * lost), abs=0.07)


@pytest.mark.parametrize("threshold", [0.0, slow(1.0), 3.0])
def test_how_long_elements_wait(threshold):
    _, steps = progress_lost(lambda waiting, random: np.where(np.abs(waiting) >= threshold, waiting, 0))
    scales, signals = np.array(CLASSES).T
    predicted = mean_waits(scales, signals, np.array(threshold))
    counted = steps < 60  # others hardly come to an end here
    assert counted.any()
    np.testing.assert_allclose(predicted[counted], steps[counted], rtol=0.15 if threshold else 1e-9)


def test_what_few_bits_lose():
    """Rounding to a coarse grid: what is sent of each class is measured, too."""
    energies = np.zeros((2, len(CLASSES)))

    def select(waiting, random):
        sent = np.round(waiting / 0.5) * 0.5
        for place, entry in enumerate((sent, waiting - sent)):
            energies[place] += (entry**2).mean(axis=0).reshape(len(CLASSES), -1).mean(axis=1)
        return sent

    lost, _ = progress_lost(select)
    predicted = quantiser_penalty(classes(), *(energies / STEPS / classes().scales ** 2), RANKS, 1e9)
    assert predicted == pytest.approx(min(1, FACTOR * lost), abs=0.05)


def test_what_waits_is_a_share_of_the_steps_so_far():
    """What is drawn at every t-th step in the mean has waited for t - 1 steps in the mean."""
    one = one_class(0.999999)
    for steps, age in ((1, 50.0), (11, 50.0), (41, 50.0), (201, 50.0)):
        [never] = random_penalties(one, np.array([1 / steps]), 1, 1e12)
        [now] = random_penalties(one, np.array([1 / steps]), 1, age)
        arrived = (1 - never / FACTOR) * (1 - min(1.0, (steps - 1) / age))
        assert now == pytest.approx(min(1, FACTOR * (1 - arrived)), rel=1e-3)


def test_penalty_of_a_plain_optimizer_is_what_waits():
    """What is drawn is counted element by element; the progress of a plain step is what has arrived."""
    random, steps, age, ratio = np.random.default_rng(0), 4000, 400, 0.1
    waiting, missing = np.zeros(ELEMENTS), 0.0
    for step in range(steps):
        waiting += 1.0
        waiting[random.random(ELEMENTS) < ratio] = 0.0
        missing += waiting.mean() / steps if step >= 100 else 9.0 / steps
    one = one_class(0.999999)
    [predicted] = random_penalties(one, np.array([ratio]), RANKS, age, normalises=False)
    assert predicted == pytest.approx(FACTOR * missing / age, rel=0.02)
    both = selection_penalties(classes(), np.array([0.03, 0.3]), RANKS, 1e12, normalises=False)
    assert np.max(both) < 1e-6
    assert delay_penalty(2.0, 0.2, RANKS, 100, normalises=False) == pytest.approx(FACTOR * 2 / 100)
    found = quantiser_penalty(one, 9 * ONE, 100 * ONE, 1, 100, normalises=False)
    assert found == pytest.approx(FACTOR * 10 / 100)


def test_the_fewer_are_kept_the_more_is_lost():
    ratios = np.geomspace(0.0005, 1, 30)
    both = selection_penalties(classes(), ratios, RANKS, 100)
    for lost in both:
        assert (np.diff(lost) <= 1e-12).all()
        assert lost[-1] < 0.01
        assert 0.5 < lost[0] <= 1
    assert (both[0] <= both[1] + 1e-12).all()  # joint bursts are longer


def test_elements_that_never_change_do_not_count():
    [all_change], _ = selection_penalties(classes(), np.array([0.1]), RANKS, 100)
    [half], _ = selection_penalties(classes(1 / 2), np.array([0.05]), RANKS, 100)
    [more], _ = selection_penalties(classes(1 / 20), np.array([0.05]), RANKS, 100)
    assert half == pytest.approx(all_change)
    assert more < 0.01


def test_what_waiting_costs():
    assert delay_penalty(0.0, 0.1, RANKS, 100) == 0
    assert delay_penalty(10.0, 1e-9, RANKS, 100) == pytest.approx(FACTOR * 0.1)  # noise has no bursts
    signal, late = 0.2, 2.0
    bursts = (1 + late) * signal + (1 - signal) / RANKS
    expected = 1 - (1 - late / 100) * np.sqrt((signal + (1 - signal) / RANKS) / bursts)
    assert delay_penalty(late, signal, RANKS, 100) == pytest.approx(FACTOR * expected)


@pytest.mark.parametrize("signal", [0.02, 0.5])
def test_how_late_what_waits_is(signal):
    """A residual of the last ten gradients, noise and signal, costs what ten steps of waiting do."""
    noise = np.random.default_rng(0).standard_normal((10, 100_000))
    residual = (np.sqrt(signal) + np.sqrt(1 - signal) * noise).sum(axis=0)
    predicted = quantiser_penalty(one_class(signal), ONE, np.array([(residual**2).mean()]), 1, 100)
    assert predicted == pytest.approx(FACTOR * 10 / 100, rel=0.01)
