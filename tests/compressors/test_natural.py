import numpy as np
import pytest

from mpicomp import Natural
from mpicomp.testing import checks


@pytest.mark.parametrize("check", checks(Natural()), ids=lambda check: check.__name__)
def test_laws(check):
    check()


@pytest.mark.parametrize(("numel", "expected"), [(0, 0), (1, 16), (8, 16), (9, 24), (64, 72), (65, 88), (1024, 1152)])
def test_bytes(numel, expected):
    """Words of 64 signs, then exponents of a byte, padded to 8."""
    assert Natural().packed_bytes(numel) == expected


def test_nine_bits_an_element():
    for numel in (100_000, 10_000_019):
        assert 9 / 8 * numel <= Natural().packed_bytes(numel) <= 1.02 * 9 / 8 * numel
    assert Natural().wire_bytes_per_element(4) == 9 / 8


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
