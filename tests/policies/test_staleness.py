"""How late gradients are: what is learnt of it, against residuals that are simulated one by one."""

import numpy as np
import pytest
from worlds import Ranks

import mpicomp
from mpicomp.policies.staleness import Delays, Lateness
from mpicomp.policies.tradeoff import Balance, behind, delay_for


class Worker:
    """One rank with top-k and a residual, by sorting."""

    def __init__(self, numel=4000):
        self.random = np.random.default_rng(0)
        self.scales = self.random.pareto(3.0, numel) + 0.1
        self.residual = np.zeros(numel)

    def step(self, ratio):
        """Give the energy of what is accumulated, and the gain."""
        accumulated = self.residual + self.scales * self.random.standard_normal(self.scales.size)
        sent = np.argsort(-np.abs(accumulated))[: round(ratio * accumulated.size)]
        self.residual = accumulated.copy()
        self.residual[sent] = 0
        energy = float((accumulated**2).sum())
        return energy, 1 - float((self.residual**2).sum()) / energy


def settled(ratio, steps=400):
    worker = Worker()
    told = [worker.step(ratio) for _ in range(steps)][steps // 2 :]
    lost = np.mean([energy * (1 - gain) for energy, gain in told])
    return float(lost / np.mean([energy * gain for energy, gain in told])), told


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.2])
def test_lost_over_sent_is_the_time_that_energy_waits(ratio):
    """In a steady state as much energy is sent as is added: the delay is the residual over a gradient."""
    late, told = settled(ratio)
    added = float((Worker().scales ** 2).sum())
    residual = np.mean([energy * (1 - gain) for energy, gain in told])
    assert late == pytest.approx(residual / added, rel=0.1)


@pytest.mark.parametrize("collective", ["allgather", "star-topk:ring", "gtopk"])
def test_records_tell_the_delay(collective):
    """Whatever the policy is: energy and gain of a bucket give what waits in residuals, and what was sent of it."""
    ranks = Ranks(3, mpicomp.TopK(ratio=0.05), collective)
    random = np.random.default_rng(2)
    left = [np.zeros(500)] * 3
    for _ in range(10):
        gradients = [random.laplace(size=500).astype(np.float32) for _ in left]
        ranks.reduce([{"w": own} for own in gradients])
        accumulated = [own + before for own, before in zip(gradients, left, strict=True)]
        left = [own.astype(np.float64) for own in ranks.residuals("w")]
        energy, waits = (sum(float((own**2).sum()) for own in arrays) for arrays in (accumulated, left))
        for reducer in ranks.reducers:
            [bucket] = reducer.last_step.buckets
            assert bucket.energy == pytest.approx(energy, rel=1e-5)
            assert (1 - bucket.gain) / bucket.gain == pytest.approx(waits / (energy - waits), rel=1e-4)


@pytest.mark.parametrize("ratio", [0.01, 0.05, 0.2])
def test_a_delay_is_learnt_from_gains(ratio):
    late, _ = settled(ratio)
    known = Delays(ratio=0.05, delay=3.0)
    worker = Worker()
    for _ in range(300):
        known.observe(ratio, 1.0, *worker.step(ratio))
    assert known.steady
    assert float(known.at(np.array(ratio))) == pytest.approx(late, rel=0.25)
    assert known.inflow == pytest.approx(float((worker.scales**2).sum()), rel=0.25)


def test_smaller_ratios_are_later_and_the_nearest_measurement_counts():
    known = Delays(ratio=0.04, delay=2.0)
    ratios = np.array([0.01, 0.02, 0.04, 0.08])
    late = known.at(ratios)
    assert (np.diff(late) < 0).all()
    assert late[2] == 2.0
    assert late[1] / late[2] == pytest.approx(late[0] / late[1])


def test_nothing_is_learnt_until_a_residual_has_filled():
    known = Delays(ratio=0.05, delay=4.0)
    known.observe(None, 1.0, 10.0, 1.0)
    assert known.observe(0.05, 1.0, 10.0, 0.9) is None
    assert not known.steady
    waited = 1
    while known.observe(0.05, 1.0, 10.0, 0.9) is None:
        waited += 1
        assert known.delay == 4.0
    assert waited >= 2 * 4.0  # twice its delay, after a step that sent everything
    assert known.delay < 4.0


