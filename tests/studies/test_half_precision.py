"""Means of gradients in float16: what is too small is lost, and a power of 2 saves it."""

import pytest

torch = pytest.importorskip("torch")

import half_precision  # noqa: E402, it needs torch


def test_what_is_too_small_is_lost_and_a_power_of_two_saves_it():
    gradient = torch.tensor([1.0, 2.0**-20, 2.0**-24, -(2.0**-26)])
    assert half_precision.divided(gradient, 4, 0).tolist() == [0.25, 2.0**-22, 0.0, 0.0]
    scaled = half_precision.divided(gradient, 4, 8).double() / 2**8
    assert torch.equal(scaled, gradient.double() / 4)
    assert half_precision.summed([scaled] * 4).tolist() == gradient.tolist()


@pytest.mark.slow
def test_a_training_says_what_is_lost():
    exact, plain = (half_precision.train("digits", 0, 4, 2, power) for power in (None, 0))
    assert exact["zero"] == 0
    assert 0 <= plain["zero"] < plain["small"] < 1
    assert plain["quality"] == pytest.approx(exact["quality"], abs=0.1)
