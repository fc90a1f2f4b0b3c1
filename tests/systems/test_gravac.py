"""GraVAC against a step-by-step reading of its paper, and every branch that it may take."""

import json

import numpy as np
import pytest
from marks import slow
from networks import Link
from worlds import Ranks

import mpicomp

LAG = 2  # a step is decided with what is known of the second step before it
SIZES = {"a": 6000, "b": 3000}  # a bucket each


class Timed(Ranks):
    """Reducers of several ranks under a simulated network, whose steps take some seconds besides."""

    def __init__(self, size, link, policy, compute_s=1e-3, collective="allgather", **settings):
        policy = {"id": "gravac", "every": 1} | policy
        super().__init__(size, mpicomp.TopK(), collective, policy, network=link, **settings)
        self.compute_s = compute_s

    def step(self, gradients, pause_s=0.0):
        """Do a step; give its ratio (None: dense) and when it began."""
        for end in self.world.transports:
            end.seconds += self.compute_s + pause_s
        began = max(end.seconds for end in self.world.transports)
        self.reduce(gradients)
        plans = {(bucket.ratio, bucket.reason) for r in self.reducers for bucket in r.last_step.buckets}
        assert len(plans) == 1, "all ranks and buckets follow one decision"
        return plans.pop()[0], began

    @property
    def state(self):
        states = [r.policy.state_dict() for r in self.reducers]
        assert all(state == states[0] for state in states)
        return states[0]


class Paper:
    """Algorithm 1, with compression factors (CF); what a step is decided with is two steps old.

    The prose counts where it contradicts the listing; a throughput is the median of a window. Gains are exact: of the
    largest elements after sorting, one selection for each bucket and rank. Margins say by how much gains could differ
    without another decision.
    """

    def __init__(self, theta_min, theta_max, scaling, window, omega, epsilon, smoothing, every=1):
        exponents = [1, 2, 4, 8, 16] if scaling == "exponential" else range(1, 17)
        self.factors = [theta_min]
        for exponent in exponents:
            if self.factors[-1] < theta_max:
                self.factors.append(min(theta_min * 2**exponent, theta_max))
        self.theta_min, self.theta = self.factors[:2]
        self.window, self.omega, self.epsilon, self.smoothing = window, omega, epsilon, smoothing
        self.every = every
        self.begins, self.counts, self.enough = 1, window, 3  # the CF at first; times of which the median counts
        self.residuals = None
        self.delta, self.throughputs, self.count, self.ended = {}, {}, 0, False
        self.margins, self.branches = [], set()  # margins with the step before which they counted
        self.steps = []  # of each: CF (1 is dense), gains by CF, and the smoothed gain at its CF

    def step(self, gradients, began):
        """Do a step, with the times at which steps began so far; give its CF."""
        if len(self.steps) >= LAG:
            self.observe(len(self.steps) - LAG, began)
        theta = self.decide()
        residuals = self.residuals or [dict.fromkeys(gradient, 0.0) for gradient in gradients]
        g_o = [
            {name: gradient[name] + before[name] for name in gradient}
            for gradient, before in zip(gradients, residuals, strict=True)
        ]
        arrays = [array for arrays in g_o for array in arrays.values()]
        gains = self.gains_of(arrays)
        for array in arrays:
            array[largest(array, kept(theta, array))] = 0
        self.residuals = g_o
        self.steps.append({"theta": theta, "gains": gains})
        return theta

    def gains_of(self, arrays):
        total = sum(np.sum(array**2) for array in arrays)
        selected = {f: [array[largest(array, kept(f, array))] for array in arrays] for f in self.factors}
        return {f: sum(np.sum(selection**2) for selection in selected[f]) / total for f in self.factors}

    def decide(self):
        if not self.delta:
            return self.begins
        for theta, branch in ((self.theta, "candidate"), (self.theta_min, "floor")):
            if theta not in self.delta:
                continue
            self.margins.append((len(self.steps), abs(self.delta[theta] - self.epsilon)))
            if self.delta[theta] >= self.epsilon:
                self.branches.add(branch)
                return theta
        self.branches.add("dense")
        return 1

    def observe(self, step, began):
        """Hear of a step, and with it of the seconds of the one before."""
        before = self.steps[step - 1]
        if step > 0 and before["theta"] > 1:
            self.throughputs.setdefault(before["theta"], []).append(
                (before["delta"] / (began[step] - began[step - 1]), before["delta"])
            )
        entry = self.steps[step]
        if step == 0 or (step - 1) % self.every == 0:  # gradients were looked at
            kept = (1 - self.smoothing) ** (1 if step < 2 else self.every)
            for theta, gain in entry["gains"].items():
                self.delta[theta] = (1 - kept) * gain + kept * self.delta.get(theta, gain)
        entry["delta"] = self.delta.get(entry["theta"])
        self.count += 1
        if self.count % self.window == 0 and not self.ended:
            self.check()

    def check(self):
        tried, floor = self.theta, self.delta[self.theta_min]
        following = [theta for theta in self.factors if theta > tried]
        self.theta = following[0] if following else tried
        change = abs(floor - self.delta[tried]) / floor
        if tried != self.theta_min:
            self.margins.append((len(self.steps), abs(change - self.omega) * floor / 2))
        if change <= self.omega:
            self.branches.add("raise")
            self.theta_min = tried
        last = {
            theta: throughput[-self.counts :]
            for theta, throughput in self.throughputs.items()
            if len(throughput) >= self.enough
        }
        ct = sorted(
            (np.median([throughput for throughput, _ in throughputs]), theta) for theta, throughputs in last.items()
        )
        if len(ct) > 1:
            change = (ct[-1][0] - ct[-2][0]) / ct[-2][0]
            least = min(delta for _, theta in ct[-2:] for _, delta in last[theta])
            margin = abs(change - self.omega) / (1 + change) * least / 2
            self.margins += [(step, margin) for step in range(LAG, len(self.steps) + 1)]  # gains of any may count
            if change <= self.omega:
                self.branches.add("end")
                self.ended = True
                self.theta = min(ct[-1][1], ct[-2][1])
                self.theta_min = min(self.theta_min, self.theta)


