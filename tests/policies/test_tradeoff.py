"""Time against progress: the best choice of all, against trying each one."""

import numpy as np
import pytest

from mpicomp.policies.plan_tradeoff import PlanTradeoff


def random_balance(seed, buckets):
    random = np.random.default_rng(seed)
    rows = random.integers(2, 6, buckets)
    return PlanTradeoff(
        penalties=[np.concatenate((random.random(count - 1), [0.0])) for count in rows],
        seconds=[random.exponential(0.1, count) for count in rows],
        weights=random.dirichlet(np.ones(buckets)).tolist(),
        ready=[*sorted((-random.exponential(0.2, buckets - 1)).tolist()), 0.0],
        compute_s=float(random.exponential(0.2)),
        limit=float(random.random()),
    )


def everything(balance):
    """Return each choice that loses no more than may be lost with its worth, one by one."""
    for place in np.ndindex(*[penalty.size for penalty in balance.penalties]):
        behind = [penalty[row] for penalty, row in zip(balance.penalties, place, strict=True)]
        lost = sum(entry * weight for entry, weight in zip(behind, balance.weights, strict=True))
        if lost > balance.limit or max(behind) > 2 * balance.limit:
            continue
        end = -1e9
        for seconds_of_bucket, row, ready in zip(balance.seconds, place, balance.ready, strict=True):
            end = max(end, ready) + seconds_of_bucket[row]
        yield place, (balance.compute_s + end) / (1 - lost)


@pytest.mark.parametrize("buckets", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_choice(seed, buckets):
    balance = random_balance(seed, buckets)
    found = balance.best()
    worths = dict(everything(balance))
    assert worths
    assert balance.allows(found)
    assert balance.time_per_dense_step(found) <= min(worths.values()) * 1.02  # what is lost is cut into 400 parts
    assert tuple(found) not in worths or balance.time_per_dense_step(found) == pytest.approx(worths[tuple(found)])


def test_no_bucket_loses_much_more_than_all():
    rows = [np.array([0.9, 0.0])] * 2, [np.array([0.0, 1.0])] * 2
    balance = PlanTradeoff(*rows, [0.01, 0.99], [0.0, 0.0], compute_s=1.0, limit=0.3)
    assert balance.best()[0] == 1  # its weight is small, but next to nothing of it would arrive
    assert not balance.allows([0, 1])


def test_where_nothing_may_be_lost():
    balance = PlanTradeoff([np.array([0.2, 0.0])], [np.array([0.1, 5.0])], [1.0], [0.0], compute_s=0.0, limit=0.0)
    assert balance.best() == [1]
