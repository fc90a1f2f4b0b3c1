import math

import pytest
from mpicomp.bench.tasks.updating import warm_up_and_cosine


@pytest.mark.parametrize("steps", [1, 2, 7, 10, 60, 300])
def test_rates_are_those_of_the_formula(steps):
    rising = max(1, round(steps / 10))
    expected = [(step + 1) / rising for step in range(rising)]
    falling = steps - rising
    expected += [0.55 + 0.45 * math.cos(math.pi * step / falling) for step in range(1, falling + 1)]
    rates = [warm_up_and_cosine(step, steps) for step in range(steps)]
    assert rates == pytest.approx(expected, abs=1e-12)
    assert max(rates) == 1
    assert rates[-1] == pytest.approx(1 if steps == 1 else 0.1)


def test_rate_after_the_last_step_is_its_rate():
    assert warm_up_and_cosine(500, 300) == warm_up_and_cosine(299, 300)
