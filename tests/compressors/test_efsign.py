import numpy as np
import pytest
from oracle import scaled_signs

from mpicomp import EFSign


@pytest.mark.parametrize("numel", [1, 64, 100, 3000, 100_000])
def test_what_is_sent_is_what_the_oracle_says(numel):
    array = np.random.default_rng(numel).standard_t(3, numel)
    sent = np.empty(numel)
    lost = EFSign().pack(array, np.empty(EFSign().packed_bytes(numel), np.uint8), sent, 0)
    np.testing.assert_allclose(sent, scaled_signs(array, numel), rtol=1.2e-7)
    expected = np.square(array).sum() - np.abs(array).sum() ** 2 / numel
    np.testing.assert_allclose(lost, expected, rtol=1e-5, atol=1e-9 * np.square(array).sum())
