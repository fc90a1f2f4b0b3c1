import numpy as np
import pytest
from oracle import scaled_signs

from mpicomp import EFSign
from mpicomp.collectives import fitting
from mpicomp.testing import checks


@pytest.mark.parametrize("check", checks(EFSign()), ids=lambda check: check.__name__)
def test_laws(check):
    check()


@pytest.mark.parametrize(("numel", "expected"), [(0, 0), (1, 16), (64, 16), (65, 24), (1024, 136)])
def test_bytes(numel, expected):
    """Words of 64 signs, then a magnitude, padded to 8."""
    assert EFSign().packed_bytes(numel) == expected


def test_a_bit_an_element():
    for numel in (100_000, 10_000_019):
        assert numel / 8 <= EFSign().packed_bytes(numel) <= 1.02 * numel / 8


@pytest.mark.parametrize("numel", [1, 64, 100, 3000, 100_000])
def test_what_is_sent_is_what_the_oracle_says(numel):
    array = np.random.default_rng(numel).standard_t(3, numel)
    sent = np.empty(numel)
    lost = EFSign().pack(array, np.empty(EFSign().packed_bytes(numel), np.uint8), sent, 0)
    np.testing.assert_allclose(sent, scaled_signs(array, numel), rtol=1.2e-7)
    expected = np.square(array).sum() - np.abs(array).sum() ** 2 / numel
    np.testing.assert_allclose(lost, expected, rtol=1e-5, atol=1e-9 * np.square(array).sum())


def test_it_is_carried_in_two_phases():
    assert fitting(EFSign)[0] == "two-phase"
