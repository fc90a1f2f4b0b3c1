"""SIDCo against the formulas of the paper, written out with NumPy and SciPy in float64 from sorted arrays."""

import json

import marks
import numpy as np
import pytest
import scipy.special
import scipy.stats
from estimates import accumulated
from worlds import Ranks

from mpicomp import SIDCo, get_compressor
from mpicomp.compressors import sidco
from mpicomp.compressors.context import Context
from mpicomp.errors import ConfigurationError
from mpicomp.policies.schedule import choose_warmup

DISTRIBUTIONS = ["exponential", "gamma", "pareto"]


def pareto(excess, share):
    mean, variance = excess.mean(), excess.var()
    xi = 0.5 * (1 - mean**2 / variance)
    b = 0.5 * mean * (mean**2 / variance + 1)
    return b / xi * (share**-xi - 1)


def first(distribution, magnitudes, share):
    if distribution == "exponential":
        return magnitudes.mean() * np.log(1 / share)
    if distribution == "pareto":
        return pareto(magnitudes, share)
    s = np.log(magnitudes.mean()) - np.log(magnitudes).mean()
    a = (3 - s + np.sqrt((s - 3) ** 2 + 24 * s)) / (12 * s)
    return magnitudes.mean() / a * scipy.special.gammaincinv(a, 1 - share)


def corrected(distribution, array, ratio, stages):
    """The threshold that is fitted to a whole array, and corrected by what exceeds it: the paper has no corrections."""
    k = max(1, int(ratio * array.size + 0.5))
    magnitudes = np.abs(array.astype(np.float64))
    magnitudes = magnitudes[magnitudes > 0]
    threshold = first(distribution, magnitudes, k / magnitudes.size if stages == 1 else 0.25)
    tried = [threshold]
    for left in range(stages - 1, 0, -1):
        threshold = further(distribution, magnitudes, threshold, lambda count, left=left: (k / count) ** (1 / left))
        tried.append(threshold)

    def count(threshold):
        return (magnitudes > threshold).sum()

    for _ in range(6):
        if abs(count(threshold) / k - 1) <= 0.1:
            break
        low = max((t for t in tried if count(t) >= k), default=None)
        high = min((t for t in tried if count(t) < k), default=None)
        if low is not None and high is not None:
            part = np.log(count(low) / k) / np.log(count(low) / max(count(high), 0.5))
            if len(tried) % 2 == 1:
                part = (part + 0.5) / 2
            threshold = low + (high - low) * np.clip(part, 0.05, 0.95)
        elif count(threshold) >= 10:
            threshold = further(distribution, magnitudes, threshold, lambda count: k / count)
        else:
            break
        tried.append(threshold)
    return threshold


def further(distribution, magnitudes, threshold, share):
    """Fit what exceeds a threshold, and go on to where a share of it is left."""
    excess = magnitudes[magnitudes > threshold] - threshold
    if excess.size < 10:
        return threshold
    if distribution == "exponential":
        return max(0.0, threshold + excess.mean() * np.log(1 / share(excess.size)))
    return max(0.0, threshold + pareto(excess, share(excess.size)))


PARENTS = {
    "laplace": lambda rng, size: rng.laplace(size=size),
    "gamma": lambda rng, size: rng.gamma(0.6, size=size) * rng.choice([-1, 1], size),
    "normal": lambda rng, size: rng.normal(size=size),
    "student": lambda rng, size: rng.standard_t(3, size),
}


MET = [("laplace", 0.1), ("laplace", 0.001), ("gamma", 0.01), ("normal", 0.001), ("student", 0.1)]
OTHERS = [(parent, ratio) for parent in PARENTS for ratio in (0.1, 0.01, 0.001) if (parent, ratio) not in MET]
PARENTS_AND_RATIOS = pytest.mark.parametrize(("parent", "ratio"), [*MET, *(marks.slow(*case) for case in OTHERS)])


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize("stages", [1, 2, 3, 4])
@PARENTS_AND_RATIOS
def test_sidco_selects_above_the_corrected_threshold(distribution, stages, parent, ratio):
    array = (1e-3 * PARENTS[parent](np.random.default_rng(5), 100_000)).astype(np.float32)
    array[:3000] = 0
    compressor = SIDCo(ratio=ratio, distribution=distribution, stages=stages)
    check_selected(compressor, array, corrected(distribution, array, ratio, stages))