class AsPublished(Paper):
    """The same with the paper's two compressions and the last throughput; it begins at theta_min."""

    def __init__(self, theta_min, *others, **settings):
        super().__init__(theta_min, *others, **settings)
        self.begins, self.counts, self.enough = theta_min, 1, 1

    def gains_of(self, arrays):
        g_min = [array[largest(array, kept(self.theta_min, array))] for array in arrays]
        g_c = [
            left[largest(left, min(left.size, kept(self.theta, array)))]
            for left, array in zip(g_min, arrays, strict=True)
        ]
        total = sum(np.sum(array**2) for array in arrays)
        return {
            theta: sum(np.sum(selection**2) for selection in selected) / total
            for theta, selected in ((self.theta_min, g_min), (self.theta, g_c))
        }


def largest(array, count):
    return np.argsort(-np.abs(array), kind="stable")[:count]


def kept(factor, array):
    return max(1, int(array.size / factor + 0.5))


def recorded(size, phases, seed=0):
    """Gradients of all steps and ranks; the higher the number of a phase, the more its energy is concentrated."""
    rng = np.random.default_rng(seed)

    def gradient(numel, power):
        magnitudes = -np.log((np.arange(numel) + 0.5) / numel)
        return (rng.choice([-1, 1], numel) * rng.permutation(magnitudes) ** power).astype(np.float32)

    return [
        [{name: gradient(numel, power) for name, numel in SIZES.items()} for _ in range(size)]
        for steps, power in phases
        for _ in range(steps)
    ]


def replay(timed, paper, gradients, pauses=()):
    """Run steps of both; give their ratios, and by how much gains differed at most before each step."""
    began, ran, expected, errors = [], [], [], [0.0] * LAG
    for step, gradient in enumerate(gradients):
        exact = [{name: array.astype(np.float64) for name, array in one.items()} for one in gradient]
        theta = paper.step(exact, began)
        if paper.delta:
            gains = dict(zip(paper.factors, timed.state["gains"], strict=True))
            assert {theta for theta, gain in gains.items() if gain is not None} == set(paper.delta)
            errors.append(max(abs(gains[theta] - gain) for theta, gain in paper.delta.items()))
        ratio, start = timed.step(gradient, 100.0 if step in pauses else 0.0)
        began.append(start)
        ran.append(ratio)
        expected.append(None if theta == 1 else pytest.approx(1 / theta))
    return ran, expected, errors


