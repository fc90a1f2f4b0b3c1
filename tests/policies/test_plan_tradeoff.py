"""The dynamic programs, and the best tradeoff of time against progress, against every choice there is."""

import itertools

import numpy as np
import pytest

from mpicomp.policies.plan_tradeoff import PlanTradeoff, least_makespan, least_total


def choices(errors):
    return [np.array(choice) for choice in itertools.product(*(range(row.size) for row in errors))]


def added(table, choice):
    return sum(row[place] for row, place in zip(table, choice, strict=True))


def end_of(seconds, ready, choice):
    """When the last bucket ends, from the words: each begins when it is ready and the one before it has ended."""
    end = 0.0
    for seconds_of_bucket, place, moment in zip(seconds, choice, ready, strict=True):
        end = max(end, moment) + seconds_of_bucket[place]
    return end


def problem(seed):
    """Make a random problem of up to 7 parts: errors that fall as sizes grow or have nothing to do with them."""
    random = np.random.default_rng(seed)
    parts = int(random.integers(1, 8))
    errors, sizes = [], []
    for _ in range(parts):
        settings = int(random.integers(1, 5))
        own_errors, own_sizes = random.exponential(size=settings) * random.choice([1.0, 30.0]), random.random(settings)
        if random.random() < 0.7:
            own_errors, own_sizes = np.sort(own_errors)[::-1], np.sort(own_sizes)
        if random.random() < 0.3:
            own_errors[random.integers(settings)] = 0.0
        if random.random() < 0.3:  # several choices then use up the limit exactly
            own_errors, own_sizes = np.ceil(own_errors), np.ceil(8 * own_sizes)
        errors.append(own_errors.copy())
        sizes.append(own_sizes.copy())
    default = np.array([random.integers(row.size) for row in errors])
    return errors, sizes, default, random


@pytest.mark.parametrize("bins", [20, 10_000])
def test_least_total_against_every_choice(bins):
    infeasible = tight = 0
    for seed in range(200):
        errors, sizes, default, random = problem(seed)
        limit = added(errors, default) * random.choice([1.0, 1.0, 0.6, 1.7])
        within = [choice for choice in choices(errors) if added(errors, choice) <= limit]
        found = least_total(errors, sizes, limit, bins=bins)
        if not within:
            infeasible += 1
            least = min(added(errors, choice) for choice in choices(errors))
            bound = limit * (1 + len(errors) / bins) * (1 + 1e-9)  # up to which rounding lets through
            assert added(errors, found) <= max(least * (1 + 1e-12), bound)
            continue
        best = min(added(sizes, choice) for choice in within)
        assert added(sizes, found) <= best * (1 + 1e-12)
        assert added(errors, found) <= limit * (1 + len(errors) / bins) * (1 + 1e-9)
        tight += added(errors, found) > limit
        against = least_total(errors, sizes, limit, default, bins)
        assert added(sizes, against) <= best * (1 + 1e-12)
        if added(errors, default) <= limit:
            assert added(sizes, against) <= added(sizes, default)
    assert infeasible > 0
    assert tight > 0  # the stated bound is needed


def test_nothing_is_within_the_limit():
    errors, sizes = [np.array([4.0, 3.0, 9.0]), np.array([1.0, 2.0])], [np.array([1.0, 2.0, 3.0]), np.array([1.0, 1.0])]
    assert least_total(errors, sizes, 2.0).tolist() == [1, 0]
    assert least_total(errors, sizes, 2.0, np.array([2, 1])).tolist() == [2, 1]
    assert least_total(errors, sizes, 0.0).tolist() == [1, 0]
    ends, choice_at = least_makespan(errors, sizes, [0.0, 0.0], 2.0, bins=10)
    assert np.isinf(ends).all()
    assert choice_at(10).tolist() == [1, 0]


def test_a_limit_of_nothing_takes_what_has_no_error():
    errors = [np.array([0.0, 1.0, 0.0]), np.array([1e-300, 0.0])]
    sizes = [np.array([5.0, 1.0, 4.0]), np.array([1.0, 9.0])]
    assert least_total(errors, sizes, 0.0).tolist() == [2, 1]
    ends, choice_at = least_makespan(errors, sizes, [0.0, 0.0], 0.0, bins=10)
    assert ends[0] == 13.0
    assert choice_at(0).tolist() == [2, 1]


def test_the_default_stays_where_nothing_is_smaller():
    errors, sizes = [np.array([1.0, 1.0])] * 2, [np.array([2.0, 2.0])] * 2
    for default in itertools.product(range(2), repeat=2):
        assert least_total(errors, sizes, 2.0, np.array(default)).tolist() == list(default)


def test_an_error_that_is_no_number_is_beyond_any_limit():
    errors, sizes = [np.array([np.nan, 1.0]), np.array([np.inf, 2.0])], [np.array([0.0, 1.0])] * 2
    assert least_total(errors, sizes, 3.0).tolist() == [1, 1]


