"""Means of gradients in float16: what is too small is lost, a power of 2 saves it, and noise is of the same size."""

import pytest

torch = pytest.importorskip("torch")

import half_precision  # noqa: E402, it needs torch

GENERATOR = torch.Generator().manual_seed(0)


def test_what_is_too_small_is_lost_and_a_power_of_two_saves_it():
    gradient = torch.tensor([1.0, 2.0**-20, 2.0**-24, -(2.0**-26)])
    assert half_precision.share_of(gradient, 4, "float16", GENERATOR).tolist() == [0.25, 2.0**-22, 0.0, 0.0]
    scaled = half_precision.share_of(gradient, 4, "float16-scaled", GENERATOR).double() / 2**8
    assert torch.equal(scaled, gradient.double() / 4)
    assert half_precision.summed([scaled] * 4).tolist() == gradient.tolist()


def test_noise_has_the_size_of_rounding():
    gradient = torch.rand(10000, generator=GENERATOR) + 1
    exact = half_precision.share_of(gradient, 1, "float32", GENERATOR)
    errors = [
        (half_precision.share_of(gradient, 1, means, GENERATOR) / exact - 1).abs().max()
        for means in ("noise", "float16")
    ]
    assert errors == pytest.approx([2.0**-11] * 2, rel=0.05)


@pytest.mark.slow
def test_a_training_says_what_is_lost():
    exact, plain = (half_precision.train("digits", 0, 4, 2, means) for means in ("float32", "float16"))
    assert exact["zero"] == 0
    assert 0 <= plain["zero"] < plain["small"] < 1
    assert plain["quality"] == pytest.approx(exact["quality"], abs=0.1)
