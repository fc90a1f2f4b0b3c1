"""Accordion against its rule, written down for one part at a time."""

import glob

import numpy as np
import pytest
from marks import slow
from networks import Link
from worlds import Ranks

import mpicomp
from mpicomp.errors import IncompatiblePairError

LAG = 2  # a step is planned with what is known of the second step before it
SIZES = {"steady": 400, "moving[0]": 300, "late*": 200}  # names as file patterns would misread them
LEAST, MOST = 0.02, 0.2


class Rule:
    """One part: is it in a critical regime?"""

    def __init__(self, every, threshold):
        self.every, self.threshold = every, threshold
        self.old, self.norms, self.critical, self.highest = None, [], True, 0.0
        self.changes = []

    def observe(self, norm, lr):
        if lr <= self.highest / 2:
            self.norms, self.critical, self.highest = [], True, 0.0
        self.highest = max(self.highest, lr)
        self.norms.append(norm)
        if len(self.norms) == self.every:
            new = np.mean(self.norms)
            if self.old is None:
                self.critical = True  # there is nothing to compare with
            elif self.old == 0:
                self.critical = True
            else:
                change = abs(new - self.old) / self.old
                self.changes.append(change)
                self.critical = change >= self.threshold
            self.old, self.norms = new, []


def recorded(size, steps):
    """Gradients of all steps and ranks: one layer's norm stays, one's changes now and then, one's is 0 at first."""
    rng = np.random.default_rng(0)
    scales = {
        "steady": np.ones(steps),
        "moving[0]": np.repeat([1, 1, 10, 10, 10, 0.5, 0.5, 0.5, 0.5, 0.5], steps // 10),
        "late*": np.repeat([0, 0, 0, 1, 1, 1, 1, 1, 1, 1], steps // 10),
    }
    return [
        [
            {name: (scales[name][i] * rng.normal(size=n)).astype(np.float32) for name, n in SIZES.items()}
            for _ in range(size)
        ]
        for i in range(steps)
    ]


def norm(arrays):
    return np.sqrt(sum(np.sum(array.astype(float) ** 2) for array in arrays))


def replay(ranks, gradients, parts, every, threshold, lrs=None):
    """Run steps; give for each part what was expected and what was run, and the rules."""
    rules = {part: Rule(every, threshold) for part in parts}
    received, expected, run = [], [], []
    residuals = {name: [0.0] * len(gradients[0]) for name in SIZES}
    for step, gradient in enumerate(gradients):
        if step >= LAG:
            for part, rule in rules.items():
                rule.observe(received[step - LAG][part], 1.0 if lrs is None else lrs[step - LAG])
        expected.append({part: MOST if rule.critical else LEAST for part, rule in rules.items()})
        accumulated = {
            name: [one[name] + r for one, r in zip(gradient, residuals[name], strict=True)] for name in SIZES
        }
        received.append(
            {part: norm([array for name in names for array in accumulated[name]]) for part, names in parts.items()}
        )
        means = ranks.reduce(gradient, None if lrs is None else lrs[step])
        assert all(one[name].tobytes() == means[0][name].tobytes() for one in means for name in SIZES)
        residuals = {name: ranks.residuals(name) for name in SIZES}
        records = [reducer.last_step.buckets for reducer in ranks.reducers]
        assert len({str([(b.compressor, b.collective, b.reason) for b in record]) for record in records}) == 1
        run.append(records[0])
    return expected, run, rules


def ratios_of(buckets):
    """Return the ratio of each layer, by name, out of the records."""
    found = [bucket.compressor["layers"] for bucket in buckets]
    return {name: layers[glob.escape(name)] for layers in found for name in SIZES if glob.escape(name) in layers}


def policy(**settings):
    return {"id": "accordion", "least": LEAST, "most": MOST} | settings


@pytest.mark.parametrize(("size", "bucket_bytes"), [(1, 1 << 20), (2, 1), (3, 1 << 20), slow(4, 1)])
def test_layers_of_top_k(size, bucket_bytes):
    ranks = Ranks(size, mpicomp.TopK(), policy=policy(every=4), bucket_bytes=bucket_bytes)
    parts = {name: [name] for name in SIZES}
    expected, run, rules = replay(ranks, recorded(size, 60), parts, 4, 0.5)
    for ratios, buckets in zip(expected, run, strict=True):
        assert ratios_of(buckets) == ratios
        for b in buckets:
            assert b.ratio == pytest.approx(b.ratio_reached)
    for rule in rules.values():  # what is sent does not hang on rounding
        assert min(abs(change - 0.5) for change in rule.changes) > 0.001
    for name in SIZES:
        assert {ratios[name] for ratios in expected} == {LEAST, MOST}, "all of it is seen"


@pytest.mark.parametrize("compressor", [mpicomp.SIDCo(), mpicomp.RandomK()], ids=str)
def test_buckets_of_other_compressors(compressor):
    ranks = Ranks(2, compressor, policy=policy(every=4), bucket_bytes=4 * 700)
    parts = {"first": ["steady", "moving[0]"], "second": ["late*"]}
    expected, run, rules = replay(ranks, recorded(2, 60), parts, 4, 0.5)
    for ratios, buckets in zip(expected, run, strict=True):
        assert [b.ratio for b in buckets] == [ratios["first"], ratios["second"]]
        assert all(b.compressor["id"] == compressor.id for b in buckets)
    for rule in rules.values():
        assert min(abs(change - 0.5) for change in rule.changes) > 0.001


def test_a_drop_of_the_learning_rate():
    steps = 40
    lrs = [1 - 0.01 * step for step in range(20)] + [0.1] * (steps - 20)  # first slowly, then at once
    ranks = Ranks(2, mpicomp.TopK(), policy=policy(every=5), feedback=False)
    rng = np.random.default_rng(0)
    gradients = [
        [{name: rng.normal(size=n).astype(np.float32) for name, n in SIZES.items()} for _ in range(2)]
        for _ in range(steps)
    ]
    expected, run, _ = replay(ranks, gradients, {name: [name] for name in SIZES}, 5, 0.5, lrs)
    assert [ratios_of(buckets) for buckets in run] == expected
    steady = [ratios["steady"] for ratios in expected]
    # Two periods pass until norms can be compared: steps 0 to 9, which count from step 11 on. Step 20 is the first of a
    # new period, known before step 22, and step 24 the last one, known before step 26.
    assert steady == [MOST] * 11 + [LEAST] * 11 + [MOST] * 4 + [LEAST] * 14


def test_other_layers_begin_anew():
    ranks = Ranks(2, mpicomp.TopK(), policy=policy(every=2), feedback=False)
    old = {"old": np.arange(1, 101, dtype=np.float32)}
    for _ in range(6):
        ranks.reduce([old] * 2)
    assert ranks.reducers[0].last_step.buckets[0].compressor["layers"] == {"old": LEAST}
    both = old | {"new": np.arange(1, 101, dtype=np.float32)}
    ranks.reduce([both] * 2)
    assert ranks.reducers[0].last_step.buckets[0].compressor["layers"] == {"old": LEAST, "new": MOST}


@pytest.mark.parametrize("policy", [{"id": "accordion", "every": 2}, {"id": "lgreco", "first": 2, "every": 2}])
def test_what_carries_no_ratios_of_layers_is_not_chosen(policy):
    """Where hosts have several ranks a hierarchical exchange is the fastest, and it cuts a bucket anywhere."""
    hosts = [0, 0, 1, 1]
    ranks = Ranks(4, "topk", policy=policy, hosts=hosts, network=Link(latency=50e-6, bits=1e8))
    rng = np.random.default_rng(0)
    for _ in range(8):
        ranks.reduce([{name: rng.normal(size=(300, 200)).astype(np.float32) for name in "ab"} for _ in hosts])
    plans = ranks.reducers[0].last_step.buckets
    assert all("hierarchical" not in bucket.collective for bucket in plans)
    assert any(bucket.compressor["layers"] for bucket in plans)
    with pytest.raises(IncompatiblePairError, match="does not fit collective 'hierarchical'"):
        Ranks(4, "topk", "hierarchical", policy=policy)
