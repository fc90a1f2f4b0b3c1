import numpy as np
import pytest
from worlds import Ranks

from mpicomp import QSGD
from mpicomp.errors import ConfigurationError


def packed(compressor, array, key=0):
    sent = np.empty_like(array)
    lost = compressor.pack(array, np.empty(compressor.packed_bytes(array.size), np.uint8), sent, key)
    return sent, lost


@pytest.mark.parametrize("bits", [2, 3, 4, 6])
@pytest.mark.parametrize("bucket", [64, 128, 512])
def test_variance_in_the_l2_form_is_within_the_published_bound(bits, bucket):
    points = 2 ** (bits - 1) - 1
    bound = min(bucket / points**2, np.sqrt(bucket) / points)
    rng = np.random.default_rng(bits)
    for array in (rng.normal(size=100 * bucket), rng.standard_t(2, 100 * bucket), np.ones(100 * bucket)):
        lost = np.mean([packed(QSGD(bits=bits, bucket=bucket, norm="l2"), array, key)[1] for key in range(5)])
        assert lost <= bound * np.square(array).sum()
        assert lost <= bucket / (4 * points**2) * np.square(array).sum() * 1.02  # what the class says of it


@pytest.mark.parametrize("bits", range(2, 9))
def test_what_contracts(bits):
    points = 2 ** (bits - 1) - 1
    for bucket in (64, 128, 256, 512, 1024, 4096, 65536, 1 << 20):
        for norm in ("max", "l2"):
            for rounding in ("stochastic", "nearest"):
                compressor = QSGD(bits=bits, bucket=bucket, norm=norm, rounding=rounding)
                always = norm == "max" and rounding == "nearest"
                assert compressor.contractive == (always or bucket < 4 * points**2)
                assert compressor.unbiased == (rounding == "stochastic")
                assert compressor.feedback == (rounding == "nearest" and compressor.contractive)
                assert compressor.contractive_variant.contractive
                assert (compressor.contractive_variant is compressor) == compressor.contractive


def test_equal_elements_below_half_a_step_would_never_be_sent():
    """Which is why the L2 form to the nearest point is refused for buckets that long."""
    array = np.ones(1024)
    assert not packed(QSGD(bits=4, bucket=1024, norm="l2", rounding="nearest"), array)[0].any()
    assert not QSGD(bits=4, bucket=1024, norm="l2", rounding="nearest").contractive
    assert packed(QSGD(bits=4, bucket=128, norm="l2", rounding="nearest"), array)[0].all()


def test_feedback_is_refused_with_a_form_that_works():
    refused = QSGD(bits=4, bucket=512, norm="l2")
    with pytest.raises(
        ConfigurationError, match=r"qsgd: .* is not contractive.* leave feedback out, or use QSGD"
    ) as caught:
        Ranks(1, refused, feedback=True)
    named = eval(str(caught.value).split(", or use ")[1], {"QSGD": QSGD})
    assert named == QSGD(bits=4, bucket=512, norm="max", rounding="nearest")
    assert Ranks(1, named, feedback=True).reducers[0].feedback
    assert not Ranks(1, refused).reducers[0].feedback


def residuals(compressor, steps, numel=4096):
    """Norms of a rank's residual over that of a gradient, step by step."""
    together = Ranks(2, compressor, "packed-allgather", feedback=True)
    rng = np.random.default_rng(0)
    norms = []
    for _ in range(steps):
        together.reduce([{"w": rng.normal(size=numel)} for _ in range(2)])
        norms.append(float(np.linalg.norm(together.residuals("w")[0])) / np.sqrt(numel))
    return norms


def test_what_is_refused_diverges(monkeypatch):
    """With the L2 norm at 4 bits over 4096 elements, some sqrt(4096) / 7 times the energy is lost in a step."""
    monkeypatch.setattr(QSGD, "contractive", True)
    norms = residuals(QSGD(bits=4, bucket=4096, norm="l2"), 30)
    assert norms[-1] > 1000
    assert norms[-1] > 3 * norms[14]


@pytest.mark.parametrize(
    "compressor", [QSGD(), QSGD(norm="l2"), QSGD(bits=4, bucket=4096, rounding="nearest")], ids=str
)
def test_what_contracts_does_not(compressor):
    assert max(residuals(compressor, 60)) < 2


def test_ranks_and_steps_draw_numbers_of_their_own():
    """Errors of ranks that round the same array would otherwise add up, and not average out."""
    array = np.random.default_rng(0).normal(size=4096)
    together = Ranks(2, QSGD(), "packed-allgather")
    errors = [together.reduce([{"w": array}] * 2)[0]["w"] - array for _ in range(2)]
    alone = packed(QSGD(), array)[0] - array
    assert np.square(errors[0]).sum() < 0.7 * np.square(alone).sum()
    assert abs(np.corrcoef(errors[0], errors[1])[0, 1]) < 5 / np.sqrt(array.size)
