import numpy as np
import pytest
from estimates import AWKWARD, select, sequences
from worlds import Ranks

from mpicomp import Context, Threshold


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
@pytest.mark.parametrize("limit", [0.0, 1e-42, 1e-6, 0.7, 2.0, 1e30, 1e300])
def test_what_reaches_the_limit_is_selected(dtype, limit):
    context = Context()
    for array in sequences(2000, dtype):
        array[[5, 77, 1999]] = [min(limit, 1e38), -min(limit, 1e38), np.nextafter(dtype(min(limit, 1e38)), dtype(0))]
        indices, _ = select(Threshold(limit=limit), array, context)
        with np.errstate(over="ignore"):
            expected = np.flatnonzero((np.abs(array) >= dtype(limit)) & (array != 0))
        assert indices.tolist() == expected.tolist()


@pytest.mark.parametrize("name", AWKWARD)
@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_awkward_arrays(name, dtype):
    with np.errstate(over="ignore", under="ignore"):
        array = AWKWARD[name].astype(dtype)
    context = Context()
    for _ in range(3):
        indices, _ = select(Threshold(limit=0.5), array, context)
        assert indices.tolist() == np.flatnonzero(~(np.abs(array) < 0.5)).tolist()


def test_what_adds_up_to_the_limit_is_sent():
    together = Ranks(2, Threshold(limit=1.0))
    gradient = np.array([0.375, -2.0, 0.0, 0.01], np.float32)
    sums = np.zeros(4)
    for _ in range(3):
        means = together.reduce([{"w": gradient}] * 2)
        sums += means[0]["w"]
    np.testing.assert_array_equal(sums, [1.125, -6.0, 0.0, 0.0])


def test_ten_standard_deviations_keep_about_one_percent():
    rng = np.random.default_rng(0)
    waiting, sent = np.zeros(4000), 0
    for step in range(400):
        waiting += rng.normal(size=4000)
        reached = np.abs(waiting) >= 10
        waiting[reached] = 0
        sent += np.count_nonzero(reached) if step >= 200 else 0
    assert 0.008 < sent / (200 * 4000) < 0.012


def test_one_percent_is_expected():
    assert Threshold().expected(1000) == 10
    assert Threshold().count(1000) is None
    assert Threshold(wire="fp16", indices="plain").wire_bytes_per_element(4) == pytest.approx(0.06, rel=1e-3)
