"""What two gradients have in common, against what is known of joint distributions."""

import itertools
import math

import numpy as np
import pytest
from mpicomp.bench.measure.correlation import BINS, LEAST, Comparison, common

from mpicomp.transport import LocalWorld


def gaussians(rho, size, seed=0):
    first, second = np.random.default_rng(seed).standard_normal((2, size))
    return first, rho * first + math.sqrt(1 - rho * rho) * second


def compare(one, other, seed=0):
    return common(one, other, np.random.default_rng(seed))


def normal_below(value):
    return (1 + math.erf(value / math.sqrt(2))) / 2


def information_in_bins(rho):
    """Mutual information of two normal numbers that are known to the sixteenth that they lie in: by integration."""
    edges = [-9.0]
    for place in range(1, BINS):
        low, high = -9.0, 9.0
        while high - low > 1e-10:
            middle = (low + high) / 2
            low, high = (middle, high) if normal_below(middle) < place / BINS else (low, middle)
        edges.append(low)
    edges.append(9.0)
    spread, information = math.sqrt(1 - rho * rho), 0.0
    for left, right in itertools.pairwise(edges):
        pieces, shares = 200, [0.0] * BINS
        width = (right - left) / pieces
        for piece in range(pieces):
            x = left + (piece + 0.5) * width
            weight = math.exp(-x * x / 2) / math.sqrt(2 * math.pi) * width
            below = [normal_below((edge - rho * x) / spread) for edge in edges]
            for other in range(BINS):
                shares[other] += weight * (below[other + 1] - below[other])
        information += sum(share * math.log(share * BINS * BINS) for share in shares if share > 0)
    return information


@pytest.mark.parametrize("rho", [0.2, 0.5, -0.8, 0.9])
def test_normal_numbers_share_what_theory_says(rho):
    size = 200_000
    found = compare(*gaussians(rho, size))
    bias, deviation = (BINS - 1) ** 2 / (2 * size), abs(rho) / math.sqrt(size)  # that of the information density
    assert found.information == pytest.approx(information_in_bins(rho), abs=bias + 5 * deviation)
    exact = -0.5 * math.log(1 - rho * rho)
    # Bins hide some of it, and the more the nearer the numbers are to each other: 3 % at 0.2, 8 % at 0.9.
    assert 0.9 * exact < found.information < exact + bias + 5 * deviation
    assert found.correlation == pytest.approx(rho, abs=5 * (1 - rho * rho) / math.sqrt(size))
    assert found.entropy == pytest.approx(math.log(BINS), abs=1e-6)
    assert found.share == pytest.approx(found.information / math.log(BINS), rel=1e-5)


@pytest.mark.parametrize("size", [500, 2000, 50_000])
def test_control_is_the_bias_of_the_estimate(size):
    """Twice the elements times the information of independent numbers is chi-squared with (bins - 1)**2 degrees."""
    degrees = (BINS - 1) ** 2
    rounds = [compare(*gaussians(0.0, size, seed), seed) for seed in range(20)]
    for name in ("information", "control"):
        mean = np.mean([2 * size * getattr(found, name) for found in rounds])
        # Small samples are a little off the limit; so 5 deviations of a mean of 20, and a tenth.
        assert mean == pytest.approx(degrees, abs=5 * math.sqrt(2 * degrees / 20) + 0.1 * degrees)
        assert getattr(rounds[0], f"{name}") > 0


def test_only_the_order_of_elements_counts():
    """Gradients have long tails."""
    one, other = gaussians(0.5, 5000)
    plain, stretched = compare(one, other), compare(one**5, np.exp(3 * other))
    assert stretched.information == pytest.approx(plain.information, abs=1e-12)
    assert stretched.control == pytest.approx(plain.control, abs=1e-12)


def test_signs_may_differ_where_magnitudes_go_together():
    """Information without correlation: the docs say so."""
    rng = np.random.default_rng(4)
    scales = np.exp(2 * rng.standard_normal(100_000))
    found = compare(*(rng.standard_normal((2, 100_000)) * scales))
    assert found.information > 0.3
    assert abs(found.correlation) < 0.2


def entropy_of(pairs):
    counts = {}
    for pair in pairs:
        counts[pair] = counts.get(pair, 0) + 1
    return -sum(count / len(pairs) * math.log(count / len(pairs)) for count in counts.values())


