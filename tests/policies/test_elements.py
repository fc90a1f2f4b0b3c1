"""What quantisers leave out, measured on ranks and told to all."""

import numpy as np
import oracle
import pytest

import mpicomp
from mpicomp.policies.surveys import Both, LossSurvey, SpectrumSurvey


def drawn(rank, numel):
    return np.random.default_rng(rank).standard_t(3, numel).astype(np.float32)


@pytest.mark.parametrize("dtype", [np.float32, np.float64])
def test_shares_are_what_the_oracle_leaves_out(dtype):
    survey = LossSurvey([mpicomp.OneBit(block=64), mpicomp.OneBit()])
    arrays = [drawn(rank, 5000).astype(dtype) for rank in range(3)]
    told = np.array([survey.measure(array, (5000,), 0) for array in arrays])
    assert told.shape == (3, survey.width((5000,)))
    energy = sum(np.square(array, dtype=float).sum() for array in arrays)
    for share, block in zip(survey.shares(told), (64, 1024), strict=True):
        lost = sum(np.square(array - oracle.scaled_signs(np.float64(array), block)).sum() for array in arrays)
        assert share == pytest.approx(lost / energy, rel=1e-5)


def test_some_parts_tell_of_all():
    array = drawn(0, 1 << 20)
    whole, some = LossSurvey([mpicomp.OneBit()]), LossSurvey([mpicomp.OneBit()], stride=8)
    [expected] = whole.shares(whole.measure(array, (array.size,), 0)[None])
    for step in range(8):
        told = some.measure(array, (array.size,), step)[None]
        assert some.shares(told)[0] == pytest.approx(expected, rel=0.05)
    # Over eight steps each part is looked at once.
    energies = sum(float(some.measure(array, (array.size,), step)[0]) for step in range(8))
    assert energies == pytest.approx(np.square(array, dtype=float).sum(), rel=1e-5)


def test_nothing_to_lose_and_what_is_not_finite():
    survey = LossSurvey([mpicomp.OneBit()])
    assert survey.shares(survey.measure(np.zeros(300, np.float32), (300,), 0)[None]) == [0.0]
    bad = np.ones(300, np.float32)
    bad[7] = np.nan
    assert not np.isfinite(survey.shares(survey.measure(bad, (300,), 0)[None])[0])


def test_two_surveys_in_one():
    sizes, array = (1000, 500), drawn(1, 1500)
    first, second = SpectrumSurvey(), LossSurvey([mpicomp.OneBit()])
    for both in (Both(first, second), Both(second, first)):
        told = both.measure(array, sizes, 3)
        assert told.size == both.width(sizes) == first.width(sizes) + 2
        energies = [np.square(part, dtype=float).sum() for part in np.split(array, [1000])]
        np.testing.assert_allclose(both.energies(told, sizes), energies, rtol=1e-5)
