"""Flexible communication under a simulated network; its choices against every option there is."""

import numpy as np
import pytest
from marks import slow
from networks import Link
from worlds import CheckedRanks

import mpicomp
from mpicomp.systems import flexible
from mpicomp.systems.flexible import Option, candidates

SHAPES = {"conv": (40, 50, 5), "bias": (17,), "fc": (300, 100)}


def gradients(step, rank, alike=0.0):
    local, common = np.random.default_rng((step, rank)), np.random.default_rng((step, 1000))
    return {
        name: (alike * common.laplace(size=shape) + (1 - alike) * local.laplace(size=shape)).astype(np.float32)
        for name, shape in SHAPES.items()
    }


class Ranks(CheckedRanks):
    """Reducers on a simulated network; every choice is noted with the objectives that it was made from."""

    def __init__(self, size, link, compressor=None, collective="auto", bucket_bytes=1 << 20, compute_s=0.0, **settings):
        policy = {"id": "flexible", **settings}
        super().__init__(size, compressor, collective, policy, network=link, bucket_bytes=bucket_bytes, tolerance=1e-5)
        self.compute_s = compute_s
        self.policy = self.reducers[0].policy
        self.count, self.choices, self.objectives = 0, [], None
        objectives = self.policy.objectives

        def noted():
            self.objectives = objectives()
            return self.objectives

        self.policy.objectives = noted  # called at every choice

    def step(self, make=gradients):
        for end in self.world.transports:
            end.seconds += self.compute_s
        self.objectives = None
        buckets = super().step([make(self.count, rank) for rank in range(len(self.reducers))])
        if self.objectives is not None:
            self.choices.append((self.count, self.objectives, self.policy.current))
        assert len({reducer.policy.current for reducer in self.reducers}) == 1
        self.count += 1
        return buckets


def nothing_beats(objectives, place):
    seconds, cost = objectives[place]
    return not any(s <= seconds and c <= cost and (s < seconds or c < cost) for s, c in objectives.tolist())


def scores(objectives):
    """What the choice minimises, for options on the front; infinite for the others."""
    on = [place for place in range(len(objectives)) if nothing_beats(objectives, place)]
    low, high = objectives[on].min(axis=0), objectives[on].max(axis=0)
    out = []
    for place in range(len(objectives)):
        time, cost = (objectives[place] - low) / np.where(high > low, high - low, 1)
        out.append(max(0.6 * time, 0.4 * cost) if place in on else np.inf)
    return out


def run_of(bucket):
    if bucket.compressor["id"] == "dense":
        return Option(1.0, "dense")
    return Option(bucket.ratio, bucket.collective.partition(":")[0])


LINKS = {"slow": Link(1e-5, 20e6), "fast": Link(1e-6, 100e9), "far": Link(1e-2, 1e9), "middle": Link(1e-4, 1e9)}


@pytest.mark.parametrize("link", ["slow", "middle", slow("far"), slow("fast")])
def test_the_choice_is_on_the_exact_front(link):
    ranks = Ranks(4, Link(LINKS[link].latency, LINKS[link].bits), every=20)
    for _ in range(60):
        ranks.step()
    assert len(ranks.choices) >= 3
    for _, objectives, current in ranks.choices:
        place = ranks.policy.options.index(current)
        assert nothing_beats(objectives, place)
        found = scores(objectives)
        assert found[place] == min(found)


@pytest.mark.parametrize("size", [1, 2, 3])
def test_gains_are_those_of_the_accumulated_gradients(size):
    ranks = Ranks(size, None, every=7, collective="allgather", bucket_bytes=40_001)
    ratios, checked = candidates(0.001, 0.1, 3.0), 0
    assert ratios == pytest.approx([0.001, 0.1 / 27, 0.1 / 9, 0.1 / 3, 0.1], rel=1e-3)  # the paper's
    for _ in range(30):
        known = len(ranks.choices)
        surveyed = ranks.accumulated[-1:]
        ranks.step()
        if len(ranks.choices) == known:
            continue
        _, objectives, _ = ranks.choices[-1]
        checked += 1
        for option, (_, cost) in zip(ranks.policy.options, objectives, strict=True):
            kept = energy = 0.0
            for names in (["conv", "bias"], ["fc"]):  # the buckets
                for entry in surveyed[0]:
                    squares = np.sort(np.concatenate([entry[name].ravel() ** 2 for name in names]))[::-1]
                    kept += squares[: int(option.ratio * squares.size + 0.5)].sum()
                    energy += squares.sum()
            # A bin is 2**0.5 wide in energy; the largest of its elements are taken to have its mean.
            assert kept / energy / (2**1.5 / (1 + 2**0.5)) <= 1 / cost <= kept / energy * (1 + 1e-3)
    assert checked >= 3
    assert [option.ratio for option in ranks.policy.options] == ratios