# Steps and concentration of each phase, settings, and which branches are taken.
RECORDS = {
    "ends": (
        [(22, 6.0), (4, 0.2), (6, 2.0), (15, 5.0)],
        {"least": 0.005, "window": 4, "omega": 0.15, "epsilon": 0.65, "smoothing": 0.5},
        {"candidate", "dense", "raise", "end"},
    ),
    "goes on": (
        [(12, 3.0), (7, 0.2), (11, 1.5), (16, 6.0), (6, 0.2)],
        {"least": 0.01, "window": 7, "omega": 0.1, "epsilon": 0.7, "smoothing": 0.8},
        {"candidate", "floor", "dense", "raise"},
    ),
}


@pytest.mark.parametrize(
    ("every", "record", "scaling", "size", "pauses"),
    [
        (1, "ends", "exponential", 3, (4, 11)),
        (3, "ends", "geometric", 3, (4, 11)),
        (1, "goes on", "geometric", 3, (4, 11)),
        slow(3, "goes on", "exponential", 2, ()),
    ],
)
def test_ratios_are_those_of_the_paper(every, record, scaling, size, pauses):
    phases, settings, branches = RECORDS[record]
    named = {"most": 0.1, "scaling": scaling, "every": every} | settings
    timed = Timed(size, Link(1e-5, 4e6), named, bucket_bytes=4 * SIZES["a"])
    assert len(timed.reducers) == size
    paper_settings = {name: value for name, value in named.items() if name not in ("least", "most")}
    paper = Paper(1 / named["most"], 1 / named["least"], **paper_settings)
    gradients = recorded(size, phases)
    ran, expected, errors = replay(timed, paper, gradients, pauses)
    assert ran == expected
    assert len(timed.reducers[0].last_step.buckets) == 2
    assert paper.branches == branches or every > 1
    assert timed.state["ended"] == paper.ended
    # Spectra are not exact; no decision hangs on that where records are made for it.
    assert max(errors) > 0
    assert every > 1 or all(errors[step] < margin for step, margin in paper.margins)


@pytest.mark.parametrize("size", [2, slow(3), slow(4)])
@pytest.mark.parametrize("scaling", ["exponential", slow("geometric")])
@pytest.mark.parametrize("record", RECORDS)
def test_as_published_two_compressions_give_the_gains(record, scaling, size):
    phases, settings, _ = RECORDS[record]
    config = {"most": 0.1, "scaling": scaling} | settings
    timed = Timed(size, Link(1e-5, 4e6), config | {"as_published": True}, bucket_bytes=1 << 20)
    paper_settings = {name: value for name, value in config.items() if name not in ("least", "most")}
    paper = AsPublished(1 / config["most"], 1 / config["least"], **paper_settings)
    ran, expected, errors = replay(timed, paper, recorded(size, phases))
    assert ran == expected
    assert len(timed.reducers[0].last_step.buckets) == len(SIZES), "each array is a bucket of its own"
    assert {"candidate", "dense"} <= paper.branches
    assert paper.branches & {"raise", "end"}
    assert timed.state["ended"] == paper.ended
    assert max(errors) < 1e-5, "the gains of selections are exact, to float32"
    assert timed.state == json.loads(json.dumps(timed.state, allow_nan=False))


def test_gravac_as_published_is_dense_only_for_gains():
    policy = mpicomp.get_policy({"id": "gravac", "as_published": True})
    config = policy.get_config()
    assert (config["window"], config["every"], config["published"]) == (500, 1, True)
    assert mpicomp.get_policy(json.loads(json.dumps(config))).get_config() == config
    assert mpicomp.get_policy({"id": "gravac", "as_published": True, "window": 20}).window == 20
    for published, ratios in ((False, {None}), (True, {1.0, 0.9})):
        # Nearly all elements of four ranks are more than a sum of all of them.
        policy = {"as_published": published, "least": 0.9, "most": 1.0, "epsilon": 0.3}
        timed = Timed(4, Link(1e-5, 4e6), policy, collective="auto", **FIXED)
        assert {timed.step(levels([], ranks=4))[0] for _ in range(8)} == ratios