def check_selected(compressor, array, threshold):
    """What is selected is what exceeds a threshold; the largest elements where nothing does, or far too many do."""
    selection = compressor.select(accumulated(array), Context())
    magnitudes = np.abs(array.astype(np.float64))
    if not 0 < (magnitudes > threshold).sum() <= 4 * compressor.ratio * array.size + 1024:
        exact = np.argsort(-magnitudes, kind="stable")[: int(compressor.ratio * array.size + 0.5)]
        assert selection.indices.tolist() == np.sort(exact).tolist()
        return
    # Elements within 1e-5 of the threshold may fall on either side of it.
    surely = np.flatnonzero(magnitudes > threshold * (1 + 1e-5))
    perhaps = np.flatnonzero(magnitudes > threshold * (1 - 1e-5))
    assert np.isin(surely, selection.indices).all()
    assert np.isin(selection.indices, perhaps).all()
    np.testing.assert_array_equal(selection.values, array[selection.indices])
    assert (np.diff(selection.indices.astype(np.int64)) > 0).all()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
def test_sidco_of_a_large_array_fits_a_sample(distribution):
    size, ratio = 3_500_000, 0.01
    array = np.random.default_rng(6).laplace(size=size).astype(np.float32)
    selection = SIDCo(ratio=ratio, distribution=distribution).select(accumulated(array), Context())
    assert 0.95 < selection.indices.size / (ratio * size) < 1.05
    assert np.abs(selection.values).min() > np.delete(np.abs(array), selection.indices).max()


@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@PARENTS_AND_RATIOS
def test_sidco_reaches_the_ratio_on_average(distribution, parent, ratio):
    rng, context = np.random.default_rng(7), Context()
    pool = [PARENTS[parent](rng, 200_000).astype(np.float32) for _ in range(5)]
    compressor = SIDCo(ratio=ratio, distribution=distribution)
    reached = [
        compressor.select(accumulated(pool[step % 5]), context).indices.size / (ratio * 200_000) for step in range(60)
    ]
    assert 0.8 <= np.mean(reached[10:]) <= 1.25


def test_sidco_number_of_stages_climbs():
    """Too few are selected, and a stage more makes it worse: the next change goes the other way."""
    memory = {"sidco.stages": 3}

    def look(reached):
        for _ in range(5):
            sidco._adapt(memory, reached, 0.001)
        return memory["sidco.stages"]

    assert look(0.9) == 3  # within the band
    assert look(0.7) == 4
    assert look(0.5) == 3  # worse than before
    assert look(0.4) == 4  # worse again
    assert look(0.6) == 5  # better: go on
    assert look(1.1) == 5
    memory["sidco.stages"] = 1
    memory["sidco.direction"] = -1
    assert look(3.0) == 2  # turns round at the end, whatever it did before
    memory["sidco.stages"] = 10
    memory["sidco.direction"] = 1
    assert look(2.9) == 9  # there are at most log2(1 / ratio)


class Paper:
    """A rank that runs the paper's SIDCo on float64: fixed shares, its rule for stages, and whatever comes of it."""

    def __init__(self, distribution, ratio, numel):
        self.distribution, self.ratio = distribution, ratio
        self.k = max(1, int(ratio * numel + 0.5))
        self.residual, self.stages, self.reached = np.zeros(numel), 1, []

    def step(self, gradient):
        """Return what the rank sends, as an array with zeros."""
        accumulated = gradient + self.residual
        magnitudes, delta = np.abs(accumulated), self.k / gradient.size
        stages = self.stages if delta < 0.25 else 1
        threshold = first(self.distribution, magnitudes, delta if stages == 1 else 0.25)
        for _ in range(stages - 1):
            excess = magnitudes[magnitudes > threshold] - threshold
            if not excess.size:
                break
            share = (delta / 0.25) ** (1 / (stages - 1))
            alike = self.distribution == "exponential" or excess.var() == 0
            threshold += excess.mean() * np.log(1 / share) if alike else pareto(excess, share)
        sent = np.where(magnitudes > threshold, accumulated, 0)
        self.residual = accumulated - sent
        self.reached.append((magnitudes > threshold).sum() / self.k)
        if len(self.reached) % 5 == 0:
            mean = np.mean(self.reached[-5:])
            self.stages += int(mean < 0.8) - int(mean > 1.2)
            self.stages = min(max(1, self.stages), int(np.ceil(np.log2(1 / self.ratio))))
        return sent