@pytest.mark.parametrize("bins", [10, 60])
def test_least_makespan_against_every_choice_for_every_limit(bins):
    for seed in range(60):
        errors, seconds, default, random = problem(seed)
        errors, seconds = errors[:5], seconds[:5]
        ready = np.sort(random.random(len(errors)) * 2)
        limit = added(errors, default[:5]) or 1.0
        ends, choice_at = least_makespan(errors, seconds, ready, limit, bins)
        assert ends.size == bins + len(errors) + 1
        assert (np.diff(ends[np.isfinite(ends)]) <= 0).all()
        every = [
            (added(errors, choice), end_of(seconds, ready, choice))
            for choice in choices(errors)
            if all(row[place] <= limit for row, place in zip(errors, choice, strict=True))
        ]
        for place in range(bins + 1):
            budget = place * limit / bins
            exact = min((end for error, end in every if error <= budget), default=np.inf)
            # Errors are rounded up by less than a bin a bucket, and never down.
            assert ends[place + len(errors)] <= exact * (1 + 1e-12)
            looser = min((end for error, end in every if error <= budget * (1 + 1e-9) + 1e-300), default=np.inf)
            assert ends[place] >= looser * (1 - 1e-12)
            if np.isfinite(ends[place]):
                choice = choice_at(place)
                assert end_of(seconds, ready, choice) == pytest.approx(ends[place], rel=1e-12)
                assert added(errors, choice) <= budget * (1 + 1e-9) + 1e-300


def random_tradeoff(seed, buckets):
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


def everything(tradeoff):
    """Return each choice that loses no more than may be lost with its worth, one by one."""
    for place in np.ndindex(*[penalty.size for penalty in tradeoff.penalties]):
        behind = [penalty[row] for penalty, row in zip(tradeoff.penalties, place, strict=True)]
        lost = sum(entry * weight for entry, weight in zip(behind, tradeoff.weights, strict=True))
        if lost > tradeoff.limit or max(behind) > 2 * tradeoff.limit:
            continue
        end = -1e9
        for seconds_of_bucket, row, ready in zip(tradeoff.seconds, place, tradeoff.ready, strict=True):
            end = max(end, ready) + seconds_of_bucket[row]
        yield place, (tradeoff.compute_s + end) / (1 - lost) ** 2


@pytest.mark.parametrize("buckets", [1, 2, 4])
@pytest.mark.parametrize("seed", range(20))
def test_the_best_choice(seed, buckets):
    tradeoff = random_tradeoff(seed, buckets)
    found = tradeoff.best()
    times = dict(everything(tradeoff))
    assert times
    assert tradeoff.allows(found)
    assert tradeoff.cost(found) <= min(times.values()) * 1.04  # what is lost is cut into 400 parts
    assert tuple(found) not in times or tradeoff.cost(found) == pytest.approx(times[tuple(found)])


def test_no_bucket_loses_much_more_than_all():
    rows = [np.array([0.9, 0.0])] * 2, [np.array([0.0, 1.0])] * 2
    tradeoff = PlanTradeoff(*rows, [0.01, 0.99], [0.0, 0.0], compute_s=1.0, limit=0.3)
    assert tradeoff.best()[0] == 1  # its weight is small, but next to nothing of it would arrive
    assert not tradeoff.allows([0, 1])


def test_where_nothing_may_be_lost():
    tradeoff = PlanTradeoff([np.array([0.2, 0.0])], [np.array([0.1, 5.0])], [1.0], [0.0], compute_s=0.0, limit=0.0)
    assert tradeoff.best() == [1]


@pytest.mark.parametrize(
    ("seconds", "penalties", "selecting", "expected"),
    [
        ((1.0, 0.85), (0.0, 0.04), (), 0),  # 0.85 / 0.96**2 is 0.92
        ((1.0, 0.80), (0.0, 0.04), (), 1),
        ((1.0, 0.95), (0.0, 0.001), (), 1),
        ((1.0, 0.98), (0.0, 0.001), (), 0),
        ((1.0, 0.86, 0.95), (0.0, 0.04, 0.001), (), 2),  # the best one is not exact enough, and another one is
        ((1.0, 0.50, 0.48), (0.0, 0.04, 0.04), (2,), 1),  # what selects has to be a tenth better than what does not
        ((1.0, 0.50, 0.44), (0.0, 0.04, 0.04), (2,), 2),
        ((1.0, 0.85), (0.0, 0.0), (1,), 1),
    ],
)
def test_plans_pay_by_more_where_they_lose_something(seconds, penalties, selecting, expected):
    tradeoff = PlanTradeoff([np.array(penalties)], [np.array(seconds)], [1.0], [0.0], compute_s=0.0, limit=0.3)
    assert tradeoff.best_over([0], [np.isin(range(len(seconds)), selecting)]) == [expected]
    assert tradeoff.pays([expected], [0]) == (expected > 0)