def test_zeros_by_the_thousand_are_one_bin():
    rng = np.random.default_rng(5)
    one, other = rng.standard_normal((2, 4000))
    used = rng.random(4000) < 0.03  # rows of an embedding whose words were not there
    one[~used], other[~used] = 0.0, 0.0
    found = compare(one, other)
    # All sixteenths end at zero, since a thirtieth is less than one of them: what is left is the sign.
    signs = [(np.sign(a), np.sign(b)) for a, b in zip(one, other, strict=True)]
    lefts, rights = [left for left, _ in signs], [right for _, right in signs]
    expected = entropy_of(lefts) + entropy_of(rights) - entropy_of(signs)
    assert found.information == pytest.approx(expected, abs=1e-12)
    assert found.entropy == pytest.approx((entropy_of(lefts) + entropy_of(rights)) / 2, abs=1e-12)


@pytest.mark.parametrize("value", [0.0, 3.0])
def test_constants_have_nothing_to_share(value):
    found = compare(np.full(1000, value, np.float32), np.arange(1000, dtype=np.float32))
    assert (found.correlation, found.information, found.control) == (0.0, 0.0, 0.0)
    both = compare(np.full(1000, value), np.full(1000, value))
    assert (both.entropy, both.share, both.control_share) == (0.0, 0.0, 0.0)


def gradients_of(rank, step, sizes):
    """What all ranks have in common, and noise of their own."""
    shared, private = np.random.default_rng([step, 99]), np.random.default_rng([step, rank])
    return {
        name: (shared.standard_normal(size) + private.standard_normal(size)).astype(np.float32).reshape(-1, 4)
        for name, size in sizes.items()
    }


def all_of(ranks, every, steps, sizes, spoil=None):
    world = LocalWorld(ranks)
    comparisons = [Comparison(every, 7, transport.group) for transport in world.transports]
    seen = []
    for step in range(steps):
        gradients = [gradients_of(rank, step, sizes) for rank in range(ranks)]
        if step == spoil:
            gradients[1]["small"][0] = np.nan
        elif step % every == 0:
            seen.append(gradients)
        world.run([comparison.look(step, arrays) for comparison, arrays in zip(comparisons, gradients, strict=True)])
    return world.run([comparison.outcome() for comparison in comparisons]), seen


@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_ranks_are_compared_with_the_next(ranks):
    sizes = {"small": LEAST - 4, "middle": 400, "large": 2000}
    outcomes, seen = all_of(ranks, 3, 8, sizes)
    assert all(outcome == outcomes[0] for outcome in outcomes)
    outcome = outcomes[0]
    assert (outcome.every, outcome.looks, list(outcome.layers)) == (3, 3, ["middle", "large"])
    for name, (numel, found) in outcome.layers.items():
        assert numel == sizes[name]
        pairs = [(step[rank][name], step[(rank + 1) % ranks][name]) for step in seen for rank in range(ranks)]
        pearson = np.mean([np.corrcoef(one.ravel(), other.ravel())[0, 1] for one, other in pairs])
        assert found.correlation == pytest.approx(pearson, abs=1e-6)
        assert found.information > found.control
    (_, middle), (_, large) = outcome.layers["middle"], outcome.layers["large"]
    for name in ("correlation", "information", "control", "entropy"):
        expected = (400 * getattr(middle, name) + 2000 * getattr(large, name)) / 2400
        assert getattr(outcome.whole, name) == pytest.approx(expected)
    text = outcome.table()
    assert [line.split()[0] for line in text.splitlines()[1:]] == ["middle", "large", "all"]


def test_gradients_with_nan_do_not_count():
    sizes = {"small": 300, "large": 2000}
    outcomes, seen = all_of(3, 2, 6, sizes, spoil=2)
    assert (outcomes[0].looks, len(seen)) == (2, 2)
    assert all(np.isfinite(layer.information) for _, layer in outcomes[0].layers.values())


def test_nothing_large_enough():
    outcome = all_of(2, 1, 2, {"small": 16})[0][0]
    assert outcome.whole is None
    assert outcome.to_json()["layers"] == []
    assert "no look" in outcome.table()