@pytest.mark.parametrize("size", [3, *(marks.slow(size) for size in (1, 2, 4))])
@pytest.mark.parametrize("distribution", DISTRIBUTIONS)
@pytest.mark.parametrize(("parent", "numel", "ratio"), [("normal", 5000, 0.002), ("student", 1500, 0.001)])
def test_sidco_as_published_runs_the_paper(size, distribution, parent, numel, ratio):
    compressor = {"id": "sidco", "as_published": True, "ratio": ratio, "distribution": distribution}
    ranks = Ranks(size, compressor, "allgather")
    papers = [Paper(distribution, ratio, numel) for _ in range(size)]
    rng = np.random.default_rng(11)
    stages = set()
    for _ in range(35):
        gradients = [PARENTS[parent](rng, numel) for _ in range(size)]
        means = ranks.reduce([{"w": gradient} for gradient in gradients])
        expected = sum(paper.step(gradient) for paper, gradient in zip(papers, gradients, strict=True)) / size
        for mean in means:
            np.testing.assert_allclose(mean["w"], expected, rtol=1e-9, atol=1e-12)
        for paper, residual in zip(papers, ranks.residuals("w"), strict=True):
            np.testing.assert_allclose(residual, paper.residual, rtol=1e-9, atol=1e-12)
        stages |= {paper.stages for paper in papers}
    reached = np.array([paper.reached for paper in papers])
    if parent == "normal" and distribution != "pareto":
        assert len(stages) > 1, "too few are selected at first"
    assert abs(reached - 1).max() > 0.5, "estimates are sent as they are, bad ones too"


def test_sidco_of_few_elements_selects_exactly():
    random = np.random.default_rng(4)
    for numel, exact in ((2047, True), (2048, False)):
        counts = set()
        for _ in range(10):
            array = random.standard_t(3, numel)
            selection = SIDCo(ratio=0.1).select(accumulated(array), Context())
            counts.add(selection.indices.size - int(0.1 * numel + 0.5))
            assert np.abs(selection.values).min() >= np.delete(np.abs(array), selection.indices).max()
        assert (counts == {0}) is exact


def test_sidco_as_published_may_send_nothing_or_too_much():
    outlier = np.where(np.arange(5000) == 17, 1e4, 1e-3)
    counts = {}
    for name, array in {"outlier": outlier, "equal": np.full(5000, 2.5), "zeros": np.zeros(5000)}.items():
        for published in (False, True):
            compressor = SIDCo(ratio=0.001, published=published, corrections=False)
            selection = compressor.select(accumulated(array), Context())
            counts[name, published] = selection.indices.size
    assert counts == {
        ("outlier", False): 1,  # by the estimate
        ("outlier", True): 1,
        ("equal", False): 5,
        ("equal", True): 0,
        ("zeros", False): 0,
        ("zeros", True): 0,
    }
    peaked = np.random.default_rng(1).gamma(0.1, size=100_000)
    sizes = [
        SIDCo(ratio=0.001, published=published, corrections=False).select(accumulated(peaked), Context()).indices.size
        for published in (False, True)
    ]
    assert sizes == [100, (peaked > peaked.mean() * np.log(1000)).sum()]
    assert sizes[1] > 4 * 100 + 1024


def test_sidco_as_published_has_no_warm_up():
    compressor = get_compressor({"id": "sidco", "as_published": True})
    assert compressor == SIDCo.as_published()
    assert (compressor.corrections, compressor.bounded) == (False, False)
    assert get_compressor(json.loads(json.dumps(compressor.get_config()))) == compressor
    assert SIDCo.as_published(corrections=True).corrections
    assert SIDCo(corrections=False) != compressor
    assert SIDCo(corrections=False).bounded
    assert (choose_warmup(None, SIDCo()), choose_warmup(None, compressor)) == (20, 0)
    with pytest.raises(ConfigurationError, match="sidco: published must be True or False, got 1"):
        SIDCo(published=1)
