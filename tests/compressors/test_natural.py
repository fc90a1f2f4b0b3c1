import numpy as np

from mpicomp import Natural


def test_an_eighth_of_the_energy_is_lost_at_most():
    rng = np.random.default_rng(0)
    for array in (rng.normal(size=100_000), rng.standard_t(2, 100_000), rng.lognormal(sigma=5, size=100_000)):
        sent = np.empty_like(array)
        lost = Natural().pack(array, np.empty(Natural().packed_bytes(array.size), np.uint8), sent, 3)
        assert lost / np.square(array).sum() <= 1 / 8 * 1.1


def test_it_runs_without_feedback_and_may_run_with_it():
    assert Natural().unbiased
    assert Natural().contractive
    assert not Natural().feedback
