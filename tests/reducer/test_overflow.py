"""Finite gradients that become infinite in an exchange are said to do so, on all ranks alike."""

import re

import numpy as np
import pytest
from worlds import Ranks

from mpicomp.errors import NonFiniteError


def messages(ranks, gradients):
    """Return what each rank's error says; ranks take turns, so each is driven to its own."""
    with pytest.raises(NonFiniteError) as caught:
        ranks.reduce(gradients)
    return str(caught.value)


@pytest.mark.parametrize(
    ("compressor", "collective"), [("dense", "allreduce"), ("dcttopk", "auto"), ("powersgd", "auto")]
)
def test_overflow_of_a_sum_names_the_compressor(compressor, collective):
    ranks = Ranks(2, compressor, collective)
    large = {"w": np.full((64, 64), 3e38, np.float32)}
    said = messages(ranks, [large, large])
    assert re.search(rf"gradients are finite, and {compressor} overflowed at step 0.*'w'", said)


def test_nonfinite_gradient_is_named():
    ranks = Ranks(2, "dense", "allreduce")
    said = messages(ranks, [{"w": np.full(9, np.inf, np.float32)}, {"w": np.ones(9, np.float32)}])
    assert "gradients must be finite" in said
    means = ranks.reduce([{"w": np.ones(9, np.float32)}] * 2)
    assert (means[0]["w"] == 1).all()


def test_nonfinite_bfloat16_is_named():
    torch = pytest.importorskip("torch")
    ranks = Ranks(2, "dense", "scatter-reduce")
    spoilt = {"w": torch.full((9,), torch.nan, dtype=torch.bfloat16)}
    assert "gradients must be finite" in messages(ranks, [spoilt, {"w": torch.ones(9, dtype=torch.bfloat16)}])
    large = {"w": torch.full((9,), 3e38, dtype=torch.bfloat16)}
    assert "gradients are finite, and dense overflowed" in messages(ranks, [large, large])
