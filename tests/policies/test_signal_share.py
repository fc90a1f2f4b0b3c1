"""How much of a gradient is signal, against norms of gradients that are made of known parts."""

import numpy as np
import pytest
from marks import slow

from mpicomp.policies.signal_share import Signal, SketchSurvey


def gradients(random, ranks, share, numel, steps=1):
    """Give what ranks have accumulated after some steps of which nothing was sent: signal and noise, long tails."""
    scale = random.pareto(3, numel)
    common = scale * random.standard_normal(numel)
    out = []
    for _ in range(ranks):
        noise = sum(scale * random.standard_normal(numel) for _ in range(steps))
        out.append((share**0.5 * steps * common + (1 - share) ** 0.5 * noise).astype(np.float32))
    return out


@pytest.mark.parametrize("numel", [1, 100, 256, 5000, 1 << 18])
def test_norms_of_sketches_are_those_of_arrays_on_average(numel):
    random = np.random.default_rng(numel)
    survey = SketchSurvey()
    first, second = (random.pareto(3, numel).astype(np.float32) for _ in range(2))
    found = []
    for step in range(400):
        one, other = survey.measure(first, [numel], step), survey.measure(second, [numel], step)
        assert one.shape == (survey.width([numel]),)
        found.append([float(np.sum(own.astype(np.float64) ** 2)) for own in (one, other, one + other)])
    exact = [float(np.sum(own.astype(np.float64) ** 2)) for own in (first, second, first + second)]
    spread = np.std(found, axis=0) / len(found) ** 0.5
    assert (np.abs(np.mean(found, axis=0) - exact) <= 4 * spread + 1e-5 * np.array(exact)).all()
    assert (np.std(found, axis=0) < 0.5 * np.array(exact)).all()


@pytest.mark.parametrize("ranks", [slow(2), 4, slow(16)])
@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 1.0])
@pytest.mark.parametrize("delay", [0, 3])
def test_the_share_is_found(ranks, share, delay):
    random = np.random.default_rng(ranks)
    signal, survey = Signal(), SketchSurvey()
    for step in range(40):
        parts = [gradients(random, ranks, share, numel, 1 + delay) for numel in (3000, 20_000)]  # two buckets
        sketches = {
            bucket: np.array([survey.measure(own, [own.size], step) for own in part])
            for bucket, part in enumerate(parts)
        }
        signal.observe(sketches, delay)
    assert signal.share == pytest.approx(share, rel=0.25, abs=0.03)


def test_what_tells_nothing_changes_nothing():
    signal = Signal()
    for bad in (np.zeros((3, 256)), np.full((3, 256), np.nan), np.full((3, 256), np.inf)):
        signal.observe({0: bad.astype(np.float32)}, 1.0)
        assert signal.share is None
    signal.observe({0: np.tile(np.ones(256, np.float32), (3, 1))}, 0.0)
    assert signal.share == 1.0
    noise = np.random.default_rng(0).standard_normal((3, 256)).astype(np.float32)
    for _ in range(100):
        signal.observe({0: noise - noise.mean(axis=0)}, 0.0)
    assert signal.share == 0.005  # less is never taken for granted


def test_it_survives():
    signal, again = Signal(), Signal()
    again.give(signal.state())
    assert again.share is None
    signal.give(0.25)
    again.give(signal.state())
    assert again.share == 0.25
    sketch = {0: np.random.default_rng(0).standard_normal((4, 256)).astype(np.float32)}
    signal.observe(sketch, 0.0)
    again.observe(sketch, 0.0)
    assert 0.2 < signal.share == again.share
