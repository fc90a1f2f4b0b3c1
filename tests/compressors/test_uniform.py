import numpy as np
import pytest
from worlds import Ranks

from mpicomp import Uniform
from mpicomp.errors import ConfigurationError
from mpicomp.testing import checks

FORMS = [
    Uniform(),
    Uniform(bits=1, rounding="stochastic"),
    Uniform(bits=3, bucket=64),
    Uniform(rounding="stochastic", bits=5),
]


@pytest.mark.parametrize(
    "check", [c for form in FORMS for c in checks(form)], ids=lambda c: f"{c.compressor}-{c.__name__}"
)
def test_laws(check):
    check()


@pytest.mark.parametrize("bits", [0, 9, 8.0, "8", None, True])
def test_bits_are_from_one_to_eight(bits):
    with pytest.raises(ConfigurationError, match=r"uniform: bits must be a whole number from 1 to 8, got "):
        Uniform(bits=bits)


@pytest.mark.parametrize("bucket", [0, 1, 100, 64.0, None])
def test_buckets_are_whole_words(bucket):
    with pytest.raises(ConfigurationError, match=r"uniform: bucket must be a multiple of 64, got "):
        Uniform(bucket=bucket)


@pytest.mark.parametrize("bits", range(1, 9))
@pytest.mark.parametrize("bucket", [64, 256, 1024])
def test_the_wire_takes_the_bits_that_were_promised(bits, bucket):
    for numel in (100_000, 1 << 20, 10_000_019):
        promised = (bits + 64 / bucket) * numel / 8
        assert promised <= Uniform(bits=bits, bucket=bucket).packed_bytes(numel) <= 1.02 * promised
    assert Uniform(bits=bits, bucket=bucket).wire_bytes_per_element(8) == bits / 8 + 8 / bucket


@pytest.mark.parametrize("bits", range(1, 9))
def test_what_contracts(bits):
    for bucket in (64, 128, 256, 512, 1 << 17, 1 << 20):
        for rounding in ("stochastic", "nearest"):
            compressor = Uniform(bits=bits, bucket=bucket, rounding=rounding)
            assert compressor.contractive == (bucket < 2 * (2**bits - 1) ** 2)
            assert compressor.feedback == (rounding == "nearest" and compressor.contractive)
            assert compressor.contractive_variant.contractive
            assert (compressor.contractive_variant is compressor) == compressor.contractive


@pytest.mark.parametrize(("bits", "bucket"), [(3, 64), (4, 256), (8, 4096)])
def test_the_worst_bucket_loses_what_the_class_says_and_no_more(bits, bucket):
    """Two ends on both sides of zero, and all others half a step from a point, as near to zero as that goes."""
    steps = 2**bits - 1
    array = np.full(bucket, 0.0)  # half a step from the two points beside it, since the number of steps is odd
    array[:2] = (-1.0, 1.0)
    message, sent = np.empty(Uniform(bits=bits, bucket=bucket).packed_bytes(bucket), np.uint8), np.empty(bucket)
    lost = Uniform(bits=bits, bucket=bucket).pack(array, message, sent, 0)
    assert lost == pytest.approx((bucket - 2) * (2 / steps) ** 2 / 4, rel=1e-4)
    assert lost < np.square(array).sum()


def test_too_few_bits_are_refused_under_feedback_with_a_form_that_works():
    assert not Uniform(bits=2).feedback
    with pytest.raises(ConfigurationError, match=r"or use Uniform\(bits=3, bucket=64\)"):
        Ranks(1, Uniform(bits=2), feedback=True)
    assert Ranks(1, Uniform(bits=3, bucket=64)).reducers[0].feedback