@pytest.mark.parametrize("size", [3, slow(6)])
def test_a_change_of_the_network_is_followed_within_ten_steps(size):
    link = Link(1e-3, 500e6)
    # Steps are long enough to learn from all of them.
    ranks = Ranks(size, link, compute_s=0.2, every=100_000, gain_threshold=1e6)
    for _ in range(40):
        ranks.step()
    for bits in (2e6, 500e6, 2e6):
        link.bits = bits
        before = len(ranks.choices)
        for _ in range(10):
            ranks.step()
        assert len(ranks.choices) > before
        _, objectives, current = ranks.choices[-1]
        found = scores(objectives)
        assert found[ranks.policy.options.index(current)] == min(found)
        # What was chosen is what is run.
        assert run_of(ranks.step()[0]) == current


def test_a_change_of_the_gain_has_it_measured_anew():
    ranks = Ranks(2, Link(1e-5, 20e6), collective="allgather", every=100_000)
    for _ in range(150):
        ranks.step()
    settled = len(ranks.choices)
    for _ in range(40):
        ranks.step()
    assert len(ranks.choices) == settled

    def few(step, rank):
        return {name: gradient**5 for name, gradient in gradients(step, rank).items()}  # far fewer large ones

    for _ in range(20):
        ranks.step(few)
    assert len(ranks.choices) > settled


@pytest.mark.parametrize("collective", ["star-topk:ring", "var-topk:ring"])
def test_what_borrowed_indices_gain_is_seen(collective):
    """With gradients that have nothing in common another rank's indices gain little."""
    ranks = Ranks(4, Link(1e-5, 20e6), collective=collective, gain_threshold=0.05)
    for _ in range(60):
        buckets = ranks.step(lambda step, rank: gradients(step, rank, 0.0))
    policy = ranks.policy
    option = policy.current
    [[_, _, share]] = [entry for entry in policy.state_dict()["seen"] if entry[:2] == [option.ratio, option.kind]]
    assert 0 < share < 0.9
    gains = []
    for _ in range(12):
        [bucket] = ranks.step(lambda step, rank: gradients(step, rank, 0.0))
        sent = sum(
            np.square(array[name] - left[name]).sum()
            for array, left in zip(ranks.accumulated[-1], ranks.left, strict=True)
            for name in SHAPES
        )
        energy = sum(np.square(array[name]).sum() for array in ranks.accumulated[-1] for name in SHAPES)
        gains.append(sent / energy)
        assert bucket.gain == pytest.approx(sent / energy, rel=1e-3)
    assert run_of(buckets[0]) == option
    cost = policy.objectives()[policy.options.index(option), 1]
    assert 1 / cost == pytest.approx(np.mean(gains), rel=0.2)


@pytest.mark.parametrize("size", [1, slow(2), 3, slow(4)])
@pytest.mark.parametrize("network", [True, False])
def test_nothing_is_lost_while_plans_change(size, network):
    link = Link(1e-5, 100e6)
    ranks = Ranks(size, link if network else None, every=5, bucket_bytes=40_001, gain_threshold=0.02)
    seen = set()
    for step in range(80):
        link.bits = 20e6 if step % 40 < 20 else 50e9

        def make(number, rank, power=1 + step // 10 % 3):
            return {
                name: np.sign(gradient) * np.abs(gradient) ** power
                for name, gradient in gradients(number, rank).items()
            }

        seen.add(run_of(ranks.step(make)[0]))
    assert len(seen) >= (3 if size > 1 else 1)


def test_ratios_of_another_compressor_are_chosen():
    ranks = Ranks(3, Link(1e-5, 20e6), mpicomp.RandomK(ratio=0.01), every=10)
    for _ in range(30):
        [bucket] = ranks.step()
    assert len(ranks.choices) >= 2
    for _, objectives, current in ranks.choices:
        assert nothing_beats(objectives, ranks.policy.options.index(current))
    assert bucket.compressor["id"] in ("randomk", "dense")


def test_the_front_is_what_nothing_dominates_and_choices_are_those_of_the_formulas():
    random = np.random.default_rng(0)
    for turn in range(100):
        count = int(random.integers(2, 25))
        rows = random.integers(0, 4, (count, 2)).astype(float) if turn % 2 else random.random((count, 2)) * [3, 100]
        front = rows[flexible.pareto_front(rows)]
        best = [place for place in range(len(rows)) if nothing_beats(rows, place)]
        assert front.tolist() == np.unique(rows[best], axis=0).tolist()
        place, on_front = flexible.pick(rows, (0.6, 0.4))
        found = scores(rows)
        assert on_front == len(front)
        assert found[place] == pytest.approx(min(found), abs=1e-12)