def test_a_collective_that_is_later_does_not_count_for_the_ratio():
    known = Delays(ratio=0.05, delay=2.0)
    for _ in range(60):
        seen = known.observe(0.05, 2.5, 1.0, 1 / 6)  # a delay of 5
    assert seen == pytest.approx(2.5)
    assert known.delay == pytest.approx(2.0)


def test_the_first_guess_counts_once():
    known = Delays()
    assert np.isinf(known.at(np.array([0.1, 0.9]))).all()
    known.guess(0.5)
    first = known.delay
    known.guess(0.9)
    assert known.delay == first > 1


def test_what_is_known_survives():
    known = Delays(ratio=0.03, delay=1.5)
    again = Delays.from_state(known.state())
    assert again.at(np.array([0.01])) == known.at(np.array([0.01]))
    assert Delays.from_state(Delays().state()).ratio is None


@pytest.mark.parametrize("steps", [0.0, 0.01, 1.0, 30.0])
@pytest.mark.parametrize("signal", [0.01, 1.0])
def test_the_delay_that_sets_training_back_by_some_steps(steps, signal):
    assert behind(delay_for(steps, signal), signal) == pytest.approx(steps)


def random_balance(seed, buckets):
    random = np.random.default_rng(seed)
    rows = random.integers(2, 6, buckets)
    delays = [np.concatenate((random.exponential(2.0, count - 1), [0.0])) for count in rows]
    weights = random.dirichlet(np.ones(buckets))
    return Balance(
        delays=delays,
        seconds=[random.exponential(0.1, count) for count in rows],
        weights=weights.tolist(),
        ready=[*sorted((-random.exponential(0.2, buckets - 1)).tolist()), 0.0],
        beside=float(random.exponential(0.2)),
        age=float(random.integers(1, 300)),
        longest=float(random.exponential(2.0)),
        signal=float(random.uniform(0.005, 0.5)),
    )


def everything(balance):
    """Give each choice within the limits with its worth, one by one."""
    for place in np.ndindex(*[own.size for own in balance.delays]):
        late = [own[row] for own, row in zip(balance.delays, place, strict=True)]
        delay = sum(own * weight for own, weight in zip(late, balance.weights, strict=True))
        if delay > balance.longest or max(late) > 3 * balance.longest:
            continue
        end = -1e9
        for own, row, ready in zip(balance.seconds, place, balance.ready, strict=True):
            end = max(end, ready) + own[row]
        yield place, (balance.age + 120 * balance.signal * delay**2 / (1 + delay)) * (balance.beside + end)


@pytest.mark.parametrize("buckets", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_choice(seed, buckets):
    balance = random_balance(seed, buckets)
    found = balance.best()
    worths = dict(everything(balance))
    assert balance.allows(found)
    assert balance.worth(found) <= min(worths.values()) * 1.02  # delays are cut into 400 parts
    assert tuple(found) not in worths or balance.worth(found) == pytest.approx(worths[tuple(found)])


def test_late_buckets_are_not_allowed():
    rows = [np.array([9.0, 0.0])] * 2, [np.array([0.0, 1.0])] * 2
    balance = Balance(*rows, [0.01, 0.99], [0.0, 0.0], beside=1.0, age=100, longest=1.0, signal=0.02)
    assert balance.best()[0] == 1  # its weight is small, but it would be nine steps late
    assert not balance.allows([0, 1])


def test_a_quantiser_is_late_by_what_it_left_out_and_then_by_what_it_did():
    own = Lateness()
    assert own.delay == np.inf
    own.guess(np.nan)
    assert own.delay == np.inf
    own.guess(0.2)
    assert own.delay == pytest.approx(0.25)
    for _ in range(100):
        own.observe(gain=0.5, steps=1)
    assert own.delay == pytest.approx(1.0, rel=1e-3)
    own.guess(0.2)
    assert own.delay == pytest.approx(1.0, rel=1e-3)
    assert Lateness.from_state(own.state()) == own
    assert Lateness.from_state(Lateness(0.3).state()) == Lateness()


def test_steps_that_were_not_looked_at_count():
    often, seldom = Lateness(0.3), Lateness(0.3)
    for _ in range(6):
        often.observe(0.6, 1)
    seldom.observe(0.6, 6)
    assert seldom.delay == pytest.approx(often.delay)