def test_any_selection_by_a_ratio_gives_gains_of_two_levels():
    policy = {"id": "gravac", "as_published": True, "least": 0.05, "most": 0.2}
    gains = {}
    for compressor in (mpicomp.TopK(), mpicomp.DGC(), mpicomp.SIDCo(), mpicomp.RandomK(), mpicomp.BlockRandomK()):
        ranks = Ranks(2, compressor, policy=policy, **FIXED)
        rng = np.random.default_rng(0)
        for _ in range(3):
            ranks.reduce([{"w": rng.standard_normal(60_000).astype(np.float32)} for _ in range(2)])
        gains[compressor.id] = ranks.reducers[0].policy.state_dict()["gains"][:2]
    # Energy of the largest 20 and 10 % of a normal distribution.
    assert gains["topk"] == pytest.approx([0.6498, 0.4393], abs=0.01)
    assert gains["dgc"] == pytest.approx(gains["topk"], abs=0.05)
    assert gains["sidco"] == pytest.approx(gains["topk"], abs=0.05)
    assert gains["randomk"] == pytest.approx([0.2, 0.1], abs=0.01)
    assert gains["blockrandomk"] == pytest.approx([0.2, 0.1], abs=0.02)


FIXED = {"feedback": False}


def levels(shares, numel=4000, ranks=2):
    """Give gradients of which some shares of elements hold some shares of the energy, each evenly."""
    parts = [np.full(round(share * numel), np.sqrt(energy / (share * numel))) for share, energy in shares]
    rest = numel - sum(part.size for part in parts)
    left = 1 - sum(energy for _, energy in shares)
    gradient = np.concatenate([*parts, np.full(rest, np.sqrt(left / rest))]).astype(np.float32)
    return [{"w": 1000 * gradient}] * ranks


EVEN = levels([])  # gain is ratio
SHARP = levels([(0.0005, 0.99)])  # two elements hold nearly everything


def test_the_search_ends_where_throughput_no_longer_grows():
    """Messages take nothing: a throughput is the gain over the same seconds, at every ratio."""
    policy = {"window": 5, "scaling": "geometric", "smoothing": 1.0}
    timed = Timed(2, Link(1e-6, 1e15), policy, compute_s=1.0, **FIXED)
    listens, ratios = [], []
    for _ in range(30):
        ratios.append(timed.step(SHARP)[0])
        listens.append(timed.reducers[0].policy.wants_telemetry)
    # After five steps 0.025 is the candidate; after ten both have been timed, and 0.05 is the higher one.
    assert ratios == [None] * 2 + [0.05] * 4 + [0.025] * 5 + [0.05] * 19
    assert listens == [True] * 10 + [False] * 20
    assert timed.state["ended"]
    assert timed.state["floor"] == timed.state["candidate"] == 1
    assert timed.reducers[0].last_step.buckets[0].reason.startswith("gravac: candidate 0.05 found, gain")
    assert [timed.step(entry)[0] for entry in [EVEN] * 3 + [SHARP] * 3] == [0.05, 0.05, None, None, None, 0.05]


def test_without_seconds_all_candidates_are_tried():
    ranks = Ranks(2, mpicomp.TopK(), policy={"id": "gravac", "window": 1, "smoothing": 1.0}, **FIXED)
    ratios = []
    for _ in range(9):
        ranks.reduce(SHARP)
        ratios.append(ranks.reducers[0].last_step.buckets[0].ratio)
    assert ratios == [None, None, 0.025, 0.1 / 16, 0.001, 0.001, 0.001, 0.001, 0.001]
    state = ranks.reducers[0].policy.state_dict()
    assert state["floor"] == 4
    assert not state["ended"]
    assert state["throughputs"] == [[]] * 5


def test_a_random_choice_gains_its_ratio():
    ranks = Ranks(2, mpicomp.RandomK(), policy={"id": "gravac", "least": 0.2, "most": 0.8, "epsilon": 0.3}, **FIXED)
    for _ in range(3):
        ranks.reduce(SHARP)
    assert ranks.reducers[0].policy.state_dict()["gains"] == pytest.approx([0.8, 0.4, 0.2])
    assert ranks.reducers[0].last_step.buckets[0].ratio == 0.4


def test_with_other_candidates_the_search_starts_again():
    first, other = (Timed(2, Link(1e-5, 4e6), {"window": 4, "scaling": s}) for s in ("exponential", "geometric"))
    for gradient in recorded(2, [(12, 5.0)]):
        first.step(gradient)
    assert (first.state["candidate"], first.state["steps"]) == (3, 11)
    for reducer in other.reducers:
        reducer.policy.load_state_dict(first.state, None)
    assert other.state["steps"] == 0
